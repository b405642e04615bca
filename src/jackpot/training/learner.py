"""The interface that every learner implements."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from jackpot.config.sampling import Sampling
from jackpot.core.metrics import Sums
from jackpot.core.roles import Role
from jackpot.core.types import ScoredRollout, TokenBatch, TrainingSample, Version


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """Reports one optimizer step: its metrics, events and per-token columns."""

    metrics: Sums
    events: tuple[dict[str, Any], ...]  # skipped steps and why
    # By rollout uid: per-token columns [T] and [T, K]. `engine_gap` is |p_engine - p_training|, NaN where training has
    # no log-prob of the weights that sampled the token. Without a trace it is the only one, all in the first step
    traces: dict[str, dict[str, Tensor]]


class Scorer(Protocol):
    """Describes what an engine is compared with: the models in training, as in `Learner`."""

    @property
    def version(self) -> Version: ...

    @property
    def pads(self) -> bool: ...

    def keep_weights(self, role: Role) -> None: ...

    def score(
        self, role: Role, batches: Sequence[TokenBatch], sampling: Sampling, kept: bool = False
    ) -> dict[str, Tensor]: ...


class Learner(ABC):
    """Trains the policy and, where there is one, the rollout model."""

    @property
    @abstractmethod
    def version(self) -> Version:
        """Return the number of optimizer steps that each model has taken."""

    @property
    @abstractmethod
    def pads(self) -> bool:
        """Return whether some model reads padding, so that it counts as tokens of a micro-batch."""

    @abstractmethod
    def compute_advantages(self, scored: Sequence[ScoredRollout]) -> list[TrainingSample]:
        """Give every token of a rollout batch its advantage, before the batch is trained on.

        A critic gives each token its own; without one all tokens of a response share the advantage of the response.
        """

    @abstractmethod
    def train(
        self, mini_batches: Sequence[Sequence[TokenBatch]], trace: bool, with_rollout_model: bool = True
    ) -> list[StepResult]:
        """Take all optimizer steps on one rollout batch.

        Args:
            mini_batches: one for each optimizer step, each as its micro-batches.
            trace: also return what costs extra: per-token columns for saved rollouts, and how the rollout model's
                gradient splits into its two losses.
            with_rollout_model: False to run and train the policy alone, on rollouts of its own.
        """

    @abstractmethod
    def keep_weights(self, role: Role) -> None:
        """Keep a copy of a model's weights in the host's memory, for `score`, instead of the one kept before.

        A model that is not trained needs no copy.
        """

    @abstractmethod
    def score(
        self, role: Role, batches: Sequence[TokenBatch], sampling: Sampling, kept: bool = False
    ) -> dict[str, Tensor]:
        """Compute the log-probs of every response token and of its `top_ids`, by rollout uid: [T, 1 + K] float32, CPU.

        They are those of the distribution that `sampling` draws from, filters included; -inf for a token that the
        filters drop.

        Args:
            kept: compute with the weights of the last `keep_weights`.
        """

    @abstractmethod
    def weights(self, role: Role, dtype: torch.dtype | None = None) -> Iterable[tuple[str, Tensor]]:
        """Yield the current weights of a model by name: tied ones once, an adapter merged in.

        Where there is no rollout model, its weights are the policy's.

        Args:
            dtype: that the caller casts them to; weights that have to be copied anyway come in it. None: their own.
        """

    def release_memory(self) -> None:
        """Release memory that is held for the next training and that engines take meanwhile."""
        return  # of most learners engines take none

    @abstractmethod
    def save(self, folder: Path, roles: Sequence[Role]) -> dict[str, Any]:
        """Write the models and the moments of their optimizers, which `state_dict` lacks.

        A model's folder is a plain `save_pretrained` folder: an adapter is merged in, and stands by itself in
        `adapter/` too.

        Returns:
            Checksums of the files that are large, which are on the disk, by their paths in `folder`.

        Raises:
            CheckpointError: something cannot be written.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what a learner that continues needs beside what `save` writes: steps, settings and running sums.

        It is loadable with `weights_only`.
        """
