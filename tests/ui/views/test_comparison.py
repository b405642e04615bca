"""A comparison of arms: what its charts draw, how collapsed runs count, and what its verdict says of chance."""

import statistics
from dataclasses import replace

import pytest

from jackpot.analysis.compare.comparison import compare
from jackpot.analysis.compare.summary import EvaluationPoint, RunSummary
from jackpot.analysis.diagnose.collapse import Collapse
from jackpot.ui.error_bars import error_bars
from jackpot.ui.views.comparison import comparison_charts, comparison_verdict


def run(arm: str, seed: int, accuracies: tuple[float, ...], flops: float = 1.0) -> RunSummary:
    """A run with an evaluation of the policy at each iteration; `flops` are those of generation in each."""
    points = tuple(
        EvaluationPoint(
            iteration=iteration,
            sequences=float(iteration),
            tokens=10.0 * iteration,
            flops=flops * iteration,
            training_flops=0.0,
            seconds=0.0,
            cpu_seconds=2.0 * iteration,
            policy_accuracy=accuracy,
            rollout_model_accuracy=accuracy / 2,
            acceptance=None if iteration == 0 else 0.9,
            kl=None if iteration == 0 else 0.1 * iteration,
        )
        for iteration, accuracy in enumerate(accuracies)
    )
    return RunSummary(
        arm=arm,
        seed=seed,
        points=points,
        iterations=3,
        problems=512,
        collapse=None,
        settings={},
        environment={},
    )


RUNS = [
    run("obrs", 1, (0.2, 0.4, 0.6, 0.8)),
    run("obrs", 2, (0.4, 0.4, 0.8, 0.8)),
    run("none", 1, (0.2, 0.1), 7.0),
    run("none", 2, (0.4, 0.5, 0.6, 0.7), 7.0),
]
COLLAPSE = Collapse(iteration=1, accuracy=0.1, best=0.2, first_sign="", why="")


def series(title: str, runs: list[RunSummary]) -> dict:
    """The lines of one chart, by arm."""
    charts = {chart.title: chart for chart in comparison_charts(compare(runs), runs)}
    return {line.name: line for line in charts[title].series}


def test_a_line_is_the_mean_over_seeds_with_a_band() -> None:
    line = series("Policy by sequences generated", RUNS)["obrs"]
    assert list(line.x) == [0, 1, 2, 3]
    assert line.y == pytest.approx([0.3, 0.4, 0.7, 0.8])
    assert (line.low, line.high) == ((0.2, 0.4, 0.6, 0.8), (0.4, 0.4, 0.8, 0.8))


def test_the_same_arm_over_flops_and_processor_seconds() -> None:
    assert list(series("Policy by rollout FLOPs", RUNS)["none"].x) == [0, 7]
    assert list(series("Policy by CPU seconds of training", RUNS)["obrs"].x) == [0, 2, 4, 6]
    assert series("KL(rollout model || policy) by sequences generated", RUNS)["obrs"].y[0] is None


def test_lines_end_where_a_seed_that_did_not_collapse_is_missing() -> None:
    line = series("Policy by sequences generated", RUNS)["none"]
    assert (line.x, line.y) == ((0, 1), pytest.approx([0.3, 0.3]))


def runs_with_a_collapse() -> list[RunSummary]:
    """The runs, of which that of two evaluations has collapsed."""
    return [replace(summary, collapse=COLLAPSE) if len(summary.points) == 2 else summary for summary in RUNS]


def test_a_collapsed_run_counts_on_with_its_last_accuracy() -> None:
    runs = runs_with_a_collapse()
    assert series("Policy by sequences generated", runs)["none"].y == pytest.approx([0.3, 0.3, 0.35, 0.4])


def test_a_collapsed_run_has_no_say_in_what_the_others_spent() -> None:
    runs = runs_with_a_collapse()
    assert series("Policy by rollout FLOPs", runs)["none"].x == (0, 7, 14, 21)


def test_five_seeds_have_a_band_of_one_standard_deviation() -> None:
    values = [1.0, 2.0, 4.0, 8.0, 9.0]
    mean, low, high = error_bars([[value, None] for value in values])

    assert mean == (statistics.fmean(values), None)
    assert low == (pytest.approx(mean[0] - statistics.stdev(values)), None)
    assert high == (pytest.approx(mean[0] + statistics.stdev(values)), None)


def runs_ending_at(ends: dict[str, tuple[float, ...]]) -> list[RunSummary]:
    """A run for each arm and seed, from an accuracy of 0.4 to the one that is given."""
    return [run(arm, seed, (0.4, end)) for arm, arm_ends in ends.items() for seed, end in enumerate(arm_ends)]


@pytest.mark.parametrize("baseline", ["none", "obrs"])
def test_the_verdict_names_the_highest_arm_and_its_distance(baseline: str) -> None:
    ends = {"none": (0.50, 0.51, 0.52), "obrs": (0.79, 0.80, 0.81)}
    runs = runs_ending_at(ends)

    assert comparison_verdict(compare(runs, baseline=baseline)) == {
        "Highest": "obrs, 80.0 % right (3 seeds)",
        "Against none": "obrs is 29.0 points higher than none (95 % CI +29.0 to +29.0, 3 seeds): "
        "significant, on 3 of 3",
        "Cheapest to 50.0%": "obrs, with 27% of none's FLOPs and 27% of its CPU seconds",
    }


def test_seeds_on_which_both_end_alike_do_not_count() -> None:
    ends = {"none": (0.5, 0.5, 0.5, 0.5, 0.8), "obrs": (0.8, 0.8, 0.8, 0.8, 0.8)}
    runs = runs_ending_at(ends)
    assert comparison_verdict(compare(runs))["Against none"].endswith("significant, on 4 of 5")


def test_the_verdict_does_not_call_a_difference_of_chance_one() -> None:
    runs = runs_ending_at({"a": (0.5, 0.6), "b": (0.5, 0.62)})

    assert comparison_verdict(compare(runs))["Against a"].endswith("2 seeds): not significant")
    assert comparison_verdict(compare(runs[:2])) == {"Highest": "a, 55.0 % right (2 seeds)"}

    verdict_of_other_seeds = comparison_verdict(compare([runs[0], runs[3]]))
    assert "no common seed" in verdict_of_other_seeds.values()

    verdict_of_one_seed = comparison_verdict(compare([runs[1], runs[3]]))
    assert verdict_of_one_seed["Against a"] == "b is 2.0 points higher than a (1 seed, no interval): cannot tell"


def test_three_seeds_need_students_quantile_to_be_no_chance() -> None:
    ends = {"a": (0.5, 0.5, 0.5), "b": (0.51, 0.53, 0.55)}  # a difference of 0.03 with an error of 0.0115: 2.6 of them
    runs = runs_ending_at(ends)
    text = comparison_verdict(compare(runs))["Against a"]

    assert text == "b is 3.0 points higher than a (95 % CI -2.0 to +8.0, 3 seeds): not significant"

    runs_further_apart = runs[:3] + [run("b", seed, (0.4, end + 0.03)) for seed, end in enumerate(ends["b"])]
    assert comparison_verdict(compare(runs_further_apart))["Against a"].endswith("significant, on 3 of 3")  # 5.2 errors


def test_of_many_arms_the_baseline_and_the_next_are_paired() -> None:
    ends = {"none": 0.2, "a": 0.5, "b": 0.6, "c": 0.7, "d": 0.8, "e": 0.75}
    runs = [run(arm, seed, (0.1, end + 0.01 * seed)) for arm, end in ends.items() for seed in range(2)]

    titles = list(comparison_verdict(compare(runs)))

    assert titles == ["Highest", "Against none", "Against e", "Against c", "Cheapest to 20.0%"]
