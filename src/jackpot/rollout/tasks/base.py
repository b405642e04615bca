"""Defines the interface of a task: prompts, scores, and for several turns the step of its environment."""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from jackpot.core.errors import DataError
from jackpot.core.prng import fold_in
from jackpot.core.types import DecodedResponse, Prompt, Score

Split = Literal["train", "test"]


class Task(ABC):
    """Provides prompts and scores responses. Prompts are addressed by index, so that a run can be resumed.

    `size`, `prompt` and `score` make a task. One with several turns, such as tool calls, also sets
    `turn_end_token_ids` and implements `step`.
    """

    turn_end_token_ids: tuple[int, ...] = ()  # tokens that end the model's turn and call `step`

    @abstractmethod
    def size(self, split: Split) -> int | None:
        """Return the number of problems in the split, or None where it is endless."""

    def first_index(self, split: Split, seed: int) -> int:
        """Return the index at which a run with this seed starts in an endless split; seeds start far apart."""
        return fold_in(seed, "prompts") % 2**40

    @abstractmethod
    def prompt(self, split: Split, index: int) -> Prompt:
        """Return problem number `index` of a split, tokenized; the same index always gives the same problem."""

    @abstractmethod
    def score(self, prompt: Prompt, response: str, finished: bool) -> Score:
        """Score one decoded response. `finished` is False where it was cut at the length limit."""

    def scores(self, responses: Sequence[DecodedResponse]) -> list[Score]:
        """Score many responses, in their order. Override it to score them in parallel or elsewhere."""
        return [self.score(*response) for response in responses]

    def start_scoring(self, responses: Sequence[DecodedResponse]) -> Callable[[], list[Score]]:
        """Begin to score responses of a rollout batch; the returned function waits for what `scores` returns.

        Override it to score in the background while further responses are generated.
        """
        scores = self.scores(responses)
        return lambda: scores

    def step(self, prompt: Prompt, response: str) -> str | None:
        """Return the environment's reply, such as a tool's result, or None to end the response.

        The reply is tokenized by itself; special tokens spelled out in it become special tokens.

        Args:
            response: all turns so far, decoded; the last token is one of `turn_end_token_ids`.
        """
        return None

    def take_events(self) -> list[dict[str, Any]]:
        """Return what happened since the last call and belongs in events.jsonl, such as problems that were left out.
        Each has an `event` and its details."""
        return []

    def close(self) -> None:
        """Free what scoring holds, such as processes; nothing is scored afterwards. A second call does nothing."""
        return None


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Tensor) -> str:
    """Decode a response for a task: special tokens removed, spaces left as they are."""
    return tokenizer.decode(token_ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)


class PromptStream:
    """Draws prompts from one split without end, resumable from a saved state.

    A finite split is walked in a new order in each epoch, an endless one by increasing index from `Task.first_index`.
    The state is the number of prompts drawn; a resumed stream goes on with the next prompt.

    Raises:
        DataError: the split has no problems.
    """

    def __init__(self, task: Task, split: Split, seed: int) -> None:
        self._task, self._split, self._seed = task, split, seed
        self._size = task.size(split)
        if self._size == 0:
            raise DataError(f"the {split} split of the task has no problems; nothing can be trained or measured on it")
        self._first = task.first_index(split, seed)  # index at which an endless split starts
        self._position = 0

    def next(self, n: int) -> list[Prompt]:
        """Return the next `n` prompts; in a finite split the uid of each ends with its epoch."""
        prompts = [self._at(position) for position in range(self._position, self._position + n)]
        self._position += n
        return prompts

    def state_dict(self) -> dict[str, int]:
        """Return the number of prompts drawn, as `position`."""
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the prompts of a saved state."""
        self._position = state["position"]

    def _at(self, position: int) -> Prompt:
        """Return the prompt at a position of the stream."""
        if self._size is None:
            return self._task.prompt(self._split, self._first + position)
        epoch, offset = divmod(position, self._size)
        prompt = self._task.prompt(self._split, _order(self._size, self._seed, epoch)[offset])
        return replace(prompt, uid=f"{prompt.uid}@{epoch}")


@lru_cache(maxsize=2)
def _order(size: int, seed: int, epoch: int) -> list[int]:
    """Return the shuffled indices of a finite split in one epoch."""
    order = list(range(size))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order
