"""Settings of how responses are sampled, in training and in evaluations."""

from typing import Annotated

from pydantic import Field

from jackpot.config.base import MAY_CHANGE, ONE_IS_ENOUGH, Count, Differences, Finite, Strict, by_name
from jackpot.config.engines import EngineConfig
from jackpot.objectives.constants import TEMPERATURE


class Sampling(Strict):
    """Settings of an engine's sampling. The engine's log-probs are those after temperature, top-p and top-k."""

    temperature: Finite = TEMPERATURE
    """Temperature of sampling. Every model's log-probs in training use the same one."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Probability mass of nucleus sampling; 1: off."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Number of most probable tokens that are sampled from; 0: all. Where `num_top_log_probs` is as large, the engine's
    lists hold all that could be sampled, and training renormalizes the models on them: the policy that is trained is
    the truncated one."""
    max_new_tokens: Count = 256
    """Limit of a whole response, tokens, those of tools' replies included."""
    num_top_log_probs: Annotated[int, Field(ge=0)] = 20
    """Most probable tokens whose log-probs the engine returns at each position: the k of OBRS, which Z is summed
    over."""
    stop_token_ids: Annotated[tuple[int, ...], Field(strict=False)] = ()
    """Token ids that end a response, in addition to the end-of-sequence tokens that the model folder names."""

    @property
    def truncated(self) -> bool:
        """Return whether top-p or top-k gives probability zero to tokens that the model would sample."""
        return self.top_p < 1.0 or self.top_k > 0

    @property
    def lists_support(self) -> bool:
        """Return whether sampling chooses among several tokens, all of which the engine's top-k list contains."""
        return 1 < self.top_k <= self.num_top_log_probs

    @property
    def described(self) -> str:
        """Return the sampling in words, such as `sampled at temperature 0.6, top-p 0.95`, or `greedy`."""
        if self.top_k == 1:
            return "greedy"
        filters = [f"temperature {self.temperature:g}"] if self.temperature != 1.0 else []
        filters += [f"top-p {self.top_p:g}"] if self.top_p < 1.0 else []
        filters += [f"top-k {self.top_k}"] if self.top_k else []
        return f"sampled at {', '.join(filters)}" if filters else "sampled"


class SamplingChanges(Strict):
    """Settings of `sampling` that evaluations change; null: as in training."""

    temperature: Finite | None = None
    """Temperature of sampling."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Probability mass of nucleus sampling; 1: off."""
    top_k: Annotated[int, Field(ge=0)] | None = None
    """Number of most probable tokens that are sampled from; 1: greedy, 0: all."""


class BenchmarkConfig(Strict):
    """A set of problems, beside those of the task, that the policy answers in evaluations."""

    name: str
    """Name of the set, or path of a file with problems in the columns of `task.test`."""
    k: Count | None = None
    """Responses to each problem; null: `evaluation.k`."""


class EvaluationConfig(Strict):
    """Settings of the evaluations of policy and rollout model during a run."""

    every: Annotated[Count, MAY_CHANGE] = 50
    """Iterations between two evaluations; there is also one before the first iteration and one after the last."""
    problems: Count = 512
    """Held-out problems of the task in each evaluation; all of them where there are fewer."""
    k: Count = 1
    """Responses to each problem."""
    sampling: SamplingChanges = SamplingChanges()
    """How the responses are sampled, where that differs from training."""
    benchmarks: Annotated[
        tuple[Annotated[BenchmarkConfig, by_name("")], ...],
        ONE_IS_ENOUGH,
        Field(strict=False),
    ] = ()
    """Further sets of problems that the policy answers, each a name or a block of name and k; all of their problems."""
    engine: Annotated[EngineConfig | None, Differences("engine")] = None
    """Engine of the policy where there is a rollout model, in evaluations and for its share of the rollouts: what
    differs from `engine`, or a whole engine where `name` is given; null: the same settings as `engine`."""

    @property
    def benchmark_names(self) -> tuple[str, ...]:
        """Return the names and paths of the `benchmarks`."""
        return tuple(benchmark.name for benchmark in self.benchmarks)
