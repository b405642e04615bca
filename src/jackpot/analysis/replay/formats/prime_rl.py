"""The format of prime-rl's token exports.

`trainer.enable_token_export` writes token_exports/step_N/rank_R.jsonl, one sequence a line (`TokenExporter`, read at
559b447). The traces that prime-rl always writes are not read: they have the engine's log-probs alone.
"""

from pathlib import Path

from jackpot.analysis.replay.formats.base import DumpFormat
from jackpot.analysis.replay.formats.columns import Columns
from jackpot.analysis.replay.formats.records import json_lines, matching

HOW = """Run prime-rl with trainer.enable_token_export = true: token_exports/step_N/rank_R.jsonl has the log-probs of
the engine and of the trainer."""


def where(path: Path) -> str:
    """Return the name of a file in messages: its step and its file name."""
    step = next((name for name in reversed(path.parts[:-1]) if name.startswith("step_")), path.parent.name)
    return f"{step}/{path.name}"


FORMAT = DumpFormat(
    name="prime_rl",
    files=lambda path: matching(path, "rank_*.jsonl"),
    records=json_lines,
    marks=(frozenset({"trainer_logprobs", "micro_step"}),),
    needed=("token_ids", "loss_mask", "inference_logprobs"),
    how=HOW,
    columns=Columns(
        ids="token_ids",
        masks=("loss_mask", "rl_weights"),  # a token of weight 0 in the policy's loss is not trained on
        rollout_log_probs="inference_logprobs",
        old_log_probs="",
        log_probs="trainer_logprobs",
        uid=("step", "rank", "export_sequence_idx"),
        begins_sampled=True,
    ),
    where=where,
)
