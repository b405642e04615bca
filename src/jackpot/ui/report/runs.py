"""Finds runs in folders, reads them and groups them into arms.

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
from jackpot.config.config import Config
from jackpot.core.errors import DataError
from jackpot.training.run_folder.folder import RunFolder, is_evaluation, run_config

_NOT_OF_THE_ARM = ("seed", "threads", "description")
_SEED = re.compile(r"[-_.]?seed[-_]?\d+")
_MISSING = "(none)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Holds the settings, metrics and events of one run."""

    name: str  # path of the folder below the folder that contains all runs
    folder: Path
    config: Config
    lines: Sequence[Mapping[str, Any]]  # lines of metrics.jsonl
    events: Sequence[Mapping[str, Any]]  # lines of events.jsonl

    @property
    def iteration(self) -> int:
        """Return the newest iteration in metrics.jsonl; -1 before the first evaluation."""
        return self.lines[-1]["iteration"] if self.lines else -1

    @property
    def finished(self) -> bool:
        """Return whether the last iteration is in metrics.jsonl."""
        return self.iteration >= self.config.iterations


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """Groups runs with equal settings and different seeds."""

    name: str
    runs: tuple[Run, ...]


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Return the run folders among `paths` and, at any depth, inside those that are not run folders, each once.

    Raises:
        DataError: a path is not a run folder and contains none, nor an evaluation; or there are evaluations alone.
    """
    found = _folders(paths)
    if runs := [folder for folder in found if not is_evaluation(folder)]:
        return runs
    raise DataError(
        f"there is no run, only folders of `jackpot eval`, whose results are in summary.json: "
        f"{', '.join(map(str, found))}; give the folder that train printed"
    )


def find_evaluations(paths: Sequence[Path]) -> list[Path]:
    """Return the folders of `jackpot eval` that stand where `find_runs` finds runs."""
    return list(filter(is_evaluation, _folders(paths)))


def _folders(paths: Sequence[Path]) -> list[Path]:
    """Return the folders of runs and evaluations among `paths` and below them, each once."""
    found: dict[Path, None] = {}
    for path in paths:
        folders = [path] if _has_config(path) else sorted(_below(path))
        if not folders:
            raise DataError(
                f"{path} is not a run folder and contains none: no config.yaml; give the folder that train printed, "
                f"or a folder that contains several of them"
            )
        found |= dict.fromkeys(Path(os.path.abspath(folder)) for folder in folders)
    return list(found)


def _has_config(folder: Path) -> bool:
    return (folder / "config.yaml").is_file()


def _below(folder: Path) -> Iterator[Path]:
    """Yield the folders of runs and evaluations below a folder, without those inside one of them, in hidden folders or
    behind links."""
    for parent, names, _ in os.walk(folder):
        inside = [name for name in names if not name.startswith(".")]
        found = {name for name in inside if _has_config(Path(parent, name))}
        yield from (Path(parent, name) for name in found)
        names[:] = [name for name in inside if name not in found]


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read settings, metrics and events of runs; a run that has just begun has no lines."""
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
    members: dict[str, list[Run]] = {}
    for run in runs:
        members.setdefault(json.dumps(settings(run.config), sort_keys=True), []).append(run)
    groups = list(members.values())
    names = [_common_name(group) for group in groups]
    return [Arm(name=name, runs=tuple(group)) for name, group in zip(_distinct(names, groups), groups, strict=True)]


def settings(config: Config) -> dict[str, Any]:
    """Return the settings that define an arm as a flat dict such as {"batch.prompts": 32}."""
    return {
        key: value for key, value in flat(json.loads(config.model_dump_json())).items() if key not in _NOT_OF_THE_ARM
    }


def differing(groups: Sequence[Sequence[Run]]) -> dict[str, list[str]]:
    """Return the settings that are not equal in all groups: key and the value of each group as text."""
    of_groups = [settings(group[0].config) for group in groups]
    keys = dict.fromkeys(key for one in of_groups for key in one)
    rows = {key: [_text(one[key]) if key in one else _MISSING for one in of_groups] for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def _common_name(group: Sequence[Run]) -> str:
    names = list(dict.fromkeys(_SEED.sub("", run.name).strip("-_./") for run in group))
    return names[0] or group[0].folder.parent.name or "run"


def _distinct(names: Sequence[str], groups: Sequence[Sequence[Run]]) -> list[str]:
    distinct = list(names)
    for name in dict.fromkeys(names):
        same = [number for number, other in enumerate(names) if other == name]
        if len(same) == 1:
            continue
        rows = differing([groups[number] for number in same])
        for index, number in enumerate(same):
            differences = ", ".join(f"{key}={values[index]}" for key, values in list(rows.items())[:3])
            distinct[number] = f"{name} ({differences})"
    return [name if distinct.index(name) == number else f"{name} #{number + 1}" for number, name in enumerate(distinct)]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
