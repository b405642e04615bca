"""Settings of `jackpot eval`, and of the sets of problems that a model is measured on. Pydantic only."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from jackpot.config.base import AnyNames, Count, Finite, Names, Strict
from jackpot.config.engines import EngineConfig, TransformersEngineConfig
from jackpot.config.run import Sampling
from jackpot.config.tasks import ArithmeticConfig, QuestionConfig, TaskConfig, ToolArithmeticConfig


class SetsConfig(Strict):
    """How the problems of each kind of set are made, put and judged."""

    arithmetic: ArithmeticConfig = ArithmeticConfig()
    tool_arithmetic: ToolArithmeticConfig = ToolArithmeticConfig()
    math: QuestionConfig = QuestionConfig()  # of every benchmark by name


class EvaluationSampling(Sampling):
    """As in training, with room for an answer that is reasoned out."""

    max_new_tokens: Count = 4096  # where the context ends sooner, the response is cut there
    num_top_log_probs: Literal[0] = 0


class BenchmarksConfig(SetsConfig):
    """A whole evaluation."""

    model: str  # a folder, a hub name, starter:NAME, or the folder of a run
    benchmarks: Names
    k: Count = 1  # sampled answers to each problem
    problems: Count | None = None  # the first so many of each set; null: all, and of an endless set ENDLESS
    seed: Annotated[int, Field(ge=0)] = 0
    engine: EngineConfig = TransformersEngineConfig()
    sampling: EvaluationSampling = EvaluationSampling()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Count | Literal["auto"] = "auto"  # auto: the cores that are free when the evaluation starts


ENDLESS = 512  # problems


def sets_of(task: TaskConfig) -> SetsConfig:
    """The settings of a run's task for the sets beside it: what it was trained on decides how it is asked."""
    kind = SetsConfig.model_fields[task.name].annotation
    settings = kind.model_validate(task.model_dump(include=set(kind.model_fields)))
    return SetsConfig(**{task.name: settings})


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
