"""The format of OpenRLHF's `Experience`, saved with torch.save.

OpenRLHF saves no rollouts (read at 3c3be62, version 0.11.0), so its trainer needs added lines that save every
`Experience`: `sequences` [B, S] with prompt and response, and columns for their last A tokens, [B, A].
"""

from collections.abc import Iterator
from pathlib import Path

from jackpot.analysis.replay.formats.base import DumpFormat
from jackpot.analysis.replay.formats.columns import Columns
from jackpot.analysis.replay.formats.records import DumpRecord, Warn, batch_rows, matching, torch_file

HOW = """OpenRLHF saves no rollouts. Train with algo.advantage.is_correction_enable, so that vLLM returns log-probs, and
add to openrlhf/trainer/ppo_trainer.py, after experiences = self.experience_maker.make_experience_batch( ... ):
    names = ("sequences", "action_mask", "rollout_log_probs", "action_log_probs", "advantages")
    os.makedirs("rollouts", exist_ok=True)  # import os
    torch.save([{name: getattr(one, name).cpu() for name in names} for one in experiences],
               f"rollouts/experience_{global_step}.pt")
Without action_log_probs, give --model and it is scored (at --temperature)."""


def records(path: Path, warn: Warn) -> Iterator[tuple[int, DumpRecord]]:
    """Yield (index, record) of every response in all experiences of a file, and warn of a file without experiences."""
    content = torch_file(path, warn)
    candidates = content if isinstance(content, list) else [content]
    experiences = [candidate for candidate in candidates if isinstance(candidate, dict)]
    if content is not None and not experiences:  # None: a damaged file, of which `torch_file` warns
        warn(f"{path.name} has no experiences and is left out")

    yield from enumerate(row for experience in experiences for row in batch_rows(experience))


FORMAT = DumpFormat(
    name="openrlhf",
    files=lambda path: matching(path, "*.pt"),
    records=records,
    marks=(frozenset({"sequences"}),),
    needed=("sequences", "action_mask", "rollout_log_probs"),
    how=HOW,
    columns=Columns(
        ids="sequences",
        masks=("action_mask",),
        old_log_probs="action_log_probs",
        at_end=True,
        begins_sampled=True,
        ends_sampled=True,
    ),
)
