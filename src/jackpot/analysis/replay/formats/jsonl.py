"""Reads and writes bare JSONL: one response a line, columns by Jackpot's names (docs/replay.md)."""

from collections.abc import Iterator
from pathlib import Path

from jackpot.analysis.replay.formats.base import (
    DumpFormat,
    DumpWriter,
    ReadLimits,
    SavedIteration,
    Warn,
    first_keys,
    json_lines,
    matching,
    responses_of,
    write_lines,
)
from jackpot.analysis.replay.responses import NEEDED, SavedResponse

HOW = """Write one JSON object for each response and line, with
  token_ids            [T] of the response
  rollout_log_probs    [T] of the sampled tokens by the engine that sampled them, nats, at the sampling temperature
  old_log_probs        [T] by the policy in training; or give --model, and it is scored
Optional: log_probs, advantages (a number or [T]), sampled_mask, prompt_ids, tokens, uid, rollout_top_ids,
rollout_top_log_probs, policy_top_ids, policy_top_log_probs ([T, K]); docs/replay.md says what each is for."""

_COLUMNS = (
    *("uid", "prompt_ids", "token_ids", "tokens", "sampled_mask", "advantages"),
    *("rollout_log_probs", "old_log_probs", "log_probs"),
    *("rollout_top_ids", "rollout_top_log_probs", "policy_top_ids", "policy_top_log_probs"),
)


def files(path: Path) -> list[Path]:
    """Find the JSONL files of a path, in their order."""
    return matching(path, "*.jsonl")


def recognizes(path: Path, warn: Warn, limits: ReadLimits) -> bool:
    """Tell whether a file is of this format."""
    return path.suffix == ".jsonl" and bool(first_keys(path, warn, limits) & {"token_ids", "rollout_log_probs"})


def read(path: Path, warn: Warn, limits: ReadLimits) -> Iterator[SavedResponse]:
    """Yield the responses of one file, and warn of those that cannot be read."""
    yield from responses_of(json_lines(path, warn, limits), path.name, warn, limits, NEEDED, HOW)


def file_name(iteration: int) -> str:
    """Return the file of an iteration."""
    return f"iteration-{iteration:06d}.jsonl"


def write(saved: SavedIteration, path: Path) -> None:
    """Write an iteration with all columns that a replay can use."""
    write_lines(path, saved.rows(_COLUMNS))


FORMAT = DumpFormat(
    name="jsonl",
    files=files,
    recognizes=recognizes,
    read=read,
    how=HOW,
    writer=DumpWriter(file_name=file_name, write=write, lost="rewards, text"),
)
