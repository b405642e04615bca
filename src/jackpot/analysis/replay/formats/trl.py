"""The format of TRL's `log_completions`: OUTPUT_DIR/completions/completions_STEP.parquet.

GRPOTrainer writes `step, prompt, completion`, a column for each reward function, what is in `_logs["extra"]`, and
`advantage` (read at f2cd577, version 1.10.0.dev, and in 1.16.0). Log-probs and token ids are missing, so a subclass
must add them. GRPOTrainer's tensors are padded: prompts on the left, completions on the right. The tests run such a
subclass with 1.0.0 and 1.16.0, without vLLM.
"""

from jackpot.analysis.replay.formats.base import DumpFormat
from jackpot.analysis.replay.formats.columns import Columns
from jackpot.analysis.replay.formats.records import matching, parquet_rows

HOW = """TRL's completions have only text and rewards. With log_completions=True and one process, train with
    class Logged(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask",
                         "tool_mask", "sampling_per_token_logps", "old_per_token_logps"):
                if name in output:
                    self._logs["extra"][name].extend(output[name].tolist())
            return output
Without old_per_token_logps, give --model and it is scored (at --temperature)."""


FORMAT = DumpFormat(
    name="trl",
    files=lambda path: matching(path, "completions_*.parquet"),
    records=parquet_rows,
    marks=(frozenset({"step", "prompt", "completion"}),),
    needed=("completion_ids", "completion_mask", "sampling_per_token_logps"),
    how=HOW,
    columns=Columns(
        prompt="prompt_ids",
        ids="completion_ids",
        present=("prompt_mask", "completion_mask"),
        masks=("completion_mask", "tool_mask"),
        rollout_log_probs="sampling_per_token_logps",
        old_log_probs="old_per_token_logps",
        advantages="advantage",
    ),
    batch=("prompt", "completion", "advantage", "sampling_per_token_logps"),
)
