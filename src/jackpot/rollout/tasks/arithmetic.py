"""Tasks of adding numbers, which need no data.

`Arithmetic` is for models of 60,000 parameters. A prompt is `12+34+5=`. A good response carries out one addition after
the other and repeats the result after `#`: `46+5=51#51`. The reward depends on the number after `#` only, and not on
the steps. `Sums` asks a chat model in English.
"""

import random
import re
from hashlib import blake2b
from typing import get_args

from transformers import PreTrainedTokenizerBase

from jackpot.config.tasks import ArithmeticConfig, SumsConfig, ToolArithmeticConfig
from jackpot.core.errors import DataError
from jackpot.core.types import Prompt, Score
from jackpot.rollout.tasks.base import Split, Task
from jackpot.rollout.tasks.templates import Template


class Arithmetic(Task):
    """A task without end, whose problems are sums of `min_terms` to `max_terms` numbers, each from 1 to `max_operand`.

    A problem is a pure function of its split and index. It belongs to the split that the hash of its sorted operands
    selects, so no test problem is a training problem, not even with permuted operands. The number of different sums is
    finite, so an endless split repeats some.
    """

    test_share = 0.1  # share of problems in the test split

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: ArithmeticConfig) -> None:
        """Keep the tokenizer, and the settings of how many numbers are added and how large they are."""
        self._tokenizer = tokenizer
        self._settings = settings

    def size(self, split: Split) -> None:
        """Return None: both splits are endless."""

    def operands(self, split: Split, index: int) -> tuple[int, ...]:
        """Draw the numbers that problem `index` of `split` adds: first how many, then each number, all uniformly."""
        if split not in get_args(Split):
            raise DataError(f"arithmetic has no split {split!r}; valid: {', '.join(get_args(Split))}")
        # Draw again until the hash of the operands selects this split.
        draw = random.Random(_hash(f"{split}/{index}"))
        while True:
            terms = draw.randint(self._settings.min_terms, self._settings.max_terms)
            operands = tuple(draw.randint(1, self._settings.max_operand) for _ in range(terms))
            if split_of(operands, self.test_share) == split:
                return operands

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return problem `index` as text such as `12+34=`, with the sum as its reference answer."""
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
        """Return reward 1 where the response ended by itself and all text after its first `#` is the sum, else 0."""
        correct = finished and response.partition("#")[2] == prompt.answer
        return Score(reward=float(correct), correct=correct)


def split_of(operands: tuple[int, ...], test_share: float) -> Split:
    """Return the split of the problem with these operands, in whatever order."""
    return "test" if _hash("+".join(map(str, sorted(operands)))) < test_share * 2**64 else "train"


def _hash(text: str) -> int:
    """Hash a text to 64 bits, equal in every process and on every machine, unlike the built-in `hash`."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


_ADDITION = re.compile(r"(?:.*[=#])?([0-9]{1,9})\+([0-9]{1,9})=", re.DOTALL)  # `46+5=` at the end


class ToolArithmetic(Arithmetic):
    """The task `Arithmetic` with a calculator: a token that ends with `=` ends a turn and is answered by the sum."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: ToolArithmeticConfig) -> None:
        """Find the tokens whose text ends with `=`: these end a turn."""
        super().__init__(tokenizer, settings)
        ids = sorted(tokenizer.get_vocab().values())
        texts = tokenizer.batch_decode([[token_id] for token_id in ids])
        self.turn_end_token_ids = tuple(
            token_id for token_id, text in zip(ids, texts, strict=True) if text.endswith("=")
        )

    def step(self, prompt: Prompt, response: str) -> str:
        """Return the sum for a response that ends with an addition of two numbers such as `46+5=`, else `?`."""
        addition = _ADDITION.fullmatch(response)
        return str(int(addition[1]) + int(addition[2])) if addition else "?"


_NUMBER = re.compile(r"-?[0-9]+")


class Sums(Arithmetic):
    """A task of sums asked in English, `What is 14 + 9? Answer with the number.`, with the tokenizer's chat template.

    A third of the sums is held out for the test split.
    """

    test_share = 1 / 3

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: SumsConfig) -> None:
        """Take the question from the settings, and the chat template from the tokenizer."""
        super().__init__(tokenizer, settings)
        self._question = settings.question
        self._template = Template("chat", tokenizer, instruction="", system_prompt=None)

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return problem `index` as a chat that waits for the model's answer, with the sum as its reference answer."""
        operands = self.operands(split, index)
        question = self._question.replace("{sum}", " + ".join(map(str, operands)))
        return self._template.prompt(f"sums/{split}/{index}", question, [str(sum(operands))])

    def score(self, prompt: Prompt, response: str, finished: bool) -> Score:
        """Return reward 1 if the last number of the response is the sum, else 0, also for a response that was cut."""
        # Compare lists of the last number alone, which are empty where there is none.
        correct = _NUMBER.findall(response.replace(",", ""))[-1:] == [prompt.answer]
        return Score(reward=float(correct), correct=correct)
