"""The critic of PPO: a value of every state, and advantages of single tokens from it."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from jackpot.core.metrics import Mean, Sums
from jackpot.core.types import ScoredRollout, TokenBatch
from jackpot.models.forward import batch_sequences
from jackpot.objectives.advantages import gae, whiten
from jackpot.objectives.losses import clipped_value_error
from jackpot.training.batching import batch_to, micro_batches
from jackpot.training.optimizer import ModelOptimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class CriticNumbers:
    """Of GAE and of the value loss; `config.CriticConfig` says what they are."""

    gamma: float
    lam: float
    clip: float
    micro_batch_tokens: int


class Critic:
    """A token-classification model with one label: the value of the state that each response token was sampled in.

    A rollout batch is credited once, before any update on it; the values and returns of then stay what its updates
    learn from.
    """

    def __init__(self, model: PreTrainedModel, optimizer: ModelOptimizer, numbers: CriticNumbers) -> None:
        self.model, self.optimizer = model.eval(), optimizer  # eval: no dropout
        self._numbers = numbers
        self._known: dict[str, tuple[Tensor, Tensor]] = {}  # by rollout uid: values and returns [T]

    def values(self, batch: TokenBatch) -> Tensor:
        """V of every response token's state: [B, T], 0 where masked, with gradient."""
        sequences = batch_sequences(batch)
        values = self.model(
            input_ids=sequences.input_ids,
            attention_mask=sequences.attention_mask,
            position_ids=sequences.position_ids,
            use_cache=False,
        ).logits[:, -batch.response_ids.shape[1] - 1 : -1, 0]
        return torch.where(batch.response_mask, values.float(), 0.0)

    @torch.no_grad()
    def credit(self, scored: Sequence[ScoredRollout], autocast: AbstractContextManager) -> list[ScoredRollout]:
        """The same rollouts with advantages of single tokens by GAE, whitened over the batch as PPO does.

        The reward stands at the last token that the model sampled.
        """
        self._known = {}
        if not scored:
            return []
        rewards = {item.rollout.uid: item.score.reward for item in scored}
        raw: dict[str, Tensor] = {}
        for batch in micro_batches(scored, self._numbers.micro_batch_tokens, 0, 0, shares_prompts=False):
            with autocast:
                values = self.values(batch_to(batch, self.model.device)).cpu()
            mask = batch.response_mask
            reward = torch.tensor([rewards[uid] for uid in batch.uids])[:, None] * _is_last(mask)
            advantages, returns = gae(reward, values, mask, self._numbers.gamma, self._numbers.lam)
            for row, (uid, length) in enumerate(zip(batch.uids, batch.attention_mask.sum(-1).tolist(), strict=True)):
                self._known[uid] = (values[row, :length], returns[row, :length])
                raw[uid] = advantages[row, :length]
        rows = [raw[item.rollout.uid] for item in scored]
        sampled = torch.cat([item.rollout.sampled_mask for item in scored])
        white = whiten(torch.cat(rows).double(), sampled).float().split([len(row) for row in rows])
        return [replace(item, advantages=row) for item, row in zip(scored, white, strict=True)]

    def loss(self, batch: TokenBatch) -> tuple[Tensor, Sums]:
        """Half the clipped squared error, summed over response tokens: numerator with gradient, and metrics."""
        mask = batch.response_mask
        old, returns = (self._rows(batch, part) for part in (0, 1))
        values = self.values(batch)
        errors, is_clipped = clipped_value_error(values, old, returns, self._numbers.clip)
        numerator = torch.where(mask, errors, 0.0).sum()
        return numerator, {
            "critic/loss": Mean(numerator.detach().double(), numerator.new_zeros(()).double(), mask.double().sum()),
            "critic/clip_frac": Mean.of(is_clipped, mask),
            "critic/value": Mean.of(values, mask),
            "critic/return": Mean.of(returns, mask),
            "critic/error": Mean.of(returns - old, mask),
        }

    def _rows(self, batch: TokenBatch, part: int) -> Tensor:
        """What is known of the batch's rollouts, [B, T] on its device."""
        rows = [self._known[uid][part] for uid in batch.uids]
        return pad_sequence(rows, batch_first=True).to(batch.response_mask.device)


def _is_last(mask: Tensor) -> Tensor:
    """1 at the last True of every row: [B, T] float."""
    after = mask.flip(-1).cumsum(-1).flip(-1)
    return (mask & (after == 1)).float()
