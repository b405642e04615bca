"""The files of saved rollouts of a run, as they are found: pruned while one reads, cut short, or whole. Layer 6."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from jackpot.errors import DataError
from jackpot.rollout_files import SCHEMA_VERSION


class UnreadableRollouts(DataError):
    """A file of saved rollouts that is not what was written; the message names it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    path: Path
    iteration: int
    responses: int
    tokens: int


def saved_files(run: Path) -> tuple[list[Saved], list[str]]:
    """Those of a run by iteration, and a sentence about each that cannot be read."""
    found, unreadable = [], []
    for path in sorted((run / "rollouts").glob("iteration-*.parquet")):
        try:
            found.append(open_saved(path))
        except UnreadableRollouts as error:
            unreadable.append(str(error))
    return found, unreadable


def read_columns(saved: Saved, columns: Sequence[str] | None = None, rows: Sequence[int] | None = None) -> pa.Table:
    """These columns and rows of a file; all where None.

    Raises:
        UnreadableRollouts: it is damaged behind its footer, lacks a column, or is gone by now.
    """
    try:
        if missing := set(columns or ()) - set(pq.read_schema(saved.path).names):
            raise UnreadableRollouts(_why(saved.path, f"it has no column {', '.join(sorted(missing))}"))
        table = pq.read_table(saved.path, columns=columns)
    except (OSError, pa.ArrowException) as error:
        raise UnreadableRollouts(_why(saved.path, error)) from error
    return table if rows is None else table.take(pa.array(rows, pa.int64()))


def flat(table: pa.Table, column: str) -> np.ndarray:
    """[tokens] of all responses behind each other."""
    chunks = [chunk.flatten().to_numpy(zero_copy_only=False) for chunk in table.column(column).chunks]
    return np.concatenate(chunks) if chunks else np.empty(0)


def open_saved(path: Path) -> Saved:
    """What the footer of one file says. UnreadableRollouts where it is damaged or of another schema version."""
    try:
        file = pq.ParquetFile(path)
        version = (file.schema_arrow.metadata or {}).get(b"schema_version", b"none").decode()
        if version != str(SCHEMA_VERSION):
            raise UnreadableRollouts(_why(path, f"its schema version is {version}, this one reads {SCHEMA_VERSION}"))
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        columns = [group.column(place) for group in groups for place in range(group.num_columns)]
        tokens = sum(column.num_values for column in columns if column.path_in_schema.startswith("token_ids."))
        iteration = int(path.stem.split("-")[1])
        return Saved(path=path, iteration=iteration, responses=file.metadata.num_rows, tokens=tokens)
    except (OSError, pa.ArrowException, ValueError) as error:
        if isinstance(error, UnreadableRollouts):
            raise
        raise UnreadableRollouts(_why(path, error)) from error


def _why(path: Path, why: object) -> str:
    return f"{path.parent.parent.name}/rollouts/{path.name} cannot be read and is left out: {str(why).splitlines()[0]}"
