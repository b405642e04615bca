"""Compute the advantages of a rollout batch: from its rewards alone, or by the critic of PPO."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from jackpot.config.config import CriticConfig
from jackpot.core.metrics import Mean, Sums
from jackpot.core.types import ScoredRollout, TokenBatch, TrainingSample, unique_rows
from jackpot.models.forward import can_pack, response_values
from jackpot.objectives.advantages import compute_advantages, gae, whiten
from jackpot.objectives.losses import clipped_value_error
from jackpot.training.batching import plain_batches
from jackpot.training.optimizer import ModelOptimizer


def response_advantages(
    name: str, scored: Sequence[ScoredRollout], within_model: bool = False, beta: float = 1.0
) -> list[TrainingSample]:
    """Give every token of a response the advantage of the response.

    A group is all responses to a prompt or, with `within_model`, the responses of one model to a prompt. Lengths, for
    advantages that are whitened over tokens, count the sampled tokens only.

    Args:
        name: key of `objectives.advantages.ADVANTAGES`.
        scored: a whole rollout batch.
        within_model: compare the responses of each model with each other alone.
        beta: coefficient of the advantage `oapl`.
    """
    # The groups are numbered in the order in which they first occur.
    _, groups = unique_rows(
        [(item.rollout.prompt.uid, item.rollout.sampled_by if within_model else None) for item in scored]
    )
    advantages = compute_advantages(
        name,
        rewards=torch.tensor([item.score.reward for item in scored], dtype=torch.float64),
        groups=torch.tensor(groups, dtype=torch.int64),
        lengths=torch.tensor([int(item.rollout.sampled_mask.sum()) for item in scored], dtype=torch.int64),
        beta=beta,
    )

    return [
        TrainingSample(
            rollout=item.rollout,
            score=item.score,
            advantages=torch.full((len(item.rollout.token_ids),), advantage),
        )
        for item, advantage in zip(scored, advantages.tolist(), strict=True)
    ]


class Critic:
    """The critic of PPO, a model that estimates the value of the state in which each response token is sampled.

    Values and returns of a rollout batch are computed once, before any update on the batch, and stored in its samples;
    all updates on the batch learn from these.

    Args:
        model: model for token classification with one label, trained in place.
        micro_batch_tokens: most tokens in one of the micro-batches that `batches` cuts.
    """

    def __init__(
        self, model: PreTrainedModel, optimizer: ModelOptimizer, config: CriticConfig, micro_batch_tokens: int
    ) -> None:
        """Keep the model without dropout; `micro_batch_tokens` is the most tokens that it reads in one pass."""
        self.model, self.optimizer = model.eval(), optimizer  # eval: no dropout
        self._config, self._micro_batch_tokens = config, micro_batch_tokens

    def values(self, batch: TokenBatch) -> Tensor:
        """Compute the value of the state before each response token: [B, T], 0 where masked, with gradient."""
        return batch.spread(response_values(self.model, batch).float())

    def batches(self, scored: Sequence[ScoredRollout]) -> list[TokenBatch]:
        """Cut a rollout batch into micro-batches for `values`; `compute_advantages` needs the values of all of them."""
        rollouts = [item.rollout for item in scored]
        return plain_batches(rollouts, self._micro_batch_tokens, seed=0, pads=not can_pack(self.model))

    def compute_advantages(self, scored: Sequence[ScoredRollout], values: Mapping[str, Tensor]) -> list[TrainingSample]:
        """Compute the advantage of every token by GAE, whitened over the batch as PPO does.

        The reward of a response counts at the last token that the model sampled.

        Args:
            values: value of the state before each token, by rollout uid, [T] on the CPU.
        """
        if not scored:
            return []

        rollouts = [item.rollout for item in scored]
        mask = pad_sequence([rollout.sampled_mask for rollout in rollouts], batch_first=True)
        padded_values = pad_sequence([values[rollout.uid] for rollout in rollouts], batch_first=True)
        rewards = torch.tensor([item.score.reward for item in scored])[:, None] * _is_last(mask)

        # GAE takes padded rows, [B, T].
        advantages, returns = gae(rewards, padded_values, mask, gamma=self._config.gamma, lam=self._config.lam)
        lengths = [len(rollout.token_ids) for rollout in rollouts]

        # Whitening takes the tokens of all responses in one row, without padding.
        sampled = torch.cat([rollout.sampled_mask for rollout in rollouts])
        flat_advantages = torch.cat([row[:length] for row, length in zip(advantages, lengths, strict=True)])
        whitened = whiten(flat_advantages.double(), sampled).float().split(lengths)

        return [
            TrainingSample(
                rollout=item.rollout,
                score=item.score,
                advantages=row,
                values=values[item.rollout.uid],
                returns=row_returns[: len(row)],
            )
            for item, row, row_returns in zip(scored, whitened, returns, strict=True)
        ]

    def loss(self, batch: TokenBatch) -> tuple[Tensor, Sums]:
        """Compute half the clipped squared error of the critic's values, summed over a micro-batch's sampled tokens.

        Returns:
            The sum (a scalar with gradient, to be divided by the number of tokens of the optimizer step), and metrics.
        """
        mask, returns = batch.response_mask, batch.returns
        assert batch.values is not None and returns is not None, "`compute_advantages` has given them to every sample"
        values = self.values(batch)

        errors, is_clipped = clipped_value_error(values, batch.values, returns, self._config.clip)
        numerator = torch.where(mask, errors, 0.0).sum()

        return numerator, {
            "critic/loss": Mean(
                total=numerator.detach().double(),
                squares=numerator.new_zeros(()).double(),  # the sum of the squares is not measured
                count=mask.double().sum(),
            ),
            "critic/clip_frac": Mean.of(is_clipped, mask),
            "critic/value": Mean.of(values, mask),
            "critic/return": Mean.of(returns, mask),
            "critic/error": Mean.of(returns - batch.values, mask),
        }


def _is_last(mask: Tensor) -> Tensor:
    """Return 1 at the last True of every row and 0 elsewhere: [B, T] float."""
    count_from_here = mask.flip(-1).cumsum(-1).flip(-1)
    return (mask & (count_from_here == 1)).float()
