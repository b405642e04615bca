"""What a run is made of. Only `launch` makes one."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from jackpot.config.run import Config
from jackpot.core.types import Role
from jackpot.models.cost import ForwardCost
from jackpot.rollout.engines.base import Engine
from jackpot.rollout.tasks.base import Task
from jackpot.training.learner import Learner


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Engines and learner hold the same weights."""

    config: Config
    task: Task
    tokenizer: PreTrainedTokenizerBase
    engine: Engine  # writes the rollouts
    policy_engine: Engine  # answers for the policy in evaluations; `engine` itself where the policy writes
    learner: Learner
    costs: Mapping[Role, ForwardCost]  # of policy and rollout model, without adapters
    benchmarks: Mapping[str, Task] = field(default_factory=dict)  # what else the policy is measured on: test splits

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All that somebody has to close."""
        return (self.task, *self.benchmarks.values())

    @property
    def writer_cost(self) -> ForwardCost:
        """Of the model that writes the rollouts."""
        return self.costs.get("rollout_model", self.costs["policy"])

    def training_flops(self, tokens: int) -> int:
        """Of one sequence: forward through both models, and twice that backward through each that is trained."""
        trained = {
            "policy": True,
            "rollout_model": bool(self.config.rollout_model and self.config.rollout_model.optimizer),
        }
        return sum((3 if trained[role] else 1) * cost.sequence(tokens) for role, cost in self.costs.items())
