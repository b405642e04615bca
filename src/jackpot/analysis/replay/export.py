"""`jackpot export`: writes the saved rollouts of a run in the formats of other trainers.

Status: supported.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from jackpot.analysis.replay.formats import WRITABLE
from jackpot.analysis.replay.formats.base import DumpWriter
from jackpot.analysis.replay.formats.records import DumpRecord
from jackpot.core.errors import ConfigError, DataError, unknown_name
from jackpot.core.files import cause_of, whole_file
from jackpot.training.run_folder.folder import run_config
from jackpot.training.run_folder.rollouts import RolloutFile, UnreadableRollouts, list_rollout_files

_ROWS = 64  # responses in memory at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What an export has written."""

    files: tuple[Path, ...]
    responses: int
    tokens: int
    lost: str  # columns that the format does not have
    problems: tuple[str, ...]  # files of the run that are left out


def export_rollouts(run: Path, name: str, out: Path, listen: Callable[[int], None] = lambda _: None) -> Exported:
    """Write every saved iteration of a run as a file of another format.

    Args:
        run: the folder of a run.
        name: of a format that is written.
        out: a folder that is empty or not there yet.
        listen: called with the number of responses written so far.

    Raises:
        CheckpointError: no run.
        ConfigError: a format that is not written, or a folder that is not empty.
        DataError: no saved rollouts, or a file that cannot be written.
    """
    if name not in WRITABLE:
        raise ConfigError(unknown_name("format to write", name, WRITABLE))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already; give --out a folder that is empty or does not exist")

    run_config(run)
    saved, problems = list_rollout_files(run)
    written: dict[Path, RolloutFile] = {}
    for file in saved:
        try:
            written[_write(WRITABLE[name], file, out)] = file
        except UnreadableRollouts as error:
            problems.append(str(error))
        listen(sum(done.responses for done in written.values()))
    if not written:
        why = "; ".join(problems) or "rollouts.every and rollouts.keep decide what a run saves"
        raise DataError(f"{run} has no saved rollouts to export: {why}")
    return Exported(
        files=tuple(written),
        responses=sum(file.responses for file in written.values()),
        tokens=sum(file.tokens for file in written.values()),
        lost=WRITABLE[name].lost,
        problems=tuple(problems),
    )


def _write(writer: DumpWriter, file: RolloutFile, out: Path) -> Path:
    """Write one iteration and return its path."""
    path = out / writer.file_name.format(file.iteration)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = _rows(file.path, writer.columns)
        with whole_file(path) as partial, partial.open("w") as lines:
            lines.writelines(json.dumps(writer.record(file.iteration, row)) + "\n" for row in rows)
    except (pa.ArrowException, KeyError) as error:  # damaged behind its footer, or without a column
        raise UnreadableRollouts(f"{file.path} cannot be read and is left out: {str(error).splitlines()[0]}") from error
    except OSError as error:
        raise DataError(f"cannot write {path} of {file.path}: {cause_of(error)}") from error
    return path


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[DumpRecord]:
    """Yield the responses of a file with those of the columns that it has, a few in memory at a time."""
    for part in pq.ParquetFile(path).iter_batches(batch_size=_ROWS, columns=list(columns)):
        yield from part.to_pylist()
