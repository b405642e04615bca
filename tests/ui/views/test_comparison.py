"""The pictures of a comparison: what is drawn where."""

import statistics
from dataclasses import replace

import pytest

from jackpot.analysis.compare.comparison import compare
from jackpot.analysis.compare.summary import EvaluationPoint, RunSummary
from jackpot.analysis.diagnose.collapse import Collapse
from jackpot.ui.error_bars import error_bars
from jackpot.ui.views.comparison import comparison_charts, comparison_verdict


def run(arm: str, seed: int, accuracies: tuple[float, ...], flops: float = 1.0) -> RunSummary:
    points = tuple(
        EvaluationPoint(
            iteration=n,
            sequences=float(n),
            tokens=10.0 * n,
            flops=flops * n,
            training_flops=0.0,
            seconds=0.0,
            cpu_seconds=2.0 * n,
            policy_accuracy=value,
            rollout_model_accuracy=value / 2,
            acceptance=None if n == 0 else 0.9,
            kl=None if n == 0 else 0.1 * n,
        )
        for n, value in enumerate(accuracies)
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
FALLEN = Collapse(iteration=1, accuracy=0.1, best=0.2, first_sign="", why="")


def series(title: str, runs: list[RunSummary]) -> dict:
    charts = {chart.title: chart for chart in comparison_charts(compare(runs), runs)}
    return {one.name: one for one in charts[title].series}


def test_a_line_is_the_mean_over_seeds_with_a_band() -> None:
    found = series("Policy by sequences generated", RUNS)["obrs"]
    assert list(found.x) == [0, 1, 2, 3]
    assert found.y == pytest.approx([0.3, 0.4, 0.7, 0.8])
    assert (found.low, found.high) == ((0.2, 0.4, 0.6, 0.8), (0.4, 0.4, 0.8, 0.8))


def test_the_same_arm_over_flops_and_processor_seconds() -> None:
    assert list(series("Policy by rollout FLOPs", RUNS)["none"].x) == [0, 7]
    assert list(series("Policy by CPU seconds of training", RUNS)["obrs"].x) == [0, 2, 4, 6]
    assert series("KL(rollout model || policy) by sequences generated", RUNS)["obrs"].y[0] is None


def test_lines_end_where_a_seed_that_did_not_collapse_is_missing() -> None:
    found = series("Policy by sequences generated", RUNS)["none"]
    assert (found.x, found.y) == ((0, 1), pytest.approx([0.3, 0.3]))


def test_a_collapsed_run_counts_on_with_its_last_accuracy() -> None:
    collapsed = [replace(one, collapse=FALLEN) if len(one.points) == 2 else one for one in RUNS]
    assert series("Policy by sequences generated", collapsed)["none"].y == pytest.approx([0.3, 0.3, 0.35, 0.4])


def test_a_collapsed_run_has_no_say_in_what_the_others_spent() -> None:
    collapsed = [replace(one, collapse=FALLEN) if len(one.points) == 2 else one for one in RUNS]
    assert series("Policy by rollout FLOPs", collapsed)["none"].x == (0, 7, 14, 21)


def test_five_seeds_have_a_band_of_one_standard_deviation() -> None:
    values = [1.0, 2.0, 4.0, 8.0, 9.0]
    mean, low, high = error_bars([[value, None] for value in values])
    assert mean == (statistics.fmean(values), None)
    assert low == (pytest.approx(mean[0] - statistics.stdev(values)), None)
    assert high == (pytest.approx(mean[0] + statistics.stdev(values)), None)


@pytest.mark.parametrize("baseline", ["none", "obrs"])
def test_the_verdict_names_the_highest_arm_and_its_distance(baseline: str) -> None:
    ends = {"none": (0.50, 0.51, 0.52), "obrs": (0.79, 0.80, 0.81)}
    runs = [run(arm, seed, (0.4, end)) for arm, of_arm in ends.items() for seed, end in enumerate(of_arm)]

    assert comparison_verdict(compare(runs, baseline=baseline)) == {
        "Highest": "obrs, 80.0 % right (3 seeds)",
        "Against none": "obrs is 29.0 points higher than none (95 % CI +29.0 to +29.0, 3 seeds): "
        "significant, on 3 of 3",
        "Cheapest to 50.0%": "obrs, with 27% of none's FLOPs and 27% of its CPU seconds",
    }


def test_seeds_on_which_both_end_alike_do_not_count() -> None:
    ends = {"none": (0.5, 0.5, 0.5, 0.5, 0.8), "obrs": (0.8, 0.8, 0.8, 0.8, 0.8)}
    runs = [run(arm, seed, (0.4, end)) for arm, of_arm in ends.items() for seed, end in enumerate(of_arm)]
    assert comparison_verdict(compare(runs))["Against none"].endswith("significant, on 4 of 5")


def test_the_verdict_does_not_call_a_difference_of_chance_one() -> None:
    runs = [
        run(arm, seed, (0.4, end)) for arm in ("a", "b") for seed, end in enumerate((0.5, 0.6 if arm == "a" else 0.62))
    ]

    assert comparison_verdict(compare(runs))["Against a"].endswith("2 seeds): not significant")
    assert comparison_verdict(compare(runs[:2])) == {"Highest": "a, 55.0 % right (2 seeds)"}

    one = comparison_verdict(compare([runs[0], runs[3]]))
    assert "no common seed" in one.values()

    one = comparison_verdict(compare([runs[1], runs[3]]))
    assert one["Against a"] == "b is 2.0 points higher than a (1 seed, no interval): cannot tell"


def test_three_seeds_need_students_quantile_to_be_no_chance() -> None:
    ends = {"a": (0.5, 0.5, 0.5), "b": (0.51, 0.53, 0.55)}  # a difference of 0.03 with an error of 0.0115: 2.6 of them
    runs = [run(arm, seed, (0.4, end)) for arm, of_arm in ends.items() for seed, end in enumerate(of_arm)]
    text = comparison_verdict(compare(runs))["Against a"]

    assert text == "b is 3.0 points higher than a (95 % CI -2.0 to +8.0, 3 seeds): not significant"

    wide = runs[:3] + [run("b", seed, (0.4, end + 0.03)) for seed, end in enumerate(ends["b"])]
    assert comparison_verdict(compare(wide))["Against a"].endswith("significant, on 3 of 3")  # 5.2


def test_of_many_arms_the_baseline_and_the_next_are_paired() -> None:
    ends = {"none": 0.2, "a": 0.5, "b": 0.6, "c": 0.7, "d": 0.8, "e": 0.75}
    runs = [run(arm, seed, (0.1, end + 0.01 * seed)) for arm, end in ends.items() for seed in range(2)]
    expected = ["Highest", "Against none", "Against e", "Against c", "Cheapest to 20.0%"]
    assert list(comparison_verdict(compare(runs))) == expected
