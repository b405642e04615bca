"""What every task promises: prompts to answer, a score for each response, what its tool says if it has one."""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from jackpot.core.errors import DataError
from jackpot.core.prng import stream_key
from jackpot.core.types import Answer, Prompt, Score

Split = Literal["train", "test"]


class Task(ABC):
    """A source of problems with a verifiable reward. Problems are drawn by index, so a stream can be resumed.

    A task with a tool names the tokens at which the model stops and hands the word to `reply`.
    """

    turn_ends: tuple[int, ...] = ()  # token ids

    @abstractmethod
    def size(self, split: Split) -> int | None:
        """How many problems the split has; None where it is endless."""

    def first_index(self, split: Split, seed: int) -> int:
        """The index at which a run with this seed enters an endless split: a place of its own for each seed."""
        return stream_key(seed, "prompts") % 2**40

    @abstractmethod
    def prompt(self, split: Split, index: int) -> Prompt:
        """Problem number `index` of a split, tokenized; the same index always gives the same problem."""

    @abstractmethod
    def score(self, prompt: Prompt, response: str, finished: bool) -> Score:
        """Judge one decoded response. `finished` is False where it was cut at the limit."""

    def scores(self, answers: Sequence[Answer]) -> list[Score]:
        """Judge many, in their order. A task whose judge works elsewhere, or on several at once, has its own."""
        return [self.score(*answer) for answer in answers]

    def take_events(self) -> list[dict[str, Any]]:
        """What happened since the last call and a person should know of, such as data that was left out: an `event`
        each, with its details."""
        return []

    def close(self) -> None:  # noqa: B027 - most tasks hold nothing
        """Free what judging holds, such as processes; nothing is judged afterwards. A second time does nothing."""

    def reply(self, prompt: Prompt, response: str) -> str | None:
        """What the tool appends to the decoded response so far, which ends with a token of `turn_ends`; None ends it.

        The text is tokenized by itself, and special tokens that are written out in it become special tokens.
        """
        return None


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Tensor) -> str:
    """A response as a task reads it: special tokens removed, spaces left as they are."""
    return tokenizer.decode(token_ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)


class PromptStream:
    """An endless, resumable source of prompts from one split.

    A finite split is walked in a new order in each epoch; an endless one by increasing index from `Task.first_index`.
    The state is one number and a resumed stream goes on with the next prompt, none twice and none left out.
    """

    def __init__(self, task: Task, split: Split, seed: int) -> None:
        self._task, self._split, self._seed = task, split, seed
        self._size = task.size(split)
        if self._size == 0:
            raise DataError(f"the {split} split of the task has no problems; nothing can be trained or measured on it")
        self._first = task.first_index(split, seed)  # of an endless split
        self._position = 0

    def next(self, n: int) -> list[Prompt]:
        """The next `n` prompts; a prompt that comes again in a later epoch has that epoch in its uid."""
        prompts = [self._at(position) for position in range(self._position, self._position + n)]
        self._position += n
        return prompts

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._position = state["position"]

    def _at(self, position: int) -> Prompt:
        if self._size is None:
            return self._task.prompt(self._split, self._first + position)
        epoch, offset = divmod(position, self._size)
        prompt = self._task.prompt(self._split, _order(self._size, self._seed, epoch)[offset])
        return replace(prompt, uid=f"{prompt.uid}@{epoch}")


@lru_cache(maxsize=2)
def _order(size: int, seed: int, epoch: int) -> list[int]:
    order = list(range(size))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
