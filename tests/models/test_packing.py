"""Rows are cut into runs, each a batch: nothing is lost, none is over the budget, none could have been longer."""

from collections.abc import Sequence
from itertools import count, islice, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.engines.reference import rollout_of, tiny_prompt
from jackpot.models.packing import pack, rollout_lengths

MANY_EXAMPLES = settings(max_examples=100, deadline=None, derandomize=True, database=None)
ROWS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), max_size=14)
BUDGETS = st.integers(1, 60)


def token_count(run: Sequence[tuple[int, int]], pads: bool) -> int:
    """Return how many tokens a run of rows has, with the padding to its longest prompt and response if it pads."""
    if not pads:
        return sum(map(sum, run))
    return len(run) * (max(prompt for prompt, _ in run) + max(response for _, response in run))


@MANY_EXAMPLES
@given(ROWS, BUDGETS, st.booleans())
def test_runs_have_every_row_and_are_as_long_as_allowed(lengths, budget, pads) -> None:
    runs = list(pack(lengths, budget, lambda row: row, pads))

    assert [row for run in runs for row in run] == lengths
    assert all(runs)
    assert all(token_count(run, pads) <= budget or len(run) == 1 for run in runs)
    assert all(token_count([*run, next_run[0]], pads) > budget for run, next_run in pairwise(runs))


def test_rows_are_read_no_further_than_the_next_run() -> None:
    rows = count()
    first_run, second_run = islice(pack(rows, 12, lambda _: (1, 2)), 2)
    assert (first_run, second_run) == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert next(rows) == 9  # row 8 was read to see that the second run is full


def test_a_rollout_has_the_lengths_of_prompt_and_response() -> None:
    assert rollout_lengths(rollout_of(tiny_prompt(4), [3, 2, 5])) == (4, 3)
