"""Reads the rollouts of Jackpot's own run folders."""

from collections.abc import Iterator
from pathlib import Path

from jackpot.analysis.replay.formats.base import DumpFormat, ReadLimits, Warn, parquet_rows, responses_of
from jackpot.analysis.replay.responses import NEEDED, SavedResponse
from jackpot.training.run.rollouts import UnreadableRollouts, open_rollout_file

HOW = "A run saves rollouts every rollouts.every iterations and keeps rollouts.keep of them."
_COLUMNS = (
    *("uid", "iteration", "sampled_by", "prompt_ids", "token_ids", "tokens", "sampled_mask", "advantages"),
    *("rollout_log_probs", "old_log_probs", "log_probs"),
    *("rollout_top_ids", "rollout_top_log_probs", "policy_top_ids", "policy_top_log_probs"),
)


def files(run: Path) -> list[Path]:
    """Find the saved iterations of a run folder of a path, in their order."""
    return sorted((run / "rollouts").glob("iteration-*.parquet")) if run.is_dir() else []


def recognizes(path: Path, warn: Warn, limits: ReadLimits) -> bool:
    """Tell whether a file is of this format."""
    return path.name.startswith("iteration-") and path.parent.name == "rollouts"


def read(path: Path, warn: Warn, limits: ReadLimits) -> Iterator[SavedResponse]:
    """Yield the responses of one file, and warn where its footer or its end is damaged."""
    try:
        saved = open_rollout_file(path)
    except UnreadableRollouts as error:
        warn(str(error))
        return
    where = f"iteration {saved.iteration}"
    yield from responses_of(
        parquet_rows(path, warn, limits, _COLUMNS), where, warn, limits, (*NEEDED, "old_log_probs"), HOW
    )


FORMAT = DumpFormat(name="jackpot", files=files, recognizes=recognizes, read=read, how=HOW)
