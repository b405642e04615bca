"""What every learner promises."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from jackpot.config.run import Sampling
from jackpot.core.metrics import Sums
from jackpot.core.types import Role, ScoredRollout, TokenBatch, Version


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What one optimizer step has to say."""

    metrics: Sums
    events: tuple[dict[str, Any], ...]  # skipped steps and why
    traces: dict[str, dict[str, Tensor]]  # by rollout uid: per-token columns [T] and [T, K]


class Learner(ABC):
    """Trains the policy and, where there is one, the rollout model."""

    @property
    @abstractmethod
    def version(self) -> Version:
        """Optimizer steps that each model has taken."""

    @abstractmethod
    def credit(self, scored: Sequence[ScoredRollout]) -> list[ScoredRollout]:
        """Advantages of single tokens by the critic; as they are where there is none. Before `train` on the batch."""

    @abstractmethod
    def train(self, steps: Sequence[Sequence[TokenBatch]], trace: bool) -> list[StepResult]:
        """All optimizer steps on one rollout batch, each given as its micro-batches.

        `trace` asks for what costs extra and nobody may want: per-token columns, and the parts of the rollout model's
        gradient.
        """

    @abstractmethod
    def score(self, role: Role, batches: Sequence[TokenBatch], sampling: Sampling) -> dict[str, Tensor]:
        """Log-probs of the response tokens by rollout uid, [T] float32 on the CPU, as training computes them.

        Under the distribution that `sampling` draws from, filters included; -inf for a token that they drop.
        """

    @abstractmethod
    def weights(self, role: Role) -> Iterable[tuple[str, Tensor]]:
        """The current weights of a model by name, tied ones once, an adapter merged in. The rollout model is the policy
        where there is none."""

    @abstractmethod
    def save_model(self, role: Role, folder: Path) -> None:
        """Write a plain `save_pretrained` folder, an adapter merged in and once more by itself in `adapter/`."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights: optimizers, versions, running sums; loadable with `weights_only`."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
