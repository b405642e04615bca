"""The tasks: one class of settings each, chosen by name. Pydantic only; see docs/tasks.md."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from jackpot.config.base import Count, Finite, Positive, Strict, by_name

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
ROW_NUMBER = "row"  # as columns.uid


class ArithmeticConfig(Strict):
    """Sums with written-out steps, made up on the spot."""

    name: Literal["arithmetic"] = "arithmetic"
    min_terms: Annotated[int, Field(ge=2)] = 2
    max_terms: Annotated[int, Field(ge=2)] = 3
    max_operand: Annotated[int, Field(ge=9)] = 40  # fewer numbers make too few problems to hold some out

    @model_validator(mode="after")
    def _check(self) -> "ArithmeticConfig":
        if self.min_terms > self.max_terms:
            raise ValueError(
                f"min_terms {self.min_terms} is above max_terms {self.max_terms}; lower it or raise the other"
            )
        return self


class ToolArithmeticConfig(ArithmeticConfig):
    """The same sums, with a calculator that answers every `=`."""

    name: Literal["tool_arithmetic"] = "tool_arithmetic"


class ColumnsConfig(Strict):
    """Which columns of the rows are read."""

    problem: str | None = None  # null: the benchmark's own, else `problem`
    answer: str | None = None  # null: the benchmark's own, else `answer`
    uid: str | None = None  # null: the benchmark's own, else `id` if there is one, else row; row: the row's number


class DataConfig(Strict):
    """Problems with answers: a benchmark, a data set of the hub, or files."""

    source: str  # a benchmark's name, hub:OWNER/NAME, or the path of a .jsonl, .json or .parquet file or of a folder
    subset: str | None = None  # of a data set of the hub
    split: str | None = None  # of the hub or a folder; null: the benchmark's own, else train for train, test for test
    columns: ColumnsConfig = ColumnsConfig()
    # What of the answer's column counts. hashes: what follows the last ####; boxed: what is in the last \boxed{}; null:
    # the benchmark's own, else plain.
    answers: Literal["plain", "hashes", "boxed"] | None = None
    streaming: bool = False  # read while training goes on, in the order of the rows, and never hold all of them
    limit: Count | None = None  # the first so many rows

    @model_validator(mode="after")
    def _check(self) -> "DataConfig":
        if self.streaming and self.columns.uid not in (None, ROW_NUMBER):
            raise ValueError(
                f"columns.uid is {self.columns.uid!r}, but streaming cannot see whether ids are unique without holding "
                f"all of them; leave columns.uid out (the row's number), or set streaming: false"
            )
        return self


def _by_source(value: Any) -> Any:
    """`train: gsm8k` is short for `train: {source: gsm8k}`; `merge` writes short forms out with `name`."""
    if isinstance(value, str):
        return {"source": value}
    if isinstance(value, Mapping) and "name" in value and "source" not in value:
        return {"source" if key == "name" else key: item for key, item in value.items()}
    return value


Data = Annotated[DataConfig, BeforeValidator(_by_source)]


class RewardConfig(Strict):
    """One part of a reward; the parts are summed (docs/rewards.md)."""

    name: str  # correct, format, or package.module:function
    weight: Finite = 1.0


Rewards = Annotated[
    tuple[Annotated[RewardConfig, by_name("correct")], ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str | Mapping) else value),
    Field(strict=False, min_length=1),  # a list in YAML
]


class QuestionConfig(Strict):
    """How a problem with one final answer is put to a model, and how what it writes is judged."""

    template: Literal["chat", "base"] = "chat"  # the tokenizer's own, or plain text (rollout/tasks/templates.py)
    system_prompt: str | None = None
    instruction: str = INSTRUCTION  # after the problem; may be empty
    rewards: Rewards = (RewardConfig(name="correct"),)
    workers: Count = 1  # processes that judge what is not a plain number
    seconds: Positive = 5.0  # to judge one response

    @model_validator(mode="after")
    def _check_rewards(self) -> "QuestionConfig":
        names = [reward.name for reward in self.rewards]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"rewards: {', '.join(twice)} is given more than once; give it once, with its weight")
        return self


class MathConfig(QuestionConfig):
    """Problems with one final answer each, from files or the hub."""

    name: Literal["math"] = "math"
    train: Data
    test: Data
    max_prompt_tokens: Count | None = None  # problems with longer prompts are left out, and counted; null: none is

    @model_validator(mode="after")
    def _check_streaming(self) -> "MathConfig":
        if self.test.streaming and self.test.limit is None:
            raise ValueError(
                "test.streaming needs test.limit: evaluation must know how many problems there are; set a limit, or "
                "streaming: false"
            )
        return self


TaskConfig = Annotated[
    ArithmeticConfig | ToolArithmeticConfig | MathConfig, Field(discriminator="name"), by_name("arithmetic")
]
