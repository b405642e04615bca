"""The interface of a learner, which the trainer calls, and the results of its optimizer steps."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from jackpot.config.sampling import Sampling
from jackpot.core.metrics import Sums
from jackpot.core.roles import Role
from jackpot.core.types import ScoredRollout, TokenBatch, TrainingSample, Version


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """The result of one optimizer step: metrics, events and per-token columns."""

    metrics: Sums
    events: tuple[dict[str, Any], ...]  # skipped steps and why
    # Per-token columns of saved rollouts, [T] or [T, K], by rollout uid and name; empty where none were asked for
    traces: dict[str, dict[str, Tensor]]


class TrainResult(NamedTuple):
    """The results of all optimizer steps on one rollout batch."""

    steps: list[StepResult]  # in the order in which they were taken
    # |p_engine - p_training| of each token, [T] by rollout uid, at the first update on the rollout; NaN where training
    # has no log-prob of the weights that sampled the token
    engine_gaps: dict[str, Tensor]


class Scorer(Protocol):
    """The part of a `Learner` that the checks of engines use: it computes log-probs of the models in training."""

    @property
    @abstractmethod
    def version(self) -> Version:
        """Return the version of the weights: the number of optimizer steps that each model has taken."""

    @property
    @abstractmethod
    def pads(self) -> bool:
        """Return whether some model reads padding, so that padding counts as tokens of a micro-batch."""

    @abstractmethod
    def keep_weights(self, role: Role) -> None:
        """Copy a model's weights to the host's memory, for `score` to use later; the copy replaces an earlier copy.

        A model that is not trained needs no copy.
        """

    @abstractmethod
    def score(
        self, role: Role, batches: Sequence[TokenBatch], sampling: Sampling, from_copy: bool = False
    ) -> dict[str, Tensor]:
        """Compute the log-probs of every response token and of the `top_ids` at its position.

        The distribution is that which `sampling` draws from, top-p and top-k included: a token that these filters drop
        has -inf.

        Args:
            role: the model that computes them.
            from_copy: True to compute with the weights of the last `keep_weights`.

        Returns:
            By rollout uid, [T, 1 + K] float32 on the CPU: for each of the response's T tokens its log-prob, then those
            of the K `top_ids` at its position.
        """


class Learner(Scorer, ABC):
    """A learner of the policy and, where there is one, of the rollout model."""

    @abstractmethod
    def compute_advantages(self, scored: Sequence[ScoredRollout]) -> list[TrainingSample]:
        """Compute the advantage of every token of a rollout batch, before the batch is trained on.

        With a critic, each token has an advantage; without a critic all tokens of a response share one.
        """

    @abstractmethod
    def train(
        self, mini_batches: Sequence[Sequence[TokenBatch]], trace: bool, with_rollout_model: bool = True
    ) -> TrainResult:
        """Take all optimizer steps on one rollout batch.

        Args:
            mini_batches: for each optimizer step the list of its micro-batches.
            trace: also return what costs extra: per-token columns for saved rollouts, and how the rollout model's
                gradient splits into the gradients of its two losses.
            with_rollout_model: False to run and train the policy alone, on rollouts that the policy generated.
        """

    @abstractmethod
    def weights(self, role: Role, dtype: torch.dtype | None = None) -> Iterable[tuple[str, Tensor]]:
        """Yield the current weights of a model by name: a tied weight once, an adapter merged into its weight.

        Without a rollout model, the weights of `rollout_model` are the policy's.

        Args:
            dtype: dtype to which the caller will cast the weights. A weight that has to be copied anyway comes in this
                dtype, any other weight in its own. None: every weight comes in its own dtype.
        """

    @abstractmethod
    def release_memory(self) -> None:
        """Release memory that the learner caches for its next steps, so that engines can use it meanwhile."""

    @abstractmethod
    def save(self, folder: Path, roles: Sequence[Role]) -> dict[str, Any]:
        """Write the models and the moments of their optimizers, which `state_dict` lacks.

        A model's folder is a plain `save_pretrained` folder. An adapter is merged into the model, and also saved alone
        in `adapter/`.

        Returns:
            Checksums of the large files by their paths in `folder`; these files are flushed to the disk.

        Raises:
            CheckpointError: a file cannot be written.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what a learner needs to continue, beside what `save` writes: steps, settings and running sums.

        torch can load the state with `weights_only`.
        """
