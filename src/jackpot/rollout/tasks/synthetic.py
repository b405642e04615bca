r"""Generates synthetic word problems in the columns of any benchmark.

They stand in for data that is not on this machine, to try out whether a run works; they are not meant for learning.
"""

import random
from typing import NamedTuple

from jackpot.rollout.tasks.benchmarks import Benchmark

_NAMES = ("Ana", "Ben", "Chen", "Dora", "Emil", "Fatima", "George", "Hanna", "Ivan", "Julia")
_THINGS = ("apples", "books", "clips", "coins", "eggs", "marbles", "pages", "stamps", "tickets", "toys")
_STORIES = (
    "{name} has {a} {things} and buys {b} more on Monday. How many {things} does {name} have altogether?",
    "There were {sum} {things} in a box. Then {name} took {a} of them. How many {things} are left in the box?",
    "Let $f(x) = x + {a}$. What is the value of $f({b})$? Find the answer that {name} wrote down.",
    "If $x - {a} = {b}$, what is the number $x$ of {things} that {name} sold in the first week?",
)


class SyntheticProblem(NamedTuple):
    """Holds a word problem and its answer."""

    problem: str
    answer: str


def synthetic_problem(number: int) -> SyntheticProblem:
    """Return problem `number`; the same number always gives the same problem."""
    draw = random.Random(f"made up/{number}")
    story = number % len(_STORIES)
    a, b = draw.randint(1, 50), draw.randint(1, 50)
    values = {"name": draw.choice(_NAMES), "things": draw.choice(_THINGS), "a": a, "b": b, "sum": a + b}
    return SyntheticProblem(_STORIES[story].format(**values), str(b if story == 1 else a + b))


def synthetic_rows(benchmark: Benchmark, first: int, count: int) -> list[dict[str, str]]:
    """Return `count` problems from number `first` on as rows with the columns of a benchmark."""
    answer, answer_format = next(iter(benchmark.answer.items()))
    form = {"plain": "{}", "hashes": "It is {0}.\n#### {0}", "boxed": r"The answer is $\boxed{{{}}}$."}[answer_format]
    uid = next(iter(benchmark.uid), "id")
    return [
        {uid: f"made-up-{number}", benchmark.problem[0]: one.problem, answer: form.format(one.answer)}
        for number in range(first, first + count)
        for one in [synthetic_problem(number)]
    ]
