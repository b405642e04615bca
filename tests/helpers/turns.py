"""A task with a tool, and a tokenizer whose words are numbers."""

from collections.abc import Sequence

from jackpot.core.types import Prompt, Score
from jackpot.rollout.tasks.base import Task


class Numbers:
    """Decodes token 7 as "7"."""

    def decode(self, token_ids: Sequence[int], **options) -> str:
        return " ".join(map(str, token_ids))

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [int(word) for word in text.split()]


class Tool(Task):
    """Replies with one or two tokens that are a function of the whole response so far."""

    def __init__(self, turn_end_token_ids: Sequence[int], vocab_size: int) -> None:
        self.turn_end_token_ids, self._vocab_size = tuple(turn_end_token_ids), vocab_size

    def step(self, prompt: Prompt, response: str) -> str | None:
        response_ids = [int(word) for word in response.split()]
        words = [(sum(response_ids) + index) % self._vocab_size for index in range(1 + sum(response_ids) % 2)]
        return " ".join(map(str, words))

    def size(self, split: str) -> None:
        raise NotImplementedError

    def prompt(self, split: str, index: int) -> Prompt:
        raise NotImplementedError

    def score(self, prompt: Prompt, response: str, finished: bool) -> Score:
        raise NotImplementedError
