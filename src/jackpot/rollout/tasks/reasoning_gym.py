"""The task of reasoning-gym (Stojanovski et al. 2025, arXiv 2505.24760), a library that generates and scores problems.

A problem is a pure function of the data set's settings, the split and an index. The hash of its question selects the
split, so no test question is a training question. The library scores answers in worker processes with a time limit; a
data set whose scorer would execute what a model wrote is refused.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from itertools import count
from typing import Any

from transformers import PreTrainedTokenizerBase

from jackpot.config.tasks import ReasoningGymConfig
from jackpot.core.cores import free_cores
from jackpot.core.errors import ConfigError, DataError, unknown_name
from jackpot.core.package import install
from jackpot.core.prng import fold_in
from jackpot.core.types import DecodedResponse, Prompt, Score
from jackpot.rollout.rewards.pool import CallLimits, RewardResult, RewardWorkerPool
from jackpot.rollout.tasks.base import BatchScoredTask, PromptSource, Split
from jackpot.rollout.tasks.templates import Template

TEST_SHARE = 0.1  # share of questions in the test split
PROBLEMS = 20_000  # size with which a data set is made; every data set of the library can generate so many problems
_SCORER = "jackpot.rollout.tasks.gym_scorer:score_answer"
_EXECUTES = re.compile(r"\b(eval|exec|parse_expr|sympify)\(")  # calls that execute a text as Python


class ReasoningGym(BatchScoredTask):
    """A task of endless problems from several data sets; the reward is the score that the library gives, from 0 to 1.

    Raises:
        ConfigError: reasoning-gym is not installed.
        DataError: a data set does not exist, does not take these settings, or scores by executing answers; or the
            tokenizer does not fit the template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: ReasoningGymConfig) -> None:
        """Make the data sets that the settings name, and a pool of workers that score answers."""
        if find_spec("reasoning_gym") is None:
            raise ConfigError(f"reasoning-gym is not installed, which generates the problems: {install('gym')}")
        self._settings = settings
        self._data = [_make_data_set(data.name, data.kwargs) for data in settings.dataset]
        self._template = Template(
            settings.template, tokenizer, instruction=settings.instruction, system_prompt=settings.system_prompt
        )
        workers = free_cores() if settings.reward_workers == "auto" else settings.reward_workers
        # Processes that score answers by `gym_scorer.score_answer`.
        self._pool = RewardWorkerPool(_SCORER, CallLimits(settings.reward_timeout), workers=workers)

    def size(self, split: Split) -> None:
        """Return None: both splits are endless."""

    def prompt_sources(self, split: Split, seed: int) -> list[PromptSource]:
        """Return each data set as an endless source of problems, with the weight that the settings give it."""
        first = self.first_index(split, seed)
        return [
            PromptSource(weight=data.weight, size=None, prompt=partial(self._prompt, split, source_index), first=first)
            for source_index, data in enumerate(self._settings.dataset)
        ]

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return problem `index` of a split, whose problems come from the data sets in turn, one from each."""
        index_in_source, source_index = divmod(index, len(self._data))
        return self._prompt(split, source_index, index_in_source)

    def scores(self, responses: Sequence[DecodedResponse]) -> list[Score]:
        """Score responses by their answers: the last match of `answer_regex`, or a whole response without a match."""
        return self.start_scoring(responses)()

    def start_scoring(self, responses: Sequence[DecodedResponse]) -> Callable[[], list[Score]]:
        """Begin to score responses in worker processes; the returned function waits for the scores."""
        wait = self._pool.submit([self._item(response) for response in responses])
        return lambda: [self._score(result) for result in wait()]

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()

    def _prompt(self, split: Split, source_index: int, index: int) -> Prompt:
        """Return problem `index` of a split of one data set.

        Problems are tried in hashed order until the question of one belongs to the split.
        """
        for attempt in count():
            entry = fold_in("reasoning_gym", split, index, attempt) % PROBLEMS  # number of a problem in the data set
            problem = self._data[source_index][entry]
            if _split_of(problem) == split:
                break

        # Two indices may hash to one problem, and a batch may hold both, so the uid has the index too.
        uid = f"{self._settings.dataset[source_index].name}/{source_index}/{entry}@{index}"
        return self._template.prompt(uid, problem["question"], [str(problem["answer"])])

    def _item(self, response: DecodedResponse) -> dict[str, Any]:
        """Return the keyword arguments with which a worker calls `gym_scorer.score_answer` for a response."""
        _, source_index, entry = response.prompt.uid.partition("@")[0].rsplit("/", 2)  # NAME/SOURCE/ENTRY@INDEX
        data = self._settings.dataset[int(source_index)]
        # Find the last match, or None where nothing matches. The answer is the last group of the match, or the whole
        # match without groups, or the whole response without a match.
        *_, match = (None, *self._settings.answer_regex.finditer(response.text))
        answer = response.text if match is None else match[match.lastindex or 0]
        return {
            "name": data.name,
            "arguments": _arguments(data.kwargs),
            "entry": int(entry),
            "answer": answer.strip(),
        }

    def _score(self, result: RewardResult) -> Score:
        """Turn the result of a worker, a reward or an error, into a score."""
        return Score(
            reward=result.value,
            correct=result.error is None and result.value >= self._settings.solved,
            reward_error=result.error,
            error_text=result.text,
        )


def _make_data_set(name: str, kwargs: Mapping[str, Any]) -> Any:
    """Make the data set `name`; raise DataError if it cannot be made, or if it scores by executing answers."""
    from reasoning_gym.factory import DATASETS, create_dataset

    if name not in DATASETS:
        raise DataError(unknown_name("data set of reasoning-gym", name, DATASETS))
    # A name stands for a pair of classes in DATASETS: that of the data set, and that of its settings.
    if _EXECUTES.search(inspect.getsource(DATASETS[name][0].score_answer)):
        raise DataError(
            f"the scorer of reasoning-gym's {name} executes what a model writes as Python; take another data set, or "
            f"score its problems by a reward of your own (docs/rewards.md)"
        )
    try:
        return create_dataset(name, **_arguments(kwargs))
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(f"reasoning-gym does not make {name} with {dict(kwargs)}: {error}; see its kwargs") from error


def _arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Add the seed and size that the settings of a data set lack, so that every process makes the same problems."""
    return {"seed": 0, "size": PROBLEMS, **kwargs}


def _split_of(problem: Mapping[str, Any]) -> Split:
    """Return the split of a problem, which the hash of its question selects."""
    return "test" if fold_in("reasoning_gym", problem["question"]) / 2**64 < TEST_SHARE else "train"
