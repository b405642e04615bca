"""Reads OpenRLHF's experience, saved with torch.save.

OpenRLHF saves no rollouts (read at 3c3be62, version 0.11.0), so its trainer needs an added line that saves its
`Experience`: `sequences` [B, S] with prompt and response, and [B, A] columns that end where the sequences end.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jackpot.analysis.replay.formats.base import (
    DumpFormat,
    DumpRecord,
    ReadLimits,
    Warn,
    batch_rows,
    matching,
    responses_of,
    torch_file,
)
from jackpot.analysis.replay.responses import SavedResponse

HOW = """OpenRLHF saves no rollouts. Train with algo.advantage.is_correction_enable, so that vLLM returns log-probs, and
add to openrlhf/trainer/ppo_trainer.py, after experiences = self.experience_maker.make_experience_batch( ... ):
    names = ("sequences", "action_mask", "rollout_log_probs", "action_log_probs", "advantages")
    os.makedirs("rollouts", exist_ok=True)  # import os
    torch.save([{name: getattr(one, name).cpu() for name in names} for one in experiences],
               f"rollouts/experience_{global_step}.pt")
Without action_log_probs, give --model and it is scored (at --temperature)."""
_NEEDED = ("sequences", "action_mask", "rollout_log_probs")


def files(path: Path) -> list[Path]:
    """Find the saved experiences of a path, in their order."""
    return matching(path, "*.pt")


def recognizes(path: Path, warn: Warn, limits: ReadLimits) -> bool:
    """Tell whether a file is of this format."""
    content = torch_file(path, warn, limits) if path.suffix == ".pt" else None
    return any("sequences" in one for one in _experiences(content))


def read(path: Path, warn: Warn, limits: ReadLimits) -> Iterator[SavedResponse]:
    """Yield the responses of one file, and warn of those that cannot be read."""
    content = torch_file(path, warn, limits)
    experiences = _experiences(content)
    if content is not None and not experiences:
        warn(f"{path.name} has no experiences and is left out")
    rows = (row for one in experiences for row in batch_rows(one, path.name, warn, limits))
    yield from responses_of(enumerate(rows), path.name, warn, limits, _NEEDED, HOW, _renamed)


def _experiences(content: Any) -> list[DumpRecord]:
    many = content if isinstance(content, list) else [content]
    return [one for one in many if isinstance(one, dict)]


def _renamed(experience: DumpRecord) -> dict[str, Any]:
    mask = experience["action_mask"].bool()
    sequence = experience["sequences"]
    before = len(sequence) - len(mask)  # tokens of the prompt that no other column covers
    places = mask.nonzero().flatten()
    first, end = (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)
    part = slice(first, end)
    renamed = {
        "prompt_ids": sequence[: before + first],
        "token_ids": sequence[before:][part],
        "sampled_mask": mask[part],
    }
    named = (
        ("rollout_log_probs", "rollout_log_probs"),
        ("old_log_probs", "action_log_probs"),
        ("advantages", "advantages"),
    )
    for ours, theirs in named:
        column = experience.get(theirs)
        renamed[ours] = None if column is None else column[part]
    return renamed


FORMAT = DumpFormat(name="openrlhf", files=files, recognizes=recognizes, read=read, how=HOW)
