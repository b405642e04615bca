"""Settings of `jackpot eval`, and of the sets of problems that a model is measured on. Layer 0: pydantic only."""

from typing import Annotated, Literal

from pydantic import Field

from jackpot.config_base import Count, Names, Strict
from jackpot.config_engines import EngineConfig, TransformersEngineConfig
from jackpot.config_tasks import ArithmeticConfig, QuestionConfig, TaskConfig, ToolArithmeticConfig
from jackpot.types import Sampling


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
