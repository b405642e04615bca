"""Says what toy models are supervised on: sums, or word problems as text, solved, solved with mistakes, or guessed."""

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from jackpot.config.tasks import ArithmeticConfig
from jackpot.core.prng import fold_in
from jackpot.rollout.tasks.arithmetic import Arithmetic

PAD, END, UNKNOWN = "<pad>", "<end>", "<unk>"
CHARACTERS = "0123456789+-*/=#()[]<>.,:;?! "  # with the three above V = 32: more than the 20 top log-probs captured

Kind = Literal["correct", "faulty", "guess"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """Describes the solutions that a toy model is supervised on: shares of three kinds, and the mistakes in them."""

    correct: float  # share of solutions with every step right
    faulty: float  # share of solutions where each step is wrong with probability `fault_rate`, and the rest follows
    guess: float  # share of solutions with no steps: only a number near the answer
    offsets: tuple[int, ...]  # numbers that a wrong step adds to the right result
    fault_rate: float = 0.5  # probability that a step of a faulty solution is wrong

    def kind(self, draw: random.Random) -> Kind:
        """Draw the kind of a solution."""
        return draw.choices(("correct", "faulty", "guess"), (self.correct, self.faulty, self.guess))[0]

    def mistake(self, kind: Kind, draw: random.Random) -> int:
        """Draw what a step of a solution of this kind adds to the right result: 0 where the step is right."""
        wrong = kind == "faulty" and draw.random() < self.fault_rate
        return draw.choice(self.offsets) if wrong else 0


class Lesson(NamedTuple):
    """Holds what a toy model reads and what it learns to write."""

    tokenizer: Callable[[], PreTrainedTokenizerFast]
    example: Callable[[int, Mixture, random.Random], tuple[str, str]]  # number of a problem -> prompt and solution


class WordProblem(NamedTuple):
    """Holds a problem in words, and the numbers and operations that solve it."""

    text: str
    kind: str  # key of STORIES
    numbers: tuple[int, ...]

    @property
    def signs(self) -> str:
        """Return the sign of each operation, in their order."""
        return STORIES[self.kind][0]

    @property
    def answer(self) -> int:
        """Return the right answer."""
        total = self.numbers[0]
        for sign, number in zip(self.signs, self.numbers[1:], strict=True):
            total = _compute(total, sign, number)
        return total


# By name: the operations, and the story.
STORIES: dict[str, tuple[str, str]] = {
    "buys": ("+", "{who} has {0} {what} and buys {1} more. How many has {who} now?"),
    "gives": ("-", "{who} has {0} {what} and gives {1} away. How many has {who} now?"),
    "finds": ("++", "{who} has {0} {what}, buys {1} and finds {2}. How many has {who} now?"),
    "loses": ("+-", "{who} has {0} {what}, buys {1} and loses {2}. How many has {who} now?"),
}
PEOPLE = ("Ann", "Ben", "Eva", "Ida", "Jon", "Leo", "Max", "Mia", "Sam", "Tom", "Uma", "Zoe")
THINGS = ("books", "cards", "coins", "cups", "eggs", "figs", "keys", "nuts", "pens", "pins", "plums", "toys")
LARGEST = 12  # number of a story; the smallest is 2
ROWS = 500  # of examples/word_problems.jsonl, which has three of five, and examples/word_problems_test.jsonl
KEPT_BACK = 0.2  # share of the pairs of story and numbers that no model of the package was supervised on


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make the tokenizer of models that add: one token a character, V = 32; other characters become `<unk>`."""
    vocabulary = {token: index for index, token in enumerate([PAD, END, UNKNOWN, *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=128,
    )


def make_byte_tokenizer() -> PreTrainedTokenizerFast:
    """Make the tokenizer of models that read text: one token a byte of UTF-8, with the byte as its id, and V = 258.

    Its chat template puts the messages below each other, each with a line break, and nothing else.
    """
    tokenizer = Tokenizer(models.BPE(vocab={name: byte for byte, name in bytes_to_unicode().items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
        chat_template="{% for message in messages %}{{ message['content'] }}\n{% endfor %}",
    )


def sample_solution(operands: tuple[int, ...], mixture: Mixture, draw: random.Random) -> str:
    """Sample one response to the sum of `operands` from a mixture."""
    kind = mixture.kind(draw)
    if kind == "guess":
        return f"#{max(1, sum(operands) + draw.randint(-10, 10))}"
    total, text = operands[0], ""
    for position, operand in enumerate(operands[1:], start=2):
        total = max(1, total + operand + mixture.mistake(kind, draw))
        text += "+".join(map(str, (total, *operands[position:])))
        text += "=" if position < len(operands) else f"#{total}"
    return text


def word_problem(index: int, is_kept_back: bool) -> WordProblem:
    """Return problem number `index` in words, a pure function of both arguments.

    Stories and numbers that are kept back are in no problem that is not, whoever has whatever.
    """
    draw = random.Random(fold_in("word problem", int(is_kept_back), index))
    while True:
        kind = draw.choice(list(STORIES))
        signs, story = STORIES[kind]
        numbers = tuple(draw.randint(2, LARGEST) for _ in range(len(signs) + 1))
        text = story.format(*numbers, who=draw.choice(PEOPLE), what=draw.choice(THINGS))
        problem = WordProblem(text, kind, numbers)
        if problem.answer > 0 and (fold_in(kind, *numbers) < KEPT_BACK * 2**64) == is_kept_back:
            return problem


def kept_back_problems(count: int) -> list[WordProblem]:
    """Return the first problems in words that are kept back, no story with the same numbers twice."""
    found: dict[tuple[str, tuple[int, ...]], WordProblem] = {}
    for index in itertools.count():
        problem = word_problem(index, is_kept_back=True)
        found.setdefault((problem.kind, problem.numbers), problem)
        if len(found) == count:
            return list(found.values())


def write_word_problems(folder: Path) -> list[Path]:
    """Write word problems to `folder`, a file to train on and one to evaluate on, which are those of examples/."""
    problems, paths = kept_back_problems(ROWS), []
    train, test = ([row for n, row in enumerate(problems) if (n % 5 < 3) == is_train] for is_train in (True, False))
    for name, rows in (("word_problems", train), ("word_problems_test", test)):
        lines = [json.dumps({"question": row.text, "answer": str(row.answer)}) + "\n" for row in rows]
        paths.append(folder / f"{name}.jsonl")
        paths[-1].write_text("".join(lines))
    return paths


def sample_word_solution(problem: WordProblem, mixture: Mixture, draw: random.Random) -> str:
    """Sample one response to a word problem from a mixture: its steps, as `12+5=17; 17-3=14`, or a number alone."""
    kind = mixture.kind(draw)
    if kind == "guess":
        return str(max(1, problem.answer + draw.randint(-5, 5)))
    total, steps = problem.numbers[0], []
    for sign, number in zip(problem.signs, problem.numbers[1:], strict=True):
        result = max(1, _compute(total, sign, number) + mixture.mistake(kind, draw))
        steps.append(f"{total}{sign}{number}={result}")
        total = result
    return "; ".join(steps)


@cache
def _sums() -> Arithmetic:
    return Arithmetic(make_tokenizer(), ArithmeticConfig())


def _sum_example(index: int, mixture: Mixture, draw: random.Random) -> tuple[str, str]:
    operands = _sums().operands("train", index)
    return "+".join(map(str, operands)) + "=", sample_solution(operands, mixture, draw)


def _word_example(index: int, mixture: Mixture, draw: random.Random) -> tuple[str, str]:
    problem = word_problem(index, is_kept_back=False)
    return f"{problem.text}\n", sample_word_solution(problem, mixture, draw)


def _compute(left: int, sign: str, right: int) -> int:
    return left + right if sign == "+" else left - right


SUMS = Lesson(make_tokenizer, _sum_example)
WORD_PROBLEMS = Lesson(make_byte_tokenizer, _word_example)
