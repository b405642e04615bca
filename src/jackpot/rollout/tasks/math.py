"""The math task: problems with one final answer, such as the problems of GSM8K and MATH. See docs/own-problem.md.

The problems come from benchmarks, files or the hub (`data.py`). Responses are scored by built-in rewards, which compare
answers, and by reward functions of the user (`rewards.py`).
"""

import logging
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, get_args

from transformers import PreTrainedTokenizerBase

from jackpot.config.tasks import DataConfig, MathConfig, QuestionConfig, VerdictConfig
from jackpot.core.errors import DataError, unknown_name
from jackpot.core.types import DecodedResponse, Prompt, Score
from jackpot.rollout.rewards.rewards import BUILT_IN, REWARD, RewardFn
from jackpot.rollout.rewards.verifier.extract import MAX_ANSWER_LENGTH
from jackpot.rollout.tasks.base import BatchScoredTask, PromptSource, Split
from jackpot.rollout.tasks.benchmarks import BENCHMARKS
from jackpot.rollout.tasks.data import (
    COUNTED,
    DataSource,
    Problems,
    PromptSize,
    RowCounts,
    find_sources,
    longest,
)
from jackpot.rollout.tasks.rows import DataRow
from jackpot.rollout.tasks.templates import Template

_log = logging.getLogger(__name__)


class Math(BatchScoredTask):
    """A task whose problems come from the sources `settings.train` and `settings.test`, scored by `settings.rewards`.

    A split is read on its first use. Reward workers start with the first response, or at once where the settings name a
    reward function of the user, which must be importable.

    Args:
        reward_fn: a reward shared with other tasks, which the caller closes; None: the task makes and closes a reward.
        splits: the splits that can be read, train, test or both.

    Raises:
        DataError: there is no such benchmark or file, or the tokenizer does not fit the template.
        ConfigError: a reward does not exist or cannot be imported.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        settings: MathConfig,
        reward_fn: RewardFn | None = None,
        splits: Sequence[Split] = get_args(Split),
    ) -> None:
        """Find the sources of `splits` without reading them; a `reward_fn` is shared with other tasks."""
        self._settings = settings
        self._shared_reward_fn = reward_fn
        self._sources: dict[Split, list[DataSource]] = {
            split: find_sources(settings.sources(split), split) for split in splits
        }
        self._template = Template(
            settings.template, tokenizer, instruction=settings.instruction, system_prompt=settings.system_prompt
        )
        self._problems: dict[Split, list[Problems]] = {}  # by split that was read, the problems of each source
        self._events: list[dict[str, Any]] = []  # events since the last `take_events`

        names = {reward.name for reward in settings.rewards} | ({settings.verdict.name} if settings.verdict else set())
        # Access `reward_fn` to import reward functions of the user now, so that a run with a wrong name ends at once.
        if names - {REWARD, *BUILT_IN}:
            _ = self.reward_fn

    def size(self, split: Split) -> int:
        """Return the number of usable problems of all sources of a split."""
        return sum(len(problems.rows) for problems in self._problems_of(split))

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return problem `index` of a split, counted through one source after the other, with the uid SOURCE/SPLIT/ID.

        Raises:
            DataError: the split has no such problem, or as `Problems`.
        """
        offset = index
        for problems in self._problems_of(split):
            if 0 <= offset < len(problems.rows):
                return self._prompt(split, problems, offset)
            offset -= len(problems.rows)
        names = ", ".join(source.name for source in self._sources[split])
        raise DataError(f"{names} ({split}) has no problem {index}; they go from 0 to {self.size(split) - 1}")

    def prompt_sources(self, split: Split, seed: int) -> list[PromptSource]:
        """Return each source of the split with its weight."""
        return [
            PromptSource(
                weight=problems.source.settings.weight,
                size=len(problems.rows),
                prompt=partial(self._prompt, split, problems),
                first=0,
            )
            for problems in self._problems_of(split)
        ]

    def _prompt(self, split: Split, problems: Problems, index: int) -> Prompt:
        """Return problem `index` of one source of a split as a prompt."""
        row = problems.rows[index]
        return self._template.prompt(f"{problems.source.name}/{split}/{row.uid}", row.problem, row.answers)

    def scores(self, responses: Sequence[DecodedResponse]) -> list[Score]:
        """Score responses with the task's `RewardFn`, in their order."""
        return self.reward_fn.scores(responses, self._settings.decides)

    def start_scoring(self, responses: Sequence[DecodedResponse]) -> Callable[[], list[Score]]:
        """Begin to score responses, and return a function that waits for the scores.

        A call of a reward function that has not begun within `reward_batch_timeout` fails.
        """
        return self.reward_fn.submit(responses, self._settings.decides, self._settings.reward_batch_timeout)

    def take_events(self) -> list[dict[str, Any]]:
        """Return an event for each source read since the last call, with the numbers of rows read and left out."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """End the reward workers, unless `reward_fn` is shared."""
        if self._shared_reward_fn is None and "reward_fn" in self.__dict__:  # an access has made it
            self.reward_fn.close()

    @cached_property
    def reward_fn(self) -> RewardFn:
        """Return the `RewardFn` that scores responses: the shared one, or one that the first access makes."""
        settings = self._settings
        return self._shared_reward_fn or RewardFn(
            settings.rewards,
            workers=settings.reward_workers,
            timeout=settings.reward_timeout,
            verdict=settings.decides,
        )

    def _problems_of(self, split: Split) -> list[Problems]:
        """Return the problems of each source of a split; the first call reads them, and says what was left out."""
        if split not in self._sources:
            raise DataError(unknown_name("split", split, self._sources))

        if split not in self._problems:
            limit = self._settings.max_prompt_tokens
            self._problems[split] = [Problems(source, self._measure, limit) for source in self._sources[split]]
            for problems in self._problems[split]:
                name, counts = problems.source.name, problems.counts
                _warn(name, split, counts, limit)
                numbers = {column: counts[column] for column in COUNTED} | {"max_prompt_tokens": limit}
                self._events.append({"event": "data", "split": split, "source": name, **numbers})

        return self._problems[split]

    def _measure(self, rows: list[DataRow]) -> list[PromptSize]:
        """Return the size of the prompt of each row."""
        return self._template.measure([self._template.text(row.problem) for row in rows])


def make_benchmark(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, settings: QuestionConfig, reward_fn: RewardFn | None = None
) -> Math:
    """Make a task that has only a test split, with the problems of one source; `reward_fn` as in `Math`.

    Problems of any length are kept (`settings` have no `max_prompt_tokens`), as published results are about all
    problems. So that results can be compared with published ones, the verifier decides which responses to a named
    benchmark are right, unless `settings.verdict` says otherwise.

    Raises:
        DataError: there is no such source, or as `Math`.
    """
    fields = settings.model_dump(include=set(QuestionConfig.model_fields))
    # The verdict named `correct`, which is built in, is given by the verifier.
    fields["verdict"] = settings.verdict or (VerdictConfig(name="correct") if data.source in BENCHMARKS else None)
    # `MathConfig` requires `train`, which is not read here.
    return Math(tokenizer, MathConfig(train=data, test=data, **fields), reward_fn, splits=("test",))


def _warn(name: str, split: Split, counts: RowCounts, limit: int | None) -> None:
    """Log warnings about rows that were left out, and about answers and text that cannot be read."""
    source = f"{name} ({split})"
    if counts["unreadable_answer"]:
        _log.warning(
            "%s: the answers of %d rows are no number, expression or words, so only the same text is right; see "
            "answers and columns.answer",
            *(source, counts["unreadable_answer"]),
        )
    if counts["unknown_tokens"]:
        _log.warning("%s: the tokenizer has no tokens for parts of %d prompts", source, counts["unknown_tokens"])

    left_out = {
        "have no answer": counts["without_answer"],
        f"have an answer of more than {MAX_ANSWER_LENGTH:,} characters": counts["long_answer"],
        f"are longer than {longest(limit)}": counts["too_long"],
    }
    if reasons := " and ".join(f"{count:,} {reason}" for reason, count in left_out.items() if count):
        _log.warning("%s: of %s rows %s; %s are left", source, f"{counts['rows']:,}", reasons, f"{counts.kept:,}")
