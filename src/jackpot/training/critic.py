"""The critic of PPO estimates the value of every state, and from it the advantage of every token."""

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from jackpot.config.run import CriticConfig
from jackpot.core.metrics import Mean, Sums
from jackpot.core.types import ScoredRollout, TokenBatch, TrainingSample
from jackpot.models.forward import can_pack, response_values
from jackpot.objectives.advantages import gae, whiten
from jackpot.objectives.losses import clipped_value_error
from jackpot.training.batching import batch_to, plain_batches
from jackpot.training.optimizer import ModelOptimizer


class Critic:
    """Estimates the value of the state that each response token is sampled in, and learns to.

    Values and returns of a rollout batch are computed once, before any update on it; all updates on the batch learn
    from these.

    Args:
        model: for token classification, with one label; trained in place.
        micro_batch_tokens: the most tokens in one forward pass of `compute_advantages`.
    """

    def __init__(
        self, model: PreTrainedModel, optimizer: ModelOptimizer, config: CriticConfig, micro_batch_tokens: int
    ) -> None:
        self.model, self.optimizer = model.eval(), optimizer  # eval: no dropout
        self._config, self._micro_batch_tokens = config, micro_batch_tokens
        self._known: dict[str, tuple[Tensor, Tensor]] = {}  # values and returns [T] by rollout uid

    def values(self, batch: TokenBatch) -> Tensor:
        """Compute V of the state before each response token: [B, T], 0 where masked, with gradient."""
        return batch.spread(response_values(self.model, batch).float())

    @torch.no_grad()
    def compute_advantages(
        self, scored: Sequence[ScoredRollout], autocast: AbstractContextManager
    ) -> list[TrainingSample]:
        """Give every token its own advantage by GAE, whitened over the batch as PPO does.

        The reward of a response stands at the last token that the model sampled. Values and returns are kept for
        `loss` until the next call.
        """
        self._known = {}
        if not scored:
            return []
        rewards = {item.rollout.uid: item.score.reward for item in scored}
        raw: dict[str, Tensor] = {}
        rollouts = [item.rollout for item in scored]
        for batch in plain_batches(rollouts, self._micro_batch_tokens, 0, not can_pack(self.model)):
            with autocast:
                values = self.values(batch_to(batch, self.model.device)).cpu()
            mask = batch.response_mask
            reward = torch.tensor([rewards[uid] for uid in batch.uids])[:, None] * _is_last(mask)
            advantages, returns = gae(reward, values, mask, self._config.gamma, self._config.lam)
            for row, (uid, length) in enumerate(zip(batch.uids, batch.attention_mask.sum(-1).tolist(), strict=True)):
                self._known[uid] = (values[row, :length], returns[row, :length])
                raw[uid] = advantages[row, :length]
        rows = [raw[item.rollout.uid] for item in scored]
        sampled = torch.cat([item.rollout.sampled_mask for item in scored])
        white = whiten(torch.cat(rows).double(), sampled).float().split([len(row) for row in rows])
        return [
            TrainingSample(rollout=item.rollout, score=item.score, advantages=row)
            for item, row in zip(scored, white, strict=True)
        ]

    def loss(self, batch: TokenBatch) -> tuple[Tensor, Sums]:
        """Compute half the clipped squared error of a micro-batch, summed over its sampled tokens.

        Returns:
            The sum (scalar, with gradient), to be divided by the number of tokens of the optimizer step; and metrics.
        """
        mask = batch.response_mask
        old, returns = (self._rows(batch, part) for part in (0, 1))
        values = self.values(batch)
        errors, is_clipped = clipped_value_error(values, old, returns, self._config.clip)
        numerator = torch.where(mask, errors, 0.0).sum()
        return numerator, {
            "critic/loss": Mean(numerator.detach().double(), numerator.new_zeros(()).double(), mask.double().sum()),
            "critic/clip_frac": Mean.of(is_clipped, mask),
            "critic/value": Mean.of(values, mask),
            "critic/return": Mean.of(returns, mask),
            "critic/error": Mean.of(returns - old, mask),
        }

    def _rows(self, batch: TokenBatch, part: int) -> Tensor:
        """Pad the values (part 0) or returns (part 1) of the batch's rollouts to [B, T] on its device."""
        rows = [self._known[uid][part] for uid in batch.uids]
        return pad_sequence(rows, batch_first=True).to(batch.response_mask.device)


def _is_last(mask: Tensor) -> Tensor:
    """Return 1 at the last True of every row and 0 elsewhere: [B, T] float."""
    after = mask.flip(-1).cumsum(-1).flip(-1)
    return (mask & (after == 1)).float()
