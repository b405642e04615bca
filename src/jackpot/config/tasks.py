"""Settings of the tasks, one class each, chosen by name (docs/own-problem.md)."""

import re
from collections.abc import Mapping, Sequence
from re import Pattern
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from jackpot.config.base import (
    MAY_CHANGE,
    ONE_IS_ENOUGH,
    AnyNames,
    Bound,
    Conflicts,
    Count,
    Finite,
    ImportPath,
    NonNegative,
    Strict,
    by_name,
)
from jackpot.core.errors import repeated

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."
ROW_NUMBER = "row"  # the value of `columns.uid` that makes the number of a row the id of its problem


class ArithmeticConfig(Strict):
    """Sums with written-out steps, generated without any data."""

    name: Literal["arithmetic"] = "arithmetic"
    min_terms: Annotated[int, Field(ge=2)] = 2
    """Fewest terms of a sum."""
    max_terms: Annotated[int, Field(ge=2)] = 3
    """Most terms of a sum."""
    max_operand: Annotated[int, Field(ge=9)] = 40
    """Largest term of a sum; below 9 there are too few problems to hold some out."""

    def conflicts(self) -> Conflicts:
        """Refuse a smallest number of terms above the largest."""
        return [
            (
                self.min_terms > self.max_terms,
                f"min_terms {self.min_terms} is above max_terms {self.max_terms}; lower it or raise the other",
            ),
        ]


class ToolArithmeticConfig(ArithmeticConfig):
    """The sums of `arithmetic`, with a calculator that answers every `=` of a response."""

    name: Literal["tool_arithmetic"] = "tool_arithmetic"


class SumsConfig(ArithmeticConfig):
    """Sums asked in English by the tokenizer's chat template, generated without any data; the last number of a response
    counts."""

    name: Literal["sums"] = "sums"
    max_terms: Annotated[int, Field(ge=2)] = 2
    """Most terms of a sum."""
    max_operand: Annotated[int, Field(ge=9)] = 20
    """Largest term of a sum; below 9 there are too few problems to hold some out."""
    question: Annotated[str, Field(pattern=r"\{sum\}")] = "What is {sum}? Answer with the number."
    """Text of a problem; {sum} stands for the sum, such as 14 + 9."""


class ColumnsConfig(Strict):
    """Names of the columns that are read from each row. A dotted name leads into nested values, such as
    `reward_model.ground_truth`."""

    problem: str | None = None
    """Column with the problem, as text or as chat messages, or a text with columns in braces, such as
    "{Body} {Question}"; null: the benchmark's own, else `problem`."""
    answer: str | None = None
    """Column with the reference answer, or with a list of answers any of which is right; null: the benchmark's own,
    else `answer`."""
    options: AnyNames = ()
    """Multiple choice: the column with the list of options, or one column for each; letter and text of the right one
    are then the answer."""
    uid: str | None = None
    """Column with the problem's id, or `row` for the row's number; null: the benchmark's own, else `id` if there is
    one, else `row`."""


class AnswersConfig(Strict):
    """Settings of which part of the text in the answer column is the right answer."""

    name: Literal["plain", "hashes", "boxed", "letter", "regex"]
    """All of the column (plain), what follows the last #### (hashes), what is in the last boxed{} of LaTeX (boxed), the
    letter of multiple choice that the column begins with (letter), or what `regex` finds (regex)."""
    regex: Pattern[str] | None = None
    """Regular expression that is searched in the column: the answer is what the first group of its last match holds, or
    the whole match where it has no group."""

    def conflicts(self) -> Conflicts:
        """Refuse `name: regex` without a regular expression, which the setting `regex` has."""
        return [
            (
                self.name == "regex" and self.regex is None,
                "answers are found by a regular expression, but regex is null; give one",
            ),
        ]


def _by_regex(value: Any) -> Any:
    """Add `name: regex` to a block of `answers` that has a `regex`; return any other value as it is."""
    has_regex = isinstance(value, Mapping) and value.get("regex") is not None
    return {**value, "name": "regex"} if has_regex else value


# Validators of one annotation run from the last to the first: here, `by_name` first makes a block of a name.
Answers = Annotated[AnswersConfig | None, BeforeValidator(_by_regex), by_name()]


class DataConfig(Strict):
    """Problems with answers: a benchmark, a data set of the Hugging Face hub, or files."""

    source: str
    """A benchmark's name, hub:OWNER/NAME, or the path of a .jsonl, .json, .csv or .parquet file (the first three also
    with .gz) or of a folder of them."""
    subset: str | None = None
    """Subset of a data set of the hub; null: the benchmark's own, else none."""
    split: str | None = None
    """Split of a data set of the hub or of a folder; null: the benchmark's own, else train for `task.train` and test
    for `task.test`."""
    columns: ColumnsConfig = ColumnsConfig()
    """Names of the columns that are read from each row."""
    answers: Answers = None
    """Part of the answer's column that is the answer, as a name or {regex: ...}; null: the benchmark's own, else
    plain."""
    limit: Count | None = None
    """Number of rows that are read, from the first; null: all."""
    weight: Finite = 1.0
    """Share of the prompts that come from this source, relative to the other sources of a list."""


def _by_source(value: Any) -> Any:
    """Turn `{name: gsm8k}`, the form that `by_name` and `merge` give to `train: gsm8k`, into `{source: gsm8k}`."""
    if isinstance(value, Mapping) and "name" in value and "source" not in value:
        return {"source" if key == "name" else key: item for key, item in value.items()}
    return value


Data = Annotated[DataConfig, BeforeValidator(_by_source), by_name()]
Sources = Annotated[
    Annotated[Data, Tag("one")] | Annotated[tuple[Data, ...], Field(strict=False, min_length=1), Tag("several")],
    Discriminator(lambda value: "several" if isinstance(value, list | tuple) else "one"),
]


class RewardConfig(Strict):
    """One part of a response's reward; the parts are summed (docs/rewards.md)."""

    name: str
    """Reward function: correct, format, or package.module:function."""
    weight: NonNegative = 1.0
    """Factor of this part in the sum."""
    timeout: Finite | None = None
    """Time limit of one call of the function, seconds; null: `reward_timeout`."""
    retries: Annotated[int, Field(ge=0)] = 0
    """How often a call that failed or took too long is repeated, after 1, 2, 4, ... seconds."""
    batch_size: Count = 64
    """Most responses in one call of a function that takes batches, or that an async function rates at the same time."""
    memory: Bound = 2.0
    """Memory that the function's process may take beyond what it had after importing the function, GiB; null or .inf:
    no limit."""
    environment: AnyNames = ()
    """Names of environment variables that the function's process gets beside those of an allow list, such as
    [OPENAI_API_KEY]; it has no keys and tokens without that."""

    def conflicts(self) -> Conflicts:
        """Refuse limits on a reward that is not a function of the user's own."""
        changed = {key for key, field in type(self).model_fields.items() if getattr(self, key) != field.default}
        limits = changed - {"name", "weight"}  # of the given settings, those that only functions of your own have
        return [
            (
                ":" not in self.name and limits,  # the name of a function of your own has a colon
                f"{', '.join(sorted(limits))} was given for {self.name!r}; only functions of your own, "
                "package.module:function, have limits of their own",
            ),
        ]


Rewards = Annotated[
    tuple[Annotated[RewardConfig, by_name("correct")], ...],
    ONE_IS_ENOUGH,
    Field(strict=False, min_length=1),  # a list in YAML
]


class VerdictConfig(Strict):
    """The rule by which a response counts as right: a number, such as the reward, reaches a threshold."""

    name: str
    """Number that decides: reward (the weighted sum), correct, format, or package.module:function."""
    threshold: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Least number of a right response."""


def _by_threshold(value: Any) -> Any:
    """Expand `verdict: 0.5` to `{threshold: 0.5}`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return {"threshold": value} if is_number else value


class QuestionConfig(Strict):
    """Settings of how a problem with one final answer is put to a model, and how the response is rewarded."""

    template: Literal["chat", "base", "plain"] = "chat"
    """Form of the prompt: the tokenizer's chat template, plain text for base models, or the problem alone."""
    system_prompt: str | None = None
    """System message of the prompt; null: the chat template's own, if it has one."""
    instruction: str = INSTRUCTION
    """Text after the problem; it may be empty."""
    rewards: Rewards = (RewardConfig(name="correct"),)
    """Parts of the reward, each a name or a block of name and weight."""
    verdict: Annotated[VerdictConfig | None, by_name("reward"), BeforeValidator(_by_threshold)] = None
    """Which responses count as right in accuracies and for the checkpoint `best`: a name, or a number that the reward
    must reach; null: those that are `correct`, where that is among the rewards, else none, and mean rewards stand in
    place of accuracies."""
    reward_workers: Annotated[Count | Literal["auto"], MAY_CHANGE] = "auto"
    """Most processes that verify answers which are not plain numbers, and as many more for each reward function that is
    neither async nor takes batches; auto: the cores that are free when the task is made."""
    reward_timeout: Finite = 5.0
    """Time limit to verify one response or to call one reward function, seconds; after that the response counts as
    wrong."""
    reward_batch_timeout: Bound = 600.0
    """Longest time that a response of a rollout batch waits for its turn to be scored, seconds; after that it counts as
    one that took too long. Evaluations have no such limit."""

    def conflicts(self) -> Conflicts:
        """Refuse a reward that is given twice, and rewards that all have weight 0."""
        twice = repeated([reward.name for reward in self.rewards])
        return [
            (
                twice,
                f"rewards: {', '.join(sorted(twice))} is given more than once; give it once, with its weight",
            ),
            (
                not any(reward.weight for reward in self.rewards),
                "rewards: all have weight 0, so every reward would be 0; give one a weight",
            ),
        ]

    @property
    def decides(self) -> VerdictConfig | None:
        """Return the rule by which a response counts as right, `verdict` or its default; None without a rule."""
        is_verified = any(reward.name == "correct" for reward in self.rewards)
        return self.verdict or (VerdictConfig(name="correct") if is_verified else None)


class MathConfig(QuestionConfig):
    """Problems with one final answer each, from files or the hub."""

    name: Literal["math"] = "math"
    train: Sources
    """Problems that the models are trained on: a source, a block with a source, or a list of either, whose prompts are
    mixed by weight."""
    test: Data
    """Held-out problems of evaluations: a source, or a block with a source."""
    max_prompt_tokens: Count | None = None
    """Longest prompt, tokens: problems with longer ones are left out and counted; null: what sampling.max_new_tokens
    leaves of the context and of batch.micro_batch_tokens, which is the limit of larger numbers too."""

    def sources(self, split: Literal["train", "test"]) -> Sequence[DataConfig]:
        """Return the data sets that a split's problems come from, as a sequence even where there is only one."""
        sources = getattr(self, split)
        return sources if isinstance(sources, tuple) else (sources,)


class GymDataConfig(Strict):
    """A data set of reasoning-gym."""

    name: str
    """Name of the data set, such as chain_sum."""
    weight: Finite = 1.0
    """Share of the prompts that come from this data set, relative to the others."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Settings of the data set, such as {min_terms: 2}."""


class ReasoningGymConfig(Strict):
    """Problems that the library reasoning-gym generates and scores (docs/own-problem.md). It needs the extra `gym`."""

    name: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: Annotated[
        tuple[Annotated[GymDataConfig, by_name("")], ...],
        ONE_IS_ENOUGH,
        Field(strict=False, min_length=1),
    ]
    """Data sets that prompts are drawn from, each a name or a block of name, weight and kwargs."""
    template: Literal["chat", "base", "plain"] = "chat"
    """Form of the prompt: the tokenizer's chat template, plain text for base models, or the problem alone."""
    system_prompt: str | None = None
    """System message of the prompt; null: the chat template's own, if it has one."""
    instruction: str = "Put the final answer between <answer> and </answer>."
    """Text after the problem."""
    answer_regex: Pattern[str] = re.compile(r"(?s)<answer>(.*?)</answer>")
    """What an answer looks like in a response: of the last match its last group counts, or all of it where it has none;
    of a response without a match all of its text."""
    solved: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Least score of an answer that counts as right."""
    reward_workers: Annotated[Count | Literal["auto"], MAY_CHANGE] = "auto"
    """Most processes that score answers; auto: the cores that are free when the task is made."""
    reward_timeout: Finite = 5.0
    """Time limit to score one answer, seconds; after that it counts as wrong."""


class CustomTaskConfig(Strict):
    """A task of your own: a class that is constructed from a tokenizer and these settings (examples/own_task.py)."""

    name: Literal["custom"] = "custom"
    import_path: ImportPath
    """Class of the task as package.module:Class; the module may lie in the current folder."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Settings that the class reads."""


class EnvironmentConfig(Strict):
    """Episodes of an environment with `reset` and `step`, as Gymnasium's, whose observations and actions are text."""

    name: Literal["environment"] = "environment"
    import_path: ImportPath
    """What makes the environment, a class or a function, as package.module:name; the module may lie in the current
    folder."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments that it is called with."""
    template: Literal["chat", "base", "plain"] = "chat"
    """Form of the prompt: the tokenizer's chat template, plain text for base models, or the problem alone."""
    solved: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Least sum of an episode's rewards that counts as right."""


TaskConfig = Annotated[
    ArithmeticConfig
    | ToolArithmeticConfig
    | SumsConfig
    | MathConfig
    | ReasoningGymConfig
    | EnvironmentConfig
    | CustomTaskConfig,
    Field(discriminator="name"),
    by_name("arithmetic"),
]
