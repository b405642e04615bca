"""The format of slime's debug dumps, of training or of rollouts.

`--save-debug-train-data` and `--save-debug-rollout-data` write {"rollout_id", "samples": [...]} with torch.save (read
at 624b824, version 0.3.1). A sample's `tokens` are prompt and response, the other columns the response only. Only the
dump of training has the policy's `log_probs` and `advantages`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jackpot.analysis.replay.formats.base import DumpFormat
from jackpot.analysis.replay.formats.columns import Columns
from jackpot.analysis.replay.formats.records import Warn, matching, torch_file

HOW = """Run slime with --save-debug-train-data FOLDER/{rollout_id}.pt: it has the engine's and the policy's log-probs
and advantages. --save-debug-rollout-data has only the engine's: give --model, and the policy's are scored (at
--temperature)."""


def records(path: Path, warn: Warn) -> Iterator[tuple[int, Any]]:
    """Yield (index, record) of every sample in a file, and warn of a file without a list of samples."""
    content = torch_file(path, warn)
    samples = content.get("samples") if isinstance(content, dict) else None
    if isinstance(samples, list) and samples:
        yield from enumerate(samples)
    elif content is not None:
        warn(f"{path.name} has no list of samples and is left out")


FORMAT = DumpFormat(
    name="slime",
    # Dumps of training or rollouts; those of evaluations are left out.
    files=lambda path: [file for file in matching(path, "*.pt") if not file.stem.startswith("eval_")],
    records=records,
    marks=(frozenset({"tokens"}),),
    needed=("tokens", "rollout_log_probs"),
    how=HOW,
    columns=Columns(
        ids="tokens",
        masks=("loss_masks", "loss_mask"),
        length=("response_lengths", "response_length"),
        old_log_probs="log_probs",
        uid=("rollout_ids", "rollout_id", "sample_index", "index"),
        at_end=True,
    ),
)
