"""Problems with one final answer, from files or the hub: GSM8K, MATH and their like. See docs/tasks.md."""

import logging
from collections.abc import Sequence
from functools import cached_property
from typing import Any, get_args

from transformers import PreTrainedTokenizerBase

from jackpot.config.tasks import DataConfig, MathConfig, QuestionConfig
from jackpot.core.errors import DataError, unknown_name
from jackpot.core.types import DecodedResponse, Prompt, Score
from jackpot.rollout.rewards.rewards import BUILT_IN, RewardFn
from jackpot.rollout.rewards.verifier.extract import MAX_ANSWER_LENGTH
from jackpot.rollout.tasks.base import Split, Task
from jackpot.rollout.tasks.benchmarks import BENCHMARKS
from jackpot.rollout.tasks.data import DataRow, DataSource, locate
from jackpot.rollout.tasks.filters import Problems, RowCounts, StreamedProblems
from jackpot.rollout.tasks.templates import Template

_log = logging.getLogger(__name__)


class Math(Task):
    """The problems of `settings.train` and `settings.test`, written with the template and judged by the rewards.

    A split is read when it is first asked for. The judge's processes start with the first answer, unless rewards of
    one's own have to be looked for.

    Args:
        judge: one to share, which somebody else closes; None: one of its own.

    Raises:
        DataError: no such benchmark or file, or a tokenizer without what the template needs.
        ConfigError: a reward that does not exist or cannot be imported.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, settings: MathConfig, reward_fn: RewardFn | None = None
    ) -> None:
        self._settings, self._shared_reward_fn = settings, reward_fn
        self._sources: dict[Split, DataSource] = {
            split: locate(getattr(settings, split), split) for split in get_args(Split)
        }
        self._template = Template(
            settings.template, tokenizer, instruction=settings.instruction, system_prompt=settings.system_prompt
        )
        self._problems: dict[Split, Problems | StreamedProblems] = {}
        self._told: dict[Split, int] = {}  # rows left out
        if any(reward.name not in BUILT_IN for reward in settings.rewards):
            _ = self.reward_fn

    def size(self, split: Split) -> int | None:
        """How many problems are left of the split; None for a stream."""
        return self._of(split).size

    def first_index(self, split: Split, seed: int) -> int:
        """0: a stream begins where its source does, whatever the seed."""
        return 0

    def prompt(self, split: Split, index: int) -> Prompt:
        """Problem number `index`; its uid is SOURCE/SPLIT/ID.

        Raises:
            DataError: no such problem, or as `Problems` and `StreamedProblems`.
        """
        problems = self._of(split)
        if index < 0 or (problems.size is not None and index >= problems.size):
            last = "" if problems.size is None else f" to {problems.size - 1}"
            raise DataError(f"{self._sources[split].name} ({split}) has no problem {index}; they go from 0{last}")
        row = problems[index]
        text = self._template.text(row.problem)
        return Prompt(
            uid=f"{self._sources[split].name}/{split}/{row.uid}",
            text=text,
            answer=row.answer,
            token_ids=tuple(self._template.token_ids(text)),
        )

    def score(self, prompt: Prompt, response: str, finished: bool) -> Score:
        return self.scores([DecodedResponse(prompt, response, finished)])[0]

    def scores(self, responses: Sequence[DecodedResponse]) -> list[Score]:
        return self.reward_fn.scores(responses)

    def take_events(self) -> list[dict[str, Any]]:
        """For each split, how many rows were read and why some were left out: once, and again when a stream has left
        out more."""
        events = []
        for split, problems in self._problems.items():
            tally = problems.tally
            if self._told.get(split) != tally.left_out:
                self._told[split] = tally.left_out
                events.append(
                    {
                        "event": "data",
                        "split": split,
                        "source": self._sources[split].name,
                        "rows": tally.rows,
                        "without_answer": tally.without_answer,
                        "long_answer": tally.long_answer,
                        "too_long": tally.too_long,
                    }
                )
        return events

    def close(self) -> None:
        if self._shared_reward_fn is None and "reward_fn" in self.__dict__:
            self.reward_fn.close()

    @cached_property
    def reward_fn(self) -> RewardFn:
        """To share with other tasks that have the same rewards."""
        settings = self._settings
        return self._shared_reward_fn or RewardFn(settings.rewards, workers=settings.workers, timeout=settings.seconds)

    def _of(self, split: Split) -> Problems | StreamedProblems:
        """The problems of a split, read when they are first asked for."""
        if split not in self._sources:
            raise DataError(unknown_name("split", split, self._sources))
        if split not in self._problems:
            streams = split == "train" and self._settings.train.streaming
            self._problems[split] = (StreamedProblems if streams else Problems)(self._sources[split], self._fit)
            _warn(self._sources[split].name, split, self._problems[split].tally, self._settings.max_prompt_tokens)
        return self._problems[split]

    def _fit(self, rows: list[DataRow]) -> list[bool]:
        limit = self._settings.max_prompt_tokens
        if limit is None or not rows:
            return [True] * len(rows)
        lengths = self._template.lengths([self._template.text(row.problem) for row in rows])
        return [length <= limit for length in lengths]


def make_benchmark(
    name: str, tokenizer: PreTrainedTokenizerBase, settings: QuestionConfig, reward_fn: RewardFn | None = None
) -> Math:
    """A named data set as a task's test split; `judge` as in `Math`.

    Every problem counts, however long: a published number is about all of them.

    Raises:
        DataError: no such benchmark (lists them), or as `Math`.
    """
    if name not in BENCHMARKS:
        raise DataError(unknown_name("benchmark", name, BENCHMARKS))
    data = DataConfig(source=name)
    asked = settings.model_dump(include=set(QuestionConfig.model_fields))
    return Math(tokenizer, MathConfig(train=data, test=data, **asked), reward_fn)


def _warn(name: str, split: Split, tally: RowCounts, limit: int | None) -> None:
    """Say on standard error what was left out; a stream says it in events.jsonl as it goes on."""
    if not tally.left_out:
        return
    why = {
        "have no answer": tally.without_answer,
        f"have an answer of more than {MAX_ANSWER_LENGTH:,} characters": tally.long_answer,
        f"are longer than {limit} tokens": tally.too_long,
    }
    reasons = " and ".join(f"{count:,} {what}" for what, count in why.items() if count)
    _log.warning("%s (%s): of %s rows %s; %s are left", name, split, f"{tally.rows:,}", reasons, f"{tally.kept:,}")
