"""Sums of a few numbers, worked out step by step: an offline task that a model of 60,000 parameters can do.

A prompt is `12+34+5=`. A good response carries out one addition after the other and repeats the result after `#`:
`46+5=51#51`. Only the number after `#` is judged; how a response got there is its own affair.
"""

import random
import re
from hashlib import blake2b
from typing import get_args

from transformers import PreTrainedTokenizerBase

from jackpot.config.tasks import ArithmeticConfig, ToolArithmeticConfig
from jackpot.core.errors import DataError
from jackpot.core.types import Prompt, Score
from jackpot.rollout.tasks.base import Split, Task

TEST_SHARE = 0.1  # of all problems


class Arithmetic(Task):
    """Endless sums of `min_terms` to `max_terms` numbers, each from 1 to `max_operand`.

    Problem number `index` of a split is a pure function of the two. A problem belongs to the split that the hash of
    its sorted operands names, so no test problem, in whatever order it is written, is ever a training problem. There
    are finitely many problems, so an endless split repeats some.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: ArithmeticConfig) -> None:
        self._tokenizer = tokenizer
        self._terms = (settings.min_terms, settings.max_terms)
        self._max_operand = settings.max_operand

    def size(self, split: Split) -> None:
        """Always None: both splits are endless."""
        _check_split(split)

    def operands(self, split: Split, index: int) -> tuple[int, ...]:
        """The numbers to add in problem `index` of `split`: the number of terms is uniform, then each operand."""
        _check_split(split)
        if index < 0:
            raise DataError(f"arithmetic was asked for {split} problem {index}; problems are numbered from 0")
        draw = random.Random(_hash(f"{split}/{index}"))
        while True:
            terms = draw.randint(*self._terms)
            operands = tuple(draw.randint(1, self._max_operand) for _ in range(terms))
            if split_of(operands) == split:
                return operands

    def prompt(self, split: Split, index: int) -> Prompt:
        operands = self.operands(split, index)
        text = "+".join(map(str, operands)) + "="
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        if self._tokenizer.decode(token_ids) != text:
            raise DataError(
                f"the tokenizer turns {text!r} into {self._tokenizer.decode(token_ids)!r}; "
                "arithmetic needs one that keeps digits, '+', '=' and '#', such as the starter models' own"
            )
        return Prompt(
            uid=f"arithmetic/{split}/{index}", text=text, answer=str(sum(operands)), token_ids=tuple(token_ids)
        )

    def score(self, prompt: Prompt, response: str, finished: bool) -> Score:
        """1 where the response ended by itself and everything after its first `#` is the sum, else 0."""
        _, _, answer = response.partition("#")
        correct = finished and answer == prompt.answer
        return Score(reward=float(correct), correct=correct)


def split_of(operands: tuple[int, ...]) -> Split:
    """The one split that these numbers belong to, in whatever order."""
    share = _hash("+".join(map(str, sorted(operands)))) / 2**64
    return "test" if share < TEST_SHARE else "train"


def _hash(text: str) -> int:
    """64 bits that are the same in every process and on every machine, unlike the built-in `hash`."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def _check_split(split: str) -> None:
    if split not in get_args(Split):
        raise DataError(f"arithmetic has no split {split!r}; valid: {', '.join(get_args(Split))}")


_ADDITION = re.compile(r"(?:.*[=#])?([0-9]{1,9})\+([0-9]{1,9})=", re.DOTALL)  # after the last separator


class ToolArithmetic(Arithmetic):
    """The problems and the reward of `Arithmetic`; a turn ends with any token whose text ends with `=`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: ToolArithmeticConfig) -> None:
        super().__init__(tokenizer, settings)
        ids = sorted(tokenizer.get_vocab().values())
        self.turn_end_token_ids = tuple(index for index in ids if tokenizer.decode([index]).endswith("="))

    def step(self, prompt: Prompt, response: str) -> str:
        """The sum of the two numbers since the last `=` or `#`, or `?`."""
        addition = _ADDITION.fullmatch(response)
        return str(int(addition[1]) + int(addition[2])) if addition else "?"
