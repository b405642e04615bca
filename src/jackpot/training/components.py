"""The components of a run in one object: task, engines and learner. It copies the learner's weights to the engines."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from jackpot.config.config import Config
from jackpot.core.digest import WeightsDigest
from jackpot.core.errors import WeightsError
from jackpot.core.metrics import Sum, Sums
from jackpot.core.roles import Role
from jackpot.core.types import Version
from jackpot.models.cost import ForwardCost
from jackpot.models.quantization.convert import quantize_named
from jackpot.rollout.engines.base import Engine
from jackpot.rollout.tasks.base import Task
from jackpot.training.learner import Learner


@dataclass(frozen=True, kw_only=True)
class RunComponents:
    """The task, engines and learner of one run; engines and learner begin with equal weights."""

    config: Config
    task: Task
    tokenizer: PreTrainedTokenizerBase
    engine: Engine  # generates the rollouts of the rollout model or, without one, of the policy
    # Generates the policy's responses in evaluations and, where there is a rollout model, the policy's share of the
    # rollouts; may be `engine` itself where there is no rollout model
    policy_engine: Engine
    learner: Learner
    costs: Mapping[Role, ForwardCost]  # FLOPs of a forward pass of each model, without its adapter
    benchmarks: Mapping[str, Task] = field(default_factory=dict)  # further test sets that the policy is evaluated on

    @property
    def tasks(self) -> tuple[Task, ...]:
        """Return the task that is trained on and all benchmarks."""
        return (self.task, *self.benchmarks.values())

    @property
    def writers(self) -> dict[Role, Engine]:
        """Return the engine of each model that may generate rollouts, by model."""
        if self.config.rollout_model is None:
            return {"policy": self.engine}
        return {"policy": self.policy_engine, "rollout_model": self.engine}

    def next_writers(self, iteration: int) -> dict[Role, Engine]:
        """Return, by model, the engines that need the weights after `iteration`, to generate later rollouts."""
        roles = self.config.writers(iteration + 1, iteration + 1 + self.config.batch.ahead)
        # Where the rollout model drafts tokens of the policy's rollouts, its engine needs the weights for that.
        drafts = self.config.draft is not None and "policy" in roles
        return {role: engine for role, engine in self.writers.items() if role in roles or drafts}

    def training_flops(self, tokens: int, iteration: int) -> int:
        """Return the FLOPs of training on one sequence: a forward and a backward pass of each model.

        A model that is not trained has no backward pass. A model with nothing left to do in `iteration` has no pass.

        Args:
            tokens: length of prompt and response together.
        """
        # FLOPs as multiples of those of a forward pass; a backward pass costs twice as much.
        passes: dict[Role, int] = {"policy": 3}
        if (settings := self.config.rollout_model) and self.config.uses_rollout_model(iteration):
            passes["rollout_model"] = 3 if settings.optimizer else 1
        return sum(count * self.costs[role].sequence(tokens) for role, count in passes.items())

    def send_weights(self, engine: Engine, role: Role) -> Sums:
        """Copy the learner's weights of one model into an engine, and verify by a digest that all of them arrived.

        An engine with quantized weights may take them already quantized, as codes and scales; then these are sent.

        Returns:
            Metrics for the log: `mismatch/codes_differ`, which is 0, where codes were sent, else none.

        Raises:
            WeightsError: the engine holds other weights than the learner sent.
        """
        weights = self.learner.weights(role, engine.capabilities.dtype)
        if engine.capabilities.sleeps:
            self.learner.release_memory()  # so that the engine can use memory that the learner has cached
        return send_weights(engine, weights, self.learner.version)

    def take_events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of tasks and engines since the last call; those of an engine name the engine's setting."""
        for task in self.tasks:
            yield from task.take_events()
        for setting, engine in {"engine": self.engine, "evaluation.engine": self.policy_engine}.items():
            for event in engine.take_events():  # if both settings share an engine, the second call finds none
                yield event | {"engine": setting}

    def close(self) -> None:
        """Close all engines and tasks, even if closing some of them raises."""
        with ExitStack() as closing:
            for part in (*self.tasks, self.policy_engine, self.engine):
                closing.callback(part.close)


def send_weights(engine: Engine, weights: Iterable[tuple[str, Tensor]], version: Version) -> Sums:
    """Copy all weights of a model, of `version`, into an engine, and verify by a digest that all of them arrived.

    Return metrics for the log: `mismatch/codes_differ`, which is 0, for an engine that takes codes (quantized weights),
    else none. Raise WeightsError where the engine holds other weights than were sent.
    """
    dtype, codes = engine.capabilities.dtype, engine.capabilities.coded_weights
    digest = WeightsDigest(None if codes else dtype)

    if codes:  # quantize once here, not in every process of the engine
        cast = ((name, tensor.to(dtype)) for name, tensor in weights)
        weights = quantize_named(cast, codes.names, codes.scheme)

    # `watch` yields the weights one by one and adds each to the digest. The engine may stop reading early, so `deque`
    # reads the rest: the digest must cover weights that the engine did not ask for.
    weights = digest.watch(weights)
    engine_digest = engine.update_weights(weights, version)
    deque(weights, maxlen=0)
    sent_digest = digest.hexdigest()

    if engine_digest != sent_digest:
        content = "codes and scales of" if codes else "weights of"
        raise WeightsError(
            f"after the weight update at {version} the engine holds {content} digest {engine_digest[:12]}, the learner "
            f"sent {sent_digest[:12]}; training on its rollouts would be training on unknown weights"
        )

    # Equal digests: none of the codes differ.
    return {"mismatch/codes_differ": Sum.number(0)} if codes else {}
