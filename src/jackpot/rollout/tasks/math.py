"""Defines the math task: problems with one final answer, such as those of GSM8K and MATH. See docs/tasks.md."""

import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, get_args

from transformers import PreTrainedTokenizerBase

from jackpot.config.tasks import DataConfig, MathConfig, QuestionConfig, VerdictConfig
from jackpot.core.errors import DataError, unknown_name
from jackpot.core.types import DecodedResponse, Prompt, Score
from jackpot.rollout.rewards.rewards import BUILT_IN, REWARD, RewardFn
from jackpot.rollout.rewards.verifier.extract import MAX_ANSWER_LENGTH
from jackpot.rollout.tasks.base import Split, Task
from jackpot.rollout.tasks.benchmarks import BENCHMARKS
from jackpot.rollout.tasks.data import DataRow, DataSource, find_source
from jackpot.rollout.tasks.filters import Problems, RowCounts, StreamedProblems
from jackpot.rollout.tasks.templates import Template

_log = logging.getLogger(__name__)


class Math(Task):
    """Provides the problems of `settings.train` and `settings.test` as prompts, and scores responses by the rewards.

    A split is read on its first use. Reward workers start with the first response, or at once where the settings name a
    reward function of the user, which must be importable.

    Args:
        reward_fn: a reward to share, which the caller closes; None: the task makes and closes its own.

    Raises:
        DataError: there is no such benchmark or file, or the tokenizer does not fit the template.
        ConfigError: a reward does not exist or cannot be imported.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, settings: MathConfig, reward_fn: RewardFn | None = None
    ) -> None:
        self._settings, self._shared_reward_fn = settings, reward_fn
        self._sources: dict[Split, DataSource] = {
            split: find_source(getattr(settings, split), split) for split in get_args(Split)
        }
        self._template = Template(
            settings.template, tokenizer, instruction=settings.instruction, system_prompt=settings.system_prompt
        )
        self._problems: dict[Split, Problems | StreamedProblems] = {}
        self._reported: dict[Split, int] = {}  # rows left out, as of the last event
        names = {reward.name for reward in settings.rewards} | ({settings.verdict.name} if settings.verdict else set())
        if names - {REWARD, *BUILT_IN}:
            _ = self.reward_fn

    def size(self, split: Split) -> int | None:
        """Return the number of problems left in the split, or None for a stream."""
        return self._problems_of(split).size

    def first_index(self, split: Split, seed: int) -> int:
        """Return 0: a stream begins with the first row of its source for every seed."""
        return 0

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return problem number `index`, with the uid SOURCE/SPLIT/ID.

        Raises:
            DataError: there is no such problem, or as `Problems` and `StreamedProblems`.
        """
        problems = self._problems_of(split)
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
        """Score one response as `scores` does."""
        return self.scores([DecodedResponse(prompt, response, finished)])[0]

    def scores(self, responses: Sequence[DecodedResponse]) -> list[Score]:
        """Score responses with the task's `RewardFn`."""
        return self.reward_fn.scores(responses, self._settings.decides)

    def start_scoring(self, responses: Sequence[DecodedResponse]) -> Callable[[], list[Score]]:
        """Begin to score responses, with the limit on waiting that rollout batches have."""
        return self.reward_fn.submit(responses, self._settings.decides, self._settings.reward_batch_timeout)

    def take_events(self) -> list[dict[str, Any]]:
        """Return one event for each split with the counts of rows read and left out; a stream that has left out more
        rows since its last event gets another."""
        events = []
        for split, problems in self._problems.items():
            counts = problems.counts
            if self._reported.get(split) != counts.left_out:
                self._reported[split] = counts.left_out
                events.append(
                    {
                        "event": "data",
                        "split": split,
                        "source": self._sources[split].name,
                        "rows": counts.rows,
                        "without_answer": counts.without_answer,
                        "long_answer": counts.long_answer,
                        "too_long": counts.too_long,
                    }
                )
        return events

    def close(self) -> None:
        """End the reward workers, unless `reward_fn` is shared."""
        if self._shared_reward_fn is None and "reward_fn" in self.__dict__:
            self.reward_fn.close()

    @cached_property
    def reward_fn(self) -> RewardFn:
        """Return the reward of this task, which other tasks with the same rewards may share."""
        own = self._settings
        limits = {"workers": own.reward_workers, "timeout": own.reward_timeout}
        return self._shared_reward_fn or RewardFn(own.rewards, **limits, verdict=own.decides)

    def _problems_of(self, split: Split) -> Problems | StreamedProblems:
        """Return the problems of a split, read on the first call."""
        if split not in self._sources:
            raise DataError(unknown_name("split", split, self._sources))
        if split not in self._problems:
            streams = split == "train" and self._settings.train.streaming
            self._problems[split] = (StreamedProblems if streams else Problems)(self._sources[split], self._fits)
            _warn(self._sources[split].name, split, self._problems[split].counts, self._settings.max_prompt_tokens)
        return self._problems[split]

    def _fits(self, rows: list[DataRow]) -> list[bool]:
        """Return whether the prompt of each row is within `max_prompt_tokens`."""
        limit = self._settings.max_prompt_tokens
        if limit is None or not rows:
            return [True] * len(rows)
        lengths = self._template.lengths([self._template.text(row.problem) for row in rows])
        return [length <= limit for length in lengths]


def make_benchmark(
    name: str, tokenizer: PreTrainedTokenizerBase, settings: QuestionConfig, reward_fn: RewardFn | None = None
) -> Math:
    """Make a task whose test split is a benchmark; `reward_fn` as in `Math`.

    No problem is left out for its length, since published numbers are about all problems. Without a verdict in the
    settings the verifier decides what is right, for the same reason, even where rewards are a function of the user.

    Raises:
        DataError: there is no such benchmark (lists them), or as `Math`.
    """
    if name not in BENCHMARKS:
        raise DataError(unknown_name("benchmark", name, BENCHMARKS))
    data = DataConfig(source=name)
    asked = settings.model_dump(include=set(QuestionConfig.model_fields))
    asked["verdict"] = settings.verdict or VerdictConfig(name="correct")
    return Math(tokenizer, MathConfig(train=data, test=data, **asked), reward_fn)


def _warn(name: str, split: Split, counts: RowCounts, limit: int | None) -> None:
    """Log a warning about rows left out; those of a stream are counted in events.jsonl as it is read."""
    if not counts.left_out:
        return
    why = {
        "have no answer": counts.without_answer,
        f"have an answer of more than {MAX_ANSWER_LENGTH:,} characters": counts.long_answer,
        f"are longer than {limit} tokens": counts.too_long,
    }
    reasons = " and ".join(f"{count:,} {what}" for what, count in why.items() if count)
    _log.warning("%s (%s): of %s rows %s; %s are left", name, split, f"{counts.rows:,}", reasons, f"{counts.kept:,}")
