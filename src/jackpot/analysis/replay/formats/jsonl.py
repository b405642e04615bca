"""The format of bare JSONL: one response a line, with columns by Jackpot's names (docs/replay.md)."""

from jackpot.analysis.replay.formats.base import DumpFormat, DumpWriter
from jackpot.analysis.replay.formats.records import json_lines, matching
from jackpot.analysis.replay.responses import NEEDED

HOW = """Write one JSON object for each response and line, with
  token_ids            [T] of the response
  rollout_log_probs    [T] of the sampled tokens by the engine that sampled them, nats, at the sampling temperature
  old_log_probs        [T] by the policy in training; or give --model, and it is scored
Optional: log_probs, advantages (a number or [T]), sampled_mask, prompt_ids, uid, rollout_top_ids,
rollout_top_log_probs, policy_top_ids, policy_top_log_probs ([T, K]); docs/replay.md says what each is for."""
COLUMNS = (
    *("uid", "prompt_ids", "token_ids", "sampled_mask", "advantages"),
    *("rollout_log_probs", "old_log_probs", "log_probs"),
    *("rollout_top_ids", "rollout_top_log_probs", "policy_top_ids", "policy_top_log_probs"),
)

FORMAT = DumpFormat(
    name="jsonl",
    files=lambda path: matching(path, "*.jsonl"),
    records=json_lines,
    marks=(frozenset({"token_ids"}), frozenset({"rollout_log_probs"})),
    needed=NEEDED,
    how=HOW,
    writer=DumpWriter(file_name="iteration-{:06d}.jsonl", columns=COLUMNS, lost="rewards, text"),
)
