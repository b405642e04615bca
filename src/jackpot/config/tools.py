"""Settings of `jackpot eval` and `jackpot mismatch`, and of the sets of problems that both measure a model on."""

from typing import Annotated, Literal

from pydantic import Field

from jackpot.config.base import MAY_CHANGE, AnyNames, Conflicts, Count, Finite, Names, Strict
from jackpot.config.engines import EngineConfig, TransformersEngineConfig
from jackpot.config.sampling import Sampling
from jackpot.config.tasks import (
    Answers,
    ArithmeticConfig,
    ColumnsConfig,
    MathConfig,
    QuestionConfig,
    SumsConfig,
    TaskConfig,
    ToolArithmeticConfig,
)


class SetsConfig(Strict):
    """Settings of sets of problems: how problems are generated or put to a model, and how responses are rewarded."""

    arithmetic: ArithmeticConfig = ArithmeticConfig()
    """Problems of the set `arithmetic`."""
    tool_arithmetic: ToolArithmeticConfig = ToolArithmeticConfig()
    """Problems of the set `tool_arithmetic`."""
    sums: SumsConfig = SumsConfig()
    """Problems of the set `sums`."""
    math: QuestionConfig = QuestionConfig()
    """Prompts and rewards of the benchmarks, such as gsm8k, and of the user's own files."""
    columns: Annotated[ColumnsConfig, MAY_CHANGE] = ColumnsConfig()
    """Names of the columns that are read from the user's own files among the benchmarks."""
    answers: Annotated[Answers, MAY_CHANGE] = None
    """Part of the answer's column that is the answer in those files, as a name or {regex: ...}; null: plain."""


class EvaluationSampling(Sampling):
    """Settings of the sampling in evaluations: as in training, with room for an answer that is reasoned out."""

    max_new_tokens: Count = 4096
    """Limit of a whole response, tokens; where the engine's context ends sooner, the response is cut there."""
    num_top_log_probs: Literal[0] = 0
    """Most probable tokens whose log-probs are returned: none."""


class BenchmarksConfig(SetsConfig):
    """All settings of one evaluation by `jackpot eval`."""

    model: Annotated[str, MAY_CHANGE]
    """Folder, hub name, or starter:NAME of the model, or the folder of a run."""
    benchmarks: Annotated[Names, MAY_CHANGE]
    """Names of sets of problems, paths of files with problems, hub:OWNER/NAME, or own: the held-out problems of the
    model's run."""
    task: TaskConfig | None = None
    """Task of the set own, which decides nothing else; null: that of the model's run."""
    k: Count = 1
    """Responses to each problem."""
    problems: Count | None = None
    """Number of problems of each set, from the first; null: all, and 512 of a generated set."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of sampling and of generated problems."""
    engine: EngineConfig = TransformersEngineConfig()
    """Inference engine that generates the responses."""
    sampling: EvaluationSampling = EvaluationSampling()
    """How responses are sampled."""
    device: Annotated[Literal["auto", "cpu", "cuda"], MAY_CHANGE] = "auto"
    """Device of the engine; auto: a GPU where there is one."""
    threads: Annotated[Count | Literal["auto"], MAY_CHANGE] = "auto"
    """CPU threads of torch; auto: the cores that are free when the evaluation starts."""


ENDLESS = 512  # default number of problems of a generated set, which has no end of its own


def sets_of(task: TaskConfig) -> SetsConfig:
    """Return settings that put the problems of benchmarks to a model as a run puts those of its `task`.

    Files among the benchmarks are read with the columns of `task.test`. For a task that says nothing of benchmarks,
    such as a custom one, all settings are the defaults.
    """
    if task.name not in SetsConfig.model_fields:
        return SetsConfig()
    # The class of the settings that such a task shares with its set of problems, such as QuestionConfig for math.
    settings_class = type(getattr(SetsConfig(), task.name))
    settings = settings_class.model_validate(task.model_dump(include=set(settings_class.model_fields)))
    files = {"columns": task.test.columns, "answers": task.test.answers} if isinstance(task, MathConfig) else {}
    return SetsConfig(**{task.name: settings}, **files)


class SideConfig(Strict):
    """Settings of a model and of the engine that computes its probabilities."""

    path: str
    """Folder, hub name, or starter:NAME of the model."""
    engine: EngineConfig = TransformersEngineConfig()
    """Inference engine that computes the probabilities."""


class LearnerConfig(SideConfig):
    """Settings of a model that scores the responses of samplers.

    With the engine `transformers` it does so in one forward pass over whole responses, as training does.
    """

    autocast: Literal["bf16"] | None = None
    """Number format of the forward pass, what `precision: bf16` is in training; only with the engine `transformers`;
    null: the engine's dtype."""
    temperature: Finite | None = None
    """Temperature of the learner's log-probs; null: the sampler's. Another one shows the effect of a forgotten
    temperature."""

    def conflicts(self) -> Conflicts:
        """Refuse autocast with any engine but transformers."""
        return [
            (
                self.autocast and not isinstance(self.engine, TransformersEngineConfig),
                f"autocast is of training's forward pass, and {self.engine.name} has a dtype only; leave autocast "
                "out or take name=transformers",
            ),
        ]


class MismatchSampling(Sampling):
    """Settings of how the models and engines under `samplers` generate responses: temperature, lengths, filters."""

    num_top_log_probs: Literal[0] = 0
    """Most probable tokens whose log-probs are returned: `top_log_probs` of the measurement decides."""


class MismatchConfig(SetsConfig):
    """All settings of one measurement by `jackpot mismatch`: every learner scores the responses of every sampler."""

    samplers: Annotated[tuple[SideConfig, ...], Field(strict=False, min_length=1)]
    """Models and engines that generate responses."""
    learners: Annotated[tuple[LearnerConfig, ...], Field(strict=False, min_length=1)]
    """Models and engines that score those responses."""
    task: TaskConfig = ArithmeticConfig()
    """Task whose held-out problems are the prompts."""
    benchmarks: AnyNames = ()
    """Names of sets of problems to take the prompts from instead of the task."""
    responses: Count = 256
    """Responses of each sampler, one to each problem; beyond the number of problems, further ones to the same."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of sampling and of generated problems."""
    sampling: MismatchSampling = MismatchSampling()
    """How the samplers generate responses."""
    top_log_probs: Count | None = None
    """Most probable tokens of the sampler's distribution that are compared at each position; null: the whole
    vocabulary, or 64 tokens where that takes too much memory."""
    reread: bool = False
    """Take a sampler's log-probs from scoring its responses again, as a learner does, instead of from sampling."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the engines; auto: a GPU where there is one."""
    threads: Count | Literal["auto"] = "auto"
    """CPU threads of torch; auto: the cores that are free at the start."""
