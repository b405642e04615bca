"""Synthetic word problems, as rows of a file of problems.

They replace a data set that is not on this machine, to try out whether a run works. A model learns nothing from them.
"""

import random

_NAMES = ("Ana", "Ben", "Chen", "Dora", "Emil", "Fatima", "George", "Hanna", "Ivan", "Julia")
_THINGS = ("apples", "books", "clips", "coins", "eggs", "marbles", "pages", "stamps", "tickets", "toys")
_STORIES = (
    "{name} has {a} {things} and buys {b} more on Monday. How many {things} does {name} have altogether?",
    "There were {sum} {things} in a box. Then {name} took {a} of them. How many {things} are left in the box?",
    "Let $f(x) = x + {a}$. What is the value of $f({b})$? Find the answer that {name} wrote down.",
    "If $x - {a} = {b}$, what is the number $x$ of {things} that {name} sold in the first week?",
)


def synthetic_problem(index: int) -> tuple[str, str]:
    """Return a word problem and its answer; equal indices give equal problems."""
    draw = random.Random(f"made up/{index}")
    story = index % len(_STORIES)
    a, b = draw.randint(1, 50), draw.randint(1, 50)
    values = {"name": draw.choice(_NAMES), "things": draw.choice(_THINGS), "a": a, "b": b, "sum": a + b}
    return _STORIES[story].format(**values), str(b if story == 1 else a + b)


def synthetic_rows(first: int, count: int) -> list[dict[str, str | list[str]]]:
    """Return `count` problems from index `first` on, as rows of a file of problems."""
    rows = []
    for index in range(first, first + count):
        problem, answer = synthetic_problem(index)
        rows.append({"id": f"made-up-{index}", "problem": problem, "answer": [answer]})
    return rows
