"""Finds runs in folders, reads them, and groups them into arms.

Runs whose settings differ only in seed, threads and description are one arm.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jackpot.config.build import flat
from jackpot.config.changes import settings_of
from jackpot.config.config import Config
from jackpot.core.errors import DataError
from jackpot.training.run_folder.folder import RunFolder, is_evaluation, run_config

_NOT_OF_THE_ARM = ("seed", "threads", "description")  # settings in which the runs of an arm may differ
_SEED = re.compile(r"[-_.]?seed[-_]?\d+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run: its settings, metrics and events."""

    name: str  # path of the run's folder, relative to the folder that contains all runs
    folder: Path
    config: Config
    lines: Sequence[Mapping[str, Any]]  # lines of metrics.jsonl
    events: Sequence[Mapping[str, Any]]  # lines of events.jsonl

    @property
    def iteration(self) -> int:
        """Return the newest iteration in metrics.jsonl; -1 before the first evaluation."""
        return self.lines[-1]["iteration"] if self.lines else -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """The runs of an arm: they have equal settings and different seeds."""

    name: str
    runs: tuple[Run, ...]


def find_runs(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Find runs among `paths` and, at any depth, inside those paths that are no run folders.

    Returns:
        The folders of runs, and those of `jackpot eval`, as absolute paths, each once.

    Raises:
        DataError: a path contains neither a run nor an evaluation, or there are evaluations only.
    """
    folders: list[Path] = []
    for path in paths:
        inside = [path] if _has_config(path) else sorted(_below(path))
        if not inside:
            raise DataError(
                f"{path} is not a run folder and contains none: no config.yaml; give the folder that train printed, "
                f"or a folder that contains several of them"
            )
        folders += [Path(os.path.abspath(folder)) for folder in inside]

    folders = list(dict.fromkeys(folders))
    evaluations = list(filter(is_evaluation, folders))
    runs = [folder for folder in folders if folder not in evaluations]
    if not runs:
        raise DataError(
            f"there is no run, only folders of `jackpot eval`, whose results are in summary.json: "
            f"{', '.join(map(str, evaluations))}; give the folder that train printed"
        )
    return runs, evaluations


def _has_config(folder: Path) -> bool:
    """Return whether a folder is that of a run or an evaluation."""
    return (folder / "config.yaml").is_file()


def _below(folder: Path) -> Iterator[Path]:
    """Yield the folders of runs and evaluations below a folder.

    Links, hidden folders and the insides of runs are not searched.
    """
    for parent, names, _ in os.walk(folder):
        visible = [name for name in names if not name.startswith(".")]
        runs = {name for name in visible if _has_config(Path(parent, name))}
        yield from (Path(parent, name) for name in runs)
        names[:] = [name for name in visible if name not in runs]  # os.walk goes on into these


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read the settings, metrics and events of runs; a run that has just begun has no lines of metrics."""
    base = common_folder(folders)
    runs = []
    for folder in folders:
        files = RunFolder(folder)
        runs.append(
            Run(
                name=str(folder.relative_to(base)),
                folder=folder,
                config=run_config(folder),
                lines=files.read("metrics.jsonl"),
                events=files.read("events.jsonl"),
            )
        )
    return runs


def common_folder(folders: Sequence[Path]) -> Path:
    """Return the deepest folder that contains all of these absolute folders."""
    return Path(os.path.commonpath([folder.parent for folder in folders]))


def arms_of(runs: Sequence[Run]) -> list[Arm]:
    """Group runs into arms, in the order of their first runs; arms of one name are labeled by differing settings."""
    by_settings: dict[str, list[Run]] = {}
    for run in runs:
        by_settings.setdefault(json.dumps(settings(run.config), sort_keys=True), []).append(run)
    groups = list(by_settings.values())
    return [Arm(name=name, runs=tuple(group)) for name, group in zip(_names(groups), groups, strict=True)]


def settings(config: Config) -> dict[str, Any]:
    """Return the settings that define an arm as a flat dict such as {"batch.prompts": 32}."""
    return {key: value for key, value in flat(settings_of(config)).items() if key not in _NOT_OF_THE_ARM}


def differing(groups: Sequence[Sequence[Run]]) -> dict[str, list[str]]:
    """Return the settings that differ between groups of runs: by key, the value in each group as text."""
    # For each group the text of each setting's value in the first run; the other runs of the group have the same.
    setting_texts = [
        {key: value if isinstance(value, str) else json.dumps(value) for key, value in settings(run.config).items()}
        for run, *_ in groups
    ]

    differing_settings = {}
    for key in dict.fromkeys(key for group_settings in setting_texts for key in group_settings):
        values = [group_settings.get(key, "(none)") for group_settings in setting_texts]
        if len(set(values)) > 1:
            differing_settings[key] = values
    return differing_settings


def _common_name(group: Sequence[Run]) -> str:
    """Return the name of an arm's first run without the seed; if nothing is left, the name of the parent folder."""
    return _SEED.sub("", group[0].name).strip("-_./") or group[0].folder.parent.name or "run"


def _names(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Return a distinct name for each arm: that of its folders; arms that share it also get settings that differ."""
    folder_names = list(map(_common_name, groups))
    names = folder_names.copy()
    for name in dict.fromkeys(folder_names):
        indices = [index for index, folder_name in enumerate(folder_names) if folder_name == name]
        if len(indices) > 1:  # these arms share a name: add up to three settings in which they differ
            settings_by_key = list(differing([groups[index] for index in indices]).items())[:3]
            for place, index in enumerate(indices):  # `values` has a value for each of `indices`
                names[index] = f"{name} ({', '.join(f'{key}={values[place]}' for key, values in settings_by_key)})"
    # Names that are still equal get a number.
    return [name if names.index(name) == index else f"{name} #{index + 1}" for index, name in enumerate(names)]
