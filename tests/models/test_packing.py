"""One cut of rows into batches: nothing lost, no batch over the budget, none that could have been longer."""

from collections.abc import Sequence
from itertools import count, islice, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.engines.reference import rollout_of, tiny_prompt
from jackpot.models.packing import pack, rollout_lengths

few = settings(max_examples=100, deadline=None, derandomize=True, database=None)
rows = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), max_size=14)
budgets = st.integers(1, 60)


def tokens(run: Sequence[tuple[int, int]], pads: bool) -> int:
    if not pads:
        return sum(map(sum, run))
    return len(run) * (max(prompt for prompt, _ in run) + max(response for _, response in run))


@few
@given(rows, budgets, st.booleans())
def test_runs_have_every_row_and_are_as_long_as_they_may(lengths, budget, pads) -> None:
    runs = list(pack(lengths, budget, lambda row: row, pads))
    assert [row for run in runs for row in run] == lengths
    assert all(runs)
    assert all(tokens(run, pads) <= budget or len(run) == 1 for run in runs)
    assert all(tokens([*run, after[0]], pads) > budget for run, after in pairwise(runs))


def test_rows_are_read_no_further_than_the_next_run() -> None:
    numbers = count()
    first, second = islice(pack(numbers, 12, lambda _: (1, 2)), 2)
    assert (first, second) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert next(numbers) == 9


def test_a_rollout_has_the_lengths_of_prompt_and_response() -> None:
    assert rollout_lengths(rollout_of(tiny_prompt(4), [3, 2, 5])) == (4, 3)
