"""Settings of `jackpot mismatch`: two sides and what they are compared on. Layer 0: pydantic only."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from jackpot.config_base import AnyNames, Count, Finite, Strict
from jackpot.config_engines import EngineConfig, TransformersEngineConfig
from jackpot.config_evaluation import SetsConfig
from jackpot.config_tasks import ArithmeticConfig, TaskConfig
from jackpot.types import Sampling


class SideConfig(Strict):
    """Whose probabilities they are: weights, and what computes with them."""

    path: str  # a folder, a hub name, starter:NAME
    engine: EngineConfig = TransformersEngineConfig()


class LearnerConfig(SideConfig):
    """Reads what a sampler wrote. With engine.name transformers in one forward pass over whole responses, as training
    does it."""

    autocast: Literal["bf16"] | None = None  # what `precision: bf16` is in training; transformers only
    temperature: Finite | None = None  # null: the sampler's; another one shows what a forgotten one costs

    @model_validator(mode="after")
    def _check_autocast(self) -> "LearnerConfig":
        if self.autocast and not isinstance(self.engine, TransformersEngineConfig):
            raise ValueError(
                f"autocast is of training's forward pass, and {self.engine.name} has a dtype only; leave autocast out "
                f"or take name=transformers"
            )
        return self


class MismatchSampling(Sampling):
    """How the sampler writes."""

    num_top_log_probs: Literal[0] = 0  # `top_log_probs` says


class MismatchConfig(SetsConfig):
    """A whole measurement: every learner reads what every sampler wrote."""

    samplers: Annotated[tuple[SideConfig, ...], Field(strict=False, min_length=1)]
    learners: Annotated[tuple[LearnerConfig, ...], Field(strict=False, min_length=1)]
    task: TaskConfig = ArithmeticConfig()  # whose held-out problems are the prompts
    benchmarks: AnyNames = ()  # sets of problems in place of the task's
    responses: Count = 256  # one to each problem; more than there are problems: further ones to the same
    short: Annotated[int, Field(ge=2)] | None = None  # responses of 1/short of max_new_tokens to every prompt beside
    seed: Annotated[int, Field(ge=0)] = 0
    sampling: MismatchSampling = MismatchSampling()
    top_log_probs: Count | None = None  # of the sampler's distribution; null: all of it, or 64 where that is too much
    reread: bool = False  # the sampler's numbers are of its text read again, as the learner's, not of the writing
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Count | Literal["auto"] = "auto"  # auto: the cores that are free at the start
