"""Arms of a comparison side by side: differences, budgets and costs, against numpy on the same numbers."""

from dataclasses import replace

import numpy as np
import pytest

from jackpot.analysis.compare.comparison import compare
from jackpot.analysis.compare.summary import EvaluationPoint, RunSummary
from jackpot.analysis.diagnose.collapse import Collapse
from jackpot.core.errors import ConfigError
from jackpot.ui.views.comparison import comparison_charts, comparison_tables, difference_cells

COLLAPSE = Collapse(iteration=20, accuracy=0.1, best=0.5, first_sign="KL", why="10.0% right")


def summary(arm: str, seed: int, *accuracies: float, cost: float = 1.0, collapse: Collapse | None = None) -> RunSummary:
    """An evaluation every 10 iterations; one iteration is 10 sequences, 100 tokens and `cost` FLOPs."""
    points = tuple(
        EvaluationPoint(
            iteration=10 * n,
            sequences=100.0 * n,
            tokens=1000.0 * n,
            flops=10.0 * cost * n,
            training_flops=30.0 * n,
            seconds=2.0 * n,
            cpu_seconds=1.0 * n,
            policy_accuracy=accuracy,
            rollout_model_accuracy=accuracy / 2,
            acceptance=None,
            kl=None,
        )
        for n, accuracy in enumerate(accuracies)
    )

    return RunSummary(
        arm=arm,
        seed=seed,
        points=points,
        iterations=10 * (len(points) - 1),
        problems=512,
        collapse=collapse,
        settings={},
        environment={},
    )


RUNS = [
    summary("base", 1, 0.3, 0.5, 0.6, 0.7),
    summary("base", 2, 0.4, 0.5, 0.7, 0.8),
    summary("base", 3, 0.3, 0.6, 0.7, 0.7),
    summary("other", 3, 0.3, 0.5, 0.8, 0.9, cost=4.0),
    summary("other", 1, 0.3, 0.6, 0.6, 0.6, cost=4.0),
    summary("other", 2, 0.4, 0.6, 0.8, 0.9, cost=4.0),
]


def rows(*arguments, **options):
    """Compare runs, and return the rows by arm."""
    return {row.arm: row for row in compare(*arguments, **options).rows}


def test_mean_spread_and_differences_are_by_seed() -> None:
    arms = rows(RUNS)
    base, other = arms["base"], arms["other"]

    assert base.difference is None and base.seeds == other.seeds == (1, 2, 3)
    assert (base.after.mean, base.after.deviation) == (
        np.mean([0.7, 0.8, 0.7]),
        pytest.approx(np.std([0.7, 0.8, 0.7], ddof=1)),
    )

    pairs = np.array([0.6, 0.9, 0.9]) - np.array([0.7, 0.8, 0.7])
    assert other.difference.spread.values == pytest.approx(tuple(pairs))
    assert other.difference.spread.error == pytest.approx(pairs.std(ddof=1) / np.sqrt(3))
    assert (other.difference.higher, other.difference.seeds) == (2, 3)
    assert other.rollout_model_after.mean == pytest.approx(0.4)


def test_a_budget_counts_the_last_evaluation_within_it() -> None:
    assert rows(RUNS, budget=200)["base"].after.values == (0.6, 0.7, 0.7)
    assert rows(RUNS, budget=299)["base"].after.values == (0.6, 0.7, 0.7)
    assert rows(RUNS, unit="tokens", budget=1000)["other"].after.values == (0.6, 0.6, 0.5)


def test_without_a_budget_it_is_what_all_have_spent() -> None:
    assert compare(RUNS).budget == 300.0

    dear = [summary("dear", 1, 0.3, 0.5, 0.6, cost=1.5), summary("cheap", 1, 0.3, 0.4, 0.5, 0.9)]
    comparison = compare(dear, unit="flops")
    assert comparison.budget == 30.0
    assert [row.after.values for row in comparison.rows] == [(0.6,), (0.9,)]

    with pytest.raises(ConfigError, match=r"before the first evaluation after training of arm 'dearest', at 40"):
        compare([*dear, summary("dearest", 1, 0.3, 0.4, cost=4.0)], unit="flops")


def test_costs_end_where_the_accuracy_is_first_reached() -> None:
    arms = rows(RUNS, accuracy=0.7)

    assert (arms["base"].cost.reached, arms["base"].cost.flops) == (3, 20.0)  # 30, 20, 20

    other = arms["other"].cost
    # after 1 2/3, 1 1/2 and never, each of 40 + 30 FLOPs
    assert (other.reached, other.of, other.flops, other.cpu_seconds) == pytest.approx((2, 3, 200 / 3, 5 / 3))
    assert other.all_flops == pytest.approx(350 / 3)
    assert rows(RUNS, accuracy=0.8)["base"].cost.flops is None  # one of three got there
    assert compare(RUNS).accuracy == 0.6  # what the worst run reached


def test_costs_are_counted_to_an_accuracy_above_every_start() -> None:
    """A run that never rose has its best at or near its start, where every arm would arrive at no cost."""
    rising, falling = summary("a", 1, 0.4, 0.6, 0.7), summary("b", 1, 0.4, 0.38, 0.36)
    comparison = compare([rising, falling])

    assert comparison.accuracy == 0.7
    assert [(row.cost.reached, row.cost.flops) for row in comparison.rows] == [(1, pytest.approx(20.0)), (0, None)]
    assert compare([rising, summary("b", 1, 0.4, 0.43, 0.41)]).accuracy == 0.7  # 6 points are two standard errors
    assert compare([rising, summary("b", 1, 0.1, 0.39, 0.39)]).accuracy == 0.7  # below the other's start

    flat = compare([falling])
    assert flat.accuracy is None and flat.rows[0].cost is None
    titles = [table.title for table in comparison_tables(flat)]
    assert len(titles) == 1 and "costs of an accuracy are not compared" in comparison_tables(flat)[0].note
    assert comparison_charts(flat, [falling])[0].guides == ()


@pytest.mark.parametrize(("seeds", "error"), [(1, 0.028284), (2, 0.02), (3, 0.0)])
def test_few_seeds_have_at_least_the_error_of_their_problems(seeds: int, error: float) -> None:
    def run(arm: str, seed: int, accuracy: float) -> RunSummary:
        plain = summary(arm, seed, 0.3, accuracy)
        points = (replace(point, policy_accuracy_stderr=0.02) for point in plain.points)
        return replace(plain, points=tuple(points))

    arms = [run(arm, seed, accuracy) for arm, accuracy in (("a", 0.7), ("b", 0.6)) for seed in range(seeds)]
    difference = rows(arms)["b"].difference
    assert difference.error == pytest.approx(error, abs=1e-6)
    assert difference_cells(difference)[0] == f"-10.0 ± {100 * error:.1f}"


def test_a_collapsed_run_sets_neither_budget_nor_accuracy() -> None:
    fallen = summary("none", 1, 0.5, 0.1, 0.1, collapse=COLLAPSE)
    comparison = compare([*RUNS, fallen])

    assert (comparison.budget, comparison.accuracy) == (300.0, 0.6)

    row = comparison.rows[-1]
    assert row.after.values == (0.1,) and row.collapsed == ("seed 1: 10.0% right; first sign: KL",) and row.short == 0
    assert row.after.deviation is None and row.difference.spread.error is None


def test_a_run_that_ended_early_is_called_short() -> None:
    arms = rows([*RUNS, summary("short", 1, 0.3, 0.4)], budget=300)
    assert arms["short"].short == 1 and arms["base"].short == 0
    assert rows(RUNS, budget=305)["base"].short == 0  # another iteration of 10 sequences would not fit


def test_any_arm_can_be_the_baseline() -> None:
    assert compare(RUNS, baseline="other").baseline == "other"


def test_a_policy_that_writes_for_itself_has_no_rollout_model() -> None:
    alone = summary("alone", 1, 0.3, 0.5)
    alone = replace(alone, points=tuple(replace(point, rollout_model_accuracy=None) for point in alone.points))
    assert rows([alone])["alone"].rollout_model_after is None
