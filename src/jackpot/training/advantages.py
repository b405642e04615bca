"""Compute the advantages of a rollout batch from its rewards alone; `critic.py` computes those of a critic."""

from collections.abc import Sequence

import torch

from jackpot.core.types import ScoredRollout, TrainingSample
from jackpot.objectives.advantages import compute_advantages


def response_advantages(name: str, scored: Sequence[ScoredRollout], within_model: bool = False) -> list[TrainingSample]:
    """Give every token of a response the advantage of the response.

    The responses to one prompt are a group, or `within_model` those of one model to it. Lengths, for the
    advantages that are whitened over tokens, count the sampled tokens only.

    Args:
        name: key of `objectives.advantages.ADVANTAGES`.
        scored: a whole rollout batch.
    """
    numbers: dict[tuple[str | None, ...], int] = {}
    keys = [(item.rollout.prompt.uid, item.rollout.sampled_by) for item in scored]
    groups = [numbers.setdefault(key if within_model else key[:1], len(numbers)) for key in keys]
    advantages = compute_advantages(
        name,
        torch.tensor([item.score.reward for item in scored], dtype=torch.float64),
        torch.tensor(groups, dtype=torch.int64),
        torch.tensor([int(item.rollout.sampled_mask.sum()) for item in scored], dtype=torch.int64),
    )
    return [
        TrainingSample(
            rollout=item.rollout,
            score=item.score,
            advantages=torch.full((len(item.rollout.token_ids),), advantage),
        )
        for item, advantage in zip(scored, advantages.tolist(), strict=True)
    ]
