"""Reader of our own run folders."""

from collections.abc import Iterator
from pathlib import Path

from jackpot.analysis.replay.formats.base import Format, Tell, parquet_rows, responses_of
from jackpot.analysis.replay.responses import NEEDED, Response
from jackpot.training.run.rollouts import UnreadableRollouts, open_rollout_file

HOW = "A run saves rollouts every rollouts.every iterations and keeps rollouts.keep of them."
_COLUMNS = (
    *("uid", "iteration", "prompt_ids", "token_ids", "tokens", "sampled_mask", "advantages"),
    *("rollout_log_probs", "old_log_probs", "log_probs"),
    *("rollout_top_ids", "rollout_top_log_probs", "policy_top_ids", "policy_top_log_probs"),
)


def files(run: Path) -> list[Path]:
    return sorted((run / "rollouts").glob("iteration-*.parquet")) if run.is_dir() else []


def recognises(path: Path) -> bool:
    return path.name.startswith("iteration-") and path.parent.name == "rollouts"


def read(path: Path, tell: Tell) -> Iterator[Response]:
    """A file is damaged where its footer is; then it is told, and so it is where the rest breaks off."""
    try:
        saved = open_rollout_file(path)
    except UnreadableRollouts as error:
        tell(str(error))
        return
    where = f"iteration {saved.iteration}"
    yield from responses_of(parquet_rows(path, tell, _COLUMNS), where, tell, (*NEEDED, "old_log_probs"), HOW)


FORMAT = Format(name="jackpot", files=files, recognises=recognises, read=read, how=HOW)
