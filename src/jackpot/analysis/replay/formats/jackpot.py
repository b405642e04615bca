"""Reads the rollouts of Jackpot's own run folders."""

import re
from collections.abc import Iterator
from pathlib import Path

from jackpot.analysis.replay.formats.base import DumpFormat
from jackpot.analysis.replay.formats.jsonl import COLUMNS
from jackpot.analysis.replay.formats.records import DumpRecord, Warn, parquet_rows
from jackpot.analysis.replay.responses import NEEDED
from jackpot.training.run_folder.rollouts import UnreadableRollouts, open_rollout_file

HOW = "A run saves rollouts every rollouts.every iterations and keeps rollouts.keep of them."
_COLUMNS = ("iteration", "sampled_by", *COLUMNS)


def files(run: Path) -> list[Path]:
    """Find the saved iterations of a run folder, in their order."""
    return sorted((run / "rollouts").glob("iteration-*.parquet")) if run.is_dir() else []


def records(path: Path, warn: Warn) -> Iterator[tuple[int, DumpRecord]]:
    """Yield the responses of an iteration, and warn where its footer or its end is damaged."""
    try:
        open_rollout_file(path)
    except UnreadableRollouts as error:
        warn(str(error))
        return
    yield from parquet_rows(path, warn, _COLUMNS)


FORMAT = DumpFormat(
    name="jackpot",
    files=files,
    records=records,
    marks=(),
    needed=(*NEEDED, "old_log_probs"),
    how=HOW,
    where=lambda path: re.sub(r"-0*(?=\d)", " ", path.stem),
)
