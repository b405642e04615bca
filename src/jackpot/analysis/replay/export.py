"""`jackpot export`: writes the saved rollouts of a run in the formats of other trainers, or some of them in ours.

Status: supported.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow.parquet as pq

from jackpot.analysis.replay.formats import WRITABLE
from jackpot.analysis.replay.formats.base import DumpWriter
from jackpot.core.errors import ConfigError, DataError, unknown_name
from jackpot.core.files import cause_of, whole_file
from jackpot.training.run_folder.folder import run_config
from jackpot.training.run_folder.saved_rollouts import (
    RolloutFile,
    UnreadableRollouts,
    flat_column,
    list_rollout_files,
    read_columns,
)

OURS = "jackpot"  # the format of a run's own files
_ROWS = 64  # responses that are written at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What an export has written."""

    files: tuple[Path, ...]
    responses: int
    tokens: int
    lost: str  # columns that the format does not have
    problems: tuple[str, ...]  # files of the run that are left out


def export_rollouts(
    run: Path,
    name: str,
    out: Path,
    listen: Callable[[int], None] = lambda _: None,
    *,
    iteration: int | None = None,
    sample: str | None = None,
) -> Exported:
    """Write every saved iteration of a run as a file of another format, or of ours, with all columns and settings.

    Args:
        run: the folder of a run.
        name: of a format that is written.
        out: a folder that is empty or not there yet.
        iteration: the one that is written; None: all.
        sample: uid of the response that is written; None: all.
        listen: called with the number of responses written so far.

    Raises:
        CheckpointError: no run.
        ConfigError: a format that is not written, or a folder that is not empty.
        DataError: no saved rollouts, or a file that cannot be written.
    """
    if name not in (OURS, *WRITABLE):
        raise ConfigError(unknown_name("format to write", name, [OURS, *WRITABLE]))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already; give --out a folder that is empty or does not exist")

    run_config(run)
    saved, problems = list_rollout_files(run)
    if iteration is not None and iteration not in (numbers := [file.iteration for file in saved]):
        raise DataError(f"iteration {iteration} is not saved; saved are {', '.join(map(str, numbers)) or 'none'}")
    written: dict[Path, RolloutFile] = {}
    for file in saved if iteration is None else [file for file in saved if file.iteration == iteration]:
        try:
            rows = None if sample is None else _numbers_of(file, sample)
            if rows is None or rows:
                written |= _write(WRITABLE.get(name), file, out, rows)
        except UnreadableRollouts as error:
            problems.append(str(error))
        listen(sum(done.responses for done in written.values()))
    if sample is not None and not written and not problems:
        raise DataError(f"no saved response has the uid {sample!r}; `jackpot report {run}` shows the uids of responses")
    if not written:
        why = "; ".join(problems) or "rollouts.every and rollouts.keep decide what a run saves"
        raise DataError(f"{run} has no saved rollouts to export: {why}")
    return Exported(
        files=tuple(written),
        responses=sum(file.responses for file in written.values()),
        tokens=sum(file.tokens for file in written.values()),
        lost=WRITABLE[name].lost if name in WRITABLE else "nothing",
        problems=tuple(problems),
    )


def _numbers_of(file: RolloutFile, sample: str) -> list[int]:
    """Return the rows of a file that have a uid."""
    uids = read_columns(file, ["uid"])["uid"].to_pylist()
    return [row for row, uid in enumerate(uids) if uid == sample]


def _write(writer: DumpWriter | None, file: RolloutFile, out: Path, rows: list[int] | None) -> dict[Path, RolloutFile]:
    """Write the rows of an iteration, all with None, and return what is written by its path; no writer: as ours."""
    path = out / (writer.file_name.format(file.iteration) if writer else file.path.name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as partial:
            table = read_columns(file, writer and list(writer.columns), rows)
            if writer is None:
                pq.write_table(table, partial, compression="zstd")  # with the schema version and the run's settings
            else:
                with partial.open("w") as lines:
                    for part in table.to_batches(_ROWS):
                        records = (writer.record(file.iteration, row) for row in part.to_pylist())
                        lines.writelines(json.dumps(record) + "\n" for record in records)
    except OSError as error:
        raise DataError(f"cannot write {path} of {file.path}: {cause_of(error)}") from error
    counts = {"responses": len(table), "tokens": len(flat_column(table, "token_ids"))}
    return {path: replace(file, **counts)}
