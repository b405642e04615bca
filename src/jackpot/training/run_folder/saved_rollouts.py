"""The files of saved rollouts, one for each saved iteration: they are listed, read and thinned out here.

The module needs no torch, so that commands which read a run start in a second. `rollouts.py` writes the files.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jackpot.core.errors import DataError, first_line
from jackpot.core.foreign import check_foreign, table_batches

SCHEMA_VERSION = 1
_FILE_NAME = re.compile(r"iteration-\d{6,}\.parquet")


class UnreadableRollouts(DataError):
    """The error of a file of saved rollouts that is damaged or of another schema version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutFile:
    """A file of saved rollouts, with its size in responses and tokens."""

    path: Path
    iteration: int
    responses: int  # number of responses in the file
    tokens: int  # number of response tokens in the file


def list_rollout_files(run: Path) -> tuple[list[RolloutFile], list[str]]:
    """List the files of saved rollouts in a run folder by iteration, with a sentence about each unreadable one."""
    files, unreadable = [], []
    for path in sorted((run / "rollouts").glob("iteration-*.parquet")):
        try:
            files.append(open_rollout_file(path))
        except UnreadableRollouts as error:
            unreadable.append(str(error))
    return files, unreadable


def read_columns(
    file: RolloutFile, columns: Sequence[str] | None = None, rows: Sequence[int] | None = None
) -> pa.Table:
    """Read columns and rows of a file of saved rollouts.

    Args:
        columns: names of the columns; None: all.
        rows: indices of the rows; None: all.

    Raises:
        UnreadableRollouts: the file is damaged, lacks a column, or exists no more.
    """
    try:
        schema = pq.read_schema(check_foreign(file.path))
        names = schema.names if columns is None else columns
        if missing := set(names) - set(schema.names):
            raise UnreadableRollouts(_why(file.path, f"it has no column {', '.join(sorted(missing))}"))

        chosen = pa.schema([schema.field(name) for name in names], schema.metadata)
        table = pa.Table.from_batches(table_batches(file.path, names), chosen)
    except (OSError, pa.ArrowException) as error:
        raise UnreadableRollouts(_why(file.path, first_line(error))) from error
    return table if rows is None else table.take(pa.array(rows, pa.int64()))


def flat_column(table: pa.Table, column: str) -> np.ndarray:
    """Concatenate a list column over all responses into one array, with an entry for each token."""
    chunks = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in table.column(column).chunks]
    return np.concatenate(chunks) if chunks else np.empty(0)


def open_rollout_file(path: Path) -> RolloutFile:
    """Read the footer of a file of saved rollouts, which tells how many responses and tokens the file holds.

    Raises:
        UnreadableRollouts: the file is damaged or of another schema version.
    """
    try:
        file = pq.ParquetFile(check_foreign(path))
        version = (file.schema_arrow.metadata or {}).get(b"schema_version", b"none").decode()
        if version != str(SCHEMA_VERSION):
            raise UnreadableRollouts(_why(path, f"its schema version is {version}, this one reads {SCHEMA_VERSION}"))

        groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
        columns = [group.column(index) for group in groups for index in range(group.num_columns)]
        # The file calls the values of the list column token_ids, one for each token, token_ids.list.element.
        tokens = sum(column.num_values for column in columns if column.path_in_schema.startswith("token_ids."))
        return RolloutFile(
            path=path, iteration=int(path.stem.split("-")[1]), responses=file.metadata.num_rows, tokens=tokens
        )
    except UnreadableRollouts:
        raise
    except (OSError, pa.ArrowException, ValueError) as error:
        raise UnreadableRollouts(_why(path, first_line(error))) from error


def thin_rollouts(folder: Path, keep: int) -> None:
    """Remove files of saved rollouts until `keep` are left, as evenly spaced in iterations as possible.

    The first and the newest file stay. Each time the file goes whose removal leaves the smallest gap, so that no gap is
    twice as wide as equal gaps would be. If `keep` is more than 2, the file of the best checkpoint stays too, whatever
    gaps that leaves.
    """
    files = {int(path.stem.split("-")[1]): path for path in folder.iterdir() if _FILE_NAME.fullmatch(path.name)}
    while len(files) > keep:
        iterations = sorted(files)
        # The gap that the removal of each file but the first and the newest would leave, in iterations. The zip ends
        # with its shortest list: the newest file has no later neighbour.
        neighbours = zip(iterations, iterations[1:], iterations[2:], strict=False)
        gaps = {iteration: after - before for before, iteration, after in neighbours}
        if keep > 2 and (best := best_rollouts(folder.parent, iterations)) is not None:
            gaps.pop(best, None)
        removed = min(gaps, key=gaps.__getitem__) if keep > 1 else iterations[0]  # with `keep` 1, the oldest goes
        files.pop(removed).unlink()


def best_rollouts(run: Path, iterations: Sequence[int]) -> int | None:
    """Return the last of `iterations` up to the iteration of the run's best checkpoint.

    Return None if the run has no best checkpoint, or if all `iterations` come after it.

    Args:
        run: the run folder.
    """
    link = run / "checkpoints" / "best"  # leads to step-N, the checkpoint of iteration N
    best = int(link.readlink().name.split("-")[1]) if link.is_symlink() else -1
    return max((iteration for iteration in iterations if iteration <= best), default=None)


def _why(path: Path, why: str) -> str:
    """Return a sentence that says which file cannot be read, and why."""
    return f"{path.parent.parent.name}/rollouts/{path.name} cannot be read and is left out: {why}"
