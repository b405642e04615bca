"""The interface of a task: prompts, scores of responses and, for responses of several turns, the environment's replies.

`PromptStream` draws training prompts from a task without end, and can continue from a saved position.
"""

import random
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from jackpot.core.errors import DataError
from jackpot.core.prng import fold_in
from jackpot.core.types import DecodedResponse, Prompt, Score

Split = Literal["train", "test"]


class PromptSource(NamedTuple):
    """The prompts of one source of a split, such as a file or a data set."""

    weight: float  # chance that a prompt comes from this source, relative to the weights of the split's other sources
    size: int | None  # number of problems; None for an endless source
    prompt: Callable[[int], Prompt]  # returns the prompt of the problem with an index
    first: int  # index at which an endless source starts


class Task(ABC):
    """A source of prompts that also scores the responses. Prompts have an index, so that a run can be resumed.

    A task implements `size`, `prompt` and `score`, or `scores` in place of the last (`BatchScoredTask`). A task with
    several turns, such as tool calls, also sets `turn_end_token_ids` and implements `step`. `environment.py` makes a
    task of an environment that has a state.
    """

    turn_end_token_ids: tuple[int, ...] = ()  # tokens that end the model's turn and call `step`

    @abstractmethod
    def size(self, split: Split) -> int | None:
        """Return the number of problems in the split, or None where it is endless."""

    def first_index(self, split: Split, seed: int) -> int:
        """Return the index at which a run with this seed begins an endless split; two seeds begin far apart."""
        return fold_in(seed, "prompts") % 2**40

    def prompt_sources(self, split: Split, seed: int) -> Sequence[PromptSource]:
        """Return the sources whose prompts a stream mixes; unless overridden, the whole split is the only source."""
        prompt, first = partial(self.prompt, split), self.first_index(split, seed)
        return [PromptSource(weight=1.0, size=self.size(split), prompt=prompt, first=first)]

    @abstractmethod
    def prompt(self, split: Split, index: int) -> Prompt:
        """Return problem number `index` of a split, tokenized; the same index always gives the same problem."""

    @abstractmethod
    def score(self, prompt: Prompt, response: str, finished: bool) -> Score:
        """Score one decoded response. `finished` is False if the response was cut at the length limit."""

    def scores(self, responses: Sequence[DecodedResponse]) -> list[Score]:
        """Score many responses, in their order. Override this method to score in parallel or elsewhere."""
        return [self.score(response.prompt, response.text, response.finished) for response in responses]

    def start_scoring(self, responses: Sequence[DecodedResponse]) -> Callable[[], list[Score]]:
        """Begin to score responses of a rollout batch; the returned function waits for their scores.

        Override this method to score in the background while further responses are generated.
        """
        scores = self.scores(responses)
        return lambda: scores

    def step(self, prompt: Prompt, response: str) -> str | None:
        """Return the environment's reply, such as a tool's result, or None, as here, to end the response.

        The reply is tokenized alone, without the text before it. Special tokens that are spelled out in the reply
        become special tokens.

        Args:
            response: all turns so far, decoded; the last token is one of `turn_end_token_ids`.
        """
        return None

    def reply(self, response: DecodedResponse) -> str | None:
        """Return the environment's reply, as `step` does. Override this in place of `step` to read each turn alone."""
        return self.step(response.prompt, response.text)

    def take_events(self) -> list[dict[str, Any]]:
        """Return the events since the last call that belong in events.jsonl, such as problems that were left out.

        Each event is a dict with its name under `event` and its details under further keys.
        """
        return []

    def close(self) -> None:
        """Free what scoring uses, such as processes; nothing is scored afterwards. A second call does nothing."""
        return None


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Tensor) -> str:
    """Decode a response for a task: special tokens removed, spaces left as they are."""
    text = tokenizer.decode(token_ids.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return str(text)  # already a str; the library's type also allows a list of them


def decoded_response(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Prompt,
    token_ids: Tensor,
    sampled_mask: Tensor,
    finished: bool,
    turn_end_token_ids: Sequence[int] = (),
) -> DecodedResponse:
    """Decode a whole response to text, and also each turn of the model in the response by itself.

    Args:
        token_ids: [T] int64.
        sampled_mask: [T] bool, False at the tokens of the environment, which stand between two turns of the model.
        turn_end_token_ids: tokens that end a turn of the task. Where a response was cut after such a token, its last
            turn counts as complete.
    """
    text = decode(tokenizer, token_ids)
    # Cut the tokens where the model and the environment take turns: every other piece, from the first, is the model's.
    changes = (sampled_mask[1:] != sampled_mask[:-1]).nonzero()[:, 0] + 1
    turns = [decode(tokenizer, turn) for turn in token_ids.tensor_split(changes)[::2]] if len(changes) else [text]
    ends_turn = len(token_ids) > 0 and bool(sampled_mask[-1]) and int(token_ids[-1]) in turn_end_token_ids
    return DecodedResponse(prompt, text, finished, turns=tuple(turns), last_turn_ended=finished or ends_turn)


class BatchScoredTask(Task):
    """A task that implements `scores`, which scores many responses at once, in place of `score`."""

    def score(self, prompt: Prompt, response: str, finished: bool) -> Score:
        """Score one response, of a single turn, as `scores` does."""
        decoded = DecodedResponse(prompt, response, finished, turns=(response,), last_turn_ended=finished)
        return self.scores([decoded])[0]


class PromptStream:
    """An endless stream of prompts from one split, which can continue from a saved state.

    Where a split has several sources, the source of the next prompt is hashed from the seed and the position in the
    stream, with chances in proportion to the weights of the sources. A finite source is walked in a new order in each
    epoch, an endless source by increasing index. The number of prompts drawn so far determines all that follow.

    Raises:
        DataError: a source has no problems.
    """

    def __init__(self, task: Task, split: Split, seed: int) -> None:
        """Begin before the first prompt; `seed` decides the order of sources and of their problems."""
        self._sources = task.prompt_sources(split, seed)
        self._sizes = [source.size for source in self._sources]
        if 0 in self._sizes:
            raise DataError(f"the {split} split of the task has no problems; nothing can be trained or measured on it")

        count = len(self._sources)
        # For each source, the seed of the orders in which its problems come.
        self._seeds = [seed] if count == 1 else [fold_in(seed, "source", index) for index in range(count)]
        # For each source, the sum of the weights of the sources up to it, its own included.
        self._ends = list(accumulate(source.weight for source in self._sources))
        self._key = fold_in(seed, "mix")  # key from which the source of each prompt is drawn
        self._drawn = [0] * count  # number of prompts drawn from each source so far
        # For each source, the newest epoch that was shuffled (-1: none), and the order of the problems in this epoch.
        self._orders = [(-1, [0])] * count

    def next(self, n: int) -> list[Prompt]:
        """Return the next `n` prompts; the uid of a prompt from a finite source ends with the epoch, as in `@0`."""
        return [self._prompt(*self._draw()) for _ in range(n)]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of prompts drawn, as `position`, and the number of problems of each source."""
        return {"position": sum(self._drawn), "sizes": self._sizes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the prompts of a saved state.

        Raises:
            DataError: a source has another number of problems than before, so the next prompts would be others.
        """
        if (saved_sizes := state["sizes"]) != self._sizes:
            raise DataError(
                f"the problems of the task have changed: there were {saved_sizes} of each source, now there are "
                f"{self._sizes}; bring the data back, with the same limits of length, or begin a new run"
            )
        # Draw the sources of all earlier prompts again, which counts how many prompts each source gave.
        self._drawn = [0] * len(self._sizes)
        for _ in range(state["position"]):
            self._draw()

    def _draw(self) -> tuple[int, int]:
        """Draw the source of the next prompt; return the source's index, and how many prompts it gave before."""
        # The weights of the sources lie side by side on a line, and a hash chooses a point on the line: the source
        # whose weight covers this point is drawn.
        point = fold_in(self._key, sum(self._drawn)) / 2**64 * self._ends[-1]
        # Rounding may move the point to the end of the line, beyond the last source: `min` takes this source.
        source_index = min(bisect_right(self._ends, point), len(self._ends) - 1)
        self._drawn[source_index] += 1
        return source_index, self._drawn[source_index] - 1

    def _prompt(self, source_index: int, index: int) -> Prompt:
        """Return the prompt that the stream draws from a source after `index` earlier ones of the same source."""
        source = self._sources[source_index]
        if source.size is None:  # an endless source is read in its own order
            return source.prompt(source.first + index)

        epoch, offset = divmod(index, source.size)
        ordered_epoch, order = self._orders[source_index]
        if epoch != ordered_epoch:  # each epoch has an order of its own
            order = list(range(source.size))
            random.Random(f"{self._seeds[source_index]}/{epoch}").shuffle(order)
            self._orders[source_index] = (epoch, order)

        prompt = source.prompt(order[offset])
        return replace(prompt, uid=f"{prompt.uid}@{epoch}")
