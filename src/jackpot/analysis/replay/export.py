"""`jackpot export`: the saved rollouts of a run, written in the formats of other trainers or in our own.

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
_ROWS = 64  # responses in memory at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """The result of an export: what was written, and what was left out."""

    files: tuple[Path, ...]
    responses: int  # number of responses written
    tokens: int  # number of response tokens written
    lost: str  # text that names our columns that the format does not have
    problems: tuple[str, ...]  # sentences that say which files of the run are left out, and why


def export_rollouts(
    run: Path,
    name: str,
    out: Path,
    listen: Callable[[int], None] = lambda _: None,
    *,
    iteration: int | None = None,
    sample: str | None = None,
) -> Export:
    """Write every saved iteration of a run as a file of another format, or of our own with all columns and settings.

    Args:
        run: the run folder.
        name: name of the format, OURS or one of WRITABLE.
        out: folder of the new files; it must be empty or not exist yet.
        listen: function that is called with the number of responses written so far.
        iteration: the only iteration that is written; None: all.
        sample: uid of the only response that is written; None: all.

    Raises:
        CheckpointError: the folder has no run.
        ConfigError: a format that cannot be written, or a folder that is not empty.
        DataError: no saved rollouts, or none of `iteration` or `sample`; or a file that cannot be written.
    """
    if name not in (OURS, *WRITABLE):
        raise ConfigError(unknown_name("format to write", name, [OURS, *WRITABLE]))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already; give --out a folder that is empty or does not exist")

    run_config(run)  # raises CheckpointError for a folder that has no run
    saved, problems = list_rollout_files(run)
    chosen = saved if iteration is None else [file for file in saved if file.iteration == iteration]
    if iteration is not None and not chosen:
        iterations = ", ".join(str(file.iteration) for file in saved)
        raise DataError(f"iteration {iteration} is not saved; saved are {iterations or 'none'}")

    written: list[RolloutFile] = []
    for file in chosen:
        try:
            rows = None if sample is None else _rows_with_uid(file, sample)
            if rows is None or rows:  # else the file has no response with the uid `sample`
                written.append(_write(WRITABLE.get(name), file, out, rows))
        except UnreadableRollouts as error:
            problems.append(str(error))
        listen(sum(file.responses for file in written))

    if sample is not None and not written and not problems:
        raise DataError(f"no saved response has the uid {sample!r}; `jackpot report {run}` shows the uids of responses")
    if not written:
        why = "; ".join(problems) or "rollouts.every and rollouts.keep decide what a run saves"
        raise DataError(f"{run} has no saved rollouts to export: {why}")

    return Export(
        files=tuple(file.path for file in written),
        responses=sum(file.responses for file in written),
        tokens=sum(file.tokens for file in written),
        lost=WRITABLE[name].lost if name in WRITABLE else "",
        problems=tuple(problems),
    )


def _rows_with_uid(file: RolloutFile, sample: str) -> list[int]:
    """Return the indices of the rows of a saved iteration whose uid is `sample`."""
    uids = read_columns(file, ["uid"])["uid"].to_pylist()
    return [row for row, uid in enumerate(uids) if uid == sample]


def _write(writer: DumpWriter | None, file: RolloutFile, out: Path, rows: list[int] | None) -> RolloutFile:
    """Write rows of one saved iteration to a new file, and return the new file.

    Args:
        writer: the format that is written; None: ours.
        file: the saved iteration.
        out: folder of the new file.
        rows: indices of the rows; None: all.
    """
    path = out / (writer.file_name.format(file.iteration) if writer else file.path.name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as partial:
            table = read_columns(file, writer and list(writer.columns), rows)  # all columns if `writer` is None
            if writer is None:
                pq.write_table(table, partial, compression="zstd")  # its metadata have the settings of the run
            else:
                with partial.open("w") as lines:
                    for batch in table.to_batches(_ROWS):
                        records = (writer.record(file.iteration, row) for row in batch.to_pylist())
                        lines.writelines(json.dumps(record) + "\n" for record in records)
    except OSError as error:
        raise DataError(f"cannot write {path} of {file.path}: {cause_of(error)}") from error

    return replace(file, path=path, responses=len(table), tokens=len(flat_column(table, "token_ids")))
