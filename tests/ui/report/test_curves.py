"""The charts of the report: lines of one and of several runs, arms, every metric, and the summary above them."""

import math
from itertools import combinations
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from helpers.folders import run_folder
from jackpot.ui.charts import Chart, Section, Table, arm_color_indices
from jackpot.ui.error_bars import MeanLine, downsample, mean_line
from jackpot.ui.report.curves import metric_sections
from jackpot.ui.report.runs import Arm, arms_of, differing, find_runs, read_runs
from jackpot.ui.report.summary import diagnoses, summary_section


def lines(*values: Any, metric: str = "a/b") -> list[dict[str, Any]]:
    """Lines of metrics.jsonl; a value "absent" leaves the metric out."""
    return [
        {"iteration": iteration} | ({} if value == "absent" else {metric: value})
        for iteration, value in enumerate(values)
    ]


def arms(folder: Path) -> list[Arm]:
    """The runs of a folder, those of equal settings together."""
    return arms_of(read_runs(find_runs([folder])[0]))


def charts(sections: list[Section]) -> dict[str, Chart]:
    """All charts by title."""
    return {item.title: item for section in sections for item in section.items if not isinstance(item, Table)}


def test_a_single_run_is_its_own_line_without_a_band() -> None:
    line = mean_line([lines(1.0, "absent", None, 4.0)], "a/b")
    assert line == MeanLine([0, 2, 3], [1.0, None, 4.0])  # absent: no point; null: a gap


def test_few_seeds_are_their_mean_between_least_and_greatest() -> None:
    line = mean_line([lines(1.0, 2.0, None), lines(3.0, None, None), lines(8.0, 6.0, None, 5.0)], "a/b")

    assert line.x == [0, 1, 2, 3]
    assert line.y == [4.0, 4.0, None, 5.0]  # a seed that has stopped is not missed
    assert line.low == [1.0, 2.0, None, 5.0]
    assert line.high == [8.0, 6.0, None, 5.0]


def test_five_seeds_are_their_mean_and_one_standard_deviation() -> None:
    values = np.random.default_rng(0).normal(size=(5, 3))

    line = mean_line([lines(*row) for row in values.tolist()], "a/b")
    mean, spread = values.mean(0), values.std(0, ddof=1)

    assert np.allclose(line.y, mean)
    assert np.allclose(line.low, mean - spread)
    assert np.allclose(line.high, mean + spread)


@pytest.mark.parametrize("seed", range(40))
def test_a_thin_line_keeps_extremes_order_and_wide_gaps(seed: int) -> None:
    random = Random(seed)
    half_points = random.randrange(2, 26)
    gap_share = random.choice((0.0, 0.3, 0.9, 1.0))
    stretches = random.randrange(5, 41)
    values: list[float | None] = []
    for _ in range(stretches):  # of 10 values each, none of which is a number in a gap
        is_gap = random.random() < gap_share
        values += [None if is_gap else random.uniform(-1e6, 1e6) for _ in range(10)]
    numbers = [value for value in values if value is not None]
    low, high = ([None if value is None else value + shift for value in values] for shift in (-1.0, 1.0))

    line = downsample(MeanLine(list(range(len(values))), values, low, high), most=2 * half_points)

    assert len(line.x) <= 2 * half_points
    assert line.x == sorted(set(line.x))
    for column, all_values in ((line.y, values), (line.low, low), (line.high, high)):
        assert column == [all_values[x] for x in line.x]
    if numbers:
        assert min(line.numbers) == min(numbers)
        assert max(line.numbers) == max(numbers)

    width = 2 * math.ceil(len(values) / half_points)
    for begin in range(len(values) - width):
        if all(value is None for value in values[begin : begin + width]):
            assert any(begin <= x < begin + width and y is None for x, y in zip(line.x, line.y, strict=True))


def test_quantiles_stand_in_one_logarithmic_chart(tmp_path: Path) -> None:
    line = {"mismatch/ratio_p1": 0.1, "mismatch/ratio_p50": 1.0, "mismatch/ratio_p99": 3.0}
    run_folder(tmp_path, [line] * 3)

    chart = charts(metric_sections(arms(tmp_path)))["Ratio: median, and from the 1st to the 99th percentile"]

    assert [(series.name, series.y[0]) for series in chart.series] == [
        ("median", 1.0),
        ("1st percentile", 0.1),
        ("99th percentile", 3.0),
    ]
    assert chart.log_y
    assert "given up tokens" in chart.note


def test_runs_that_differ_by_seed_and_threads_only_are_one_arm(tmp_path: Path) -> None:
    for seed in (1, 2):
        run_folder(tmp_path / f"quickstart-none-seed{seed}", lines(1.0), f"seed={seed}", f"threads={seed}")
    run_folder(tmp_path / "quickstart-half-seed1", lines(1.0), "seed=1", "objective.correction.lam=0.5")

    half_arm, none_arm = arms(tmp_path)

    assert (half_arm.name, len(half_arm.runs)) == ("quickstart-half", 1)
    assert (none_arm.name, [run.config.seed for run in none_arm.runs]) == ("quickstart-none", [1, 2])
    assert differing([half_arm.runs, none_arm.runs]) == {"objective.correction.lam": ["0.5", "1.0"]}


def test_arms_of_one_name_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    run_folder(tmp_path / "x-seed1", lines(1.0), "seed=1")
    run_folder(tmp_path / "x-seed2", lines(1.0), "seed=2", "batch.prompts=8")
    assert [arm.name for arm in arms(tmp_path)] == ["x (batch.prompts=4)", "x (batch.prompts=8)"]


def drawn_numbers(sections: list[Section]) -> list[list[float]]:
    """Every line, without gaps."""
    all_series = [series for chart in charts(sections).values() for series in chart.series]
    columns = [column for series in all_series for column in (series.y, series.low, series.high) if column]
    return [[value for value in column if value is not None] for column in columns]


@pytest.mark.parametrize("which", ["all arms", "one arm"])
def test_every_metric_of_a_real_run_is_drawn_or_listed_as_empty(trained: Path, which: str) -> None:
    shown_arms = arms(trained) if which == "all arms" else arms(trained / "none-seed0")
    shown_arms[0].runs[0].lines[-1]["brandnew/thing"] = 0.123  # a metric that somebody adds later

    sections = metric_sections(shown_arms)

    columns = drawn_numbers(sections)
    tables = [item for section in sections for item in section.items if isinstance(item, Table)]
    empty_names = {row[0] for table in tables for row in table.rows}
    all_lines = [line for arm in shown_arms for run in arm.runs for line in run.lines]
    names = {name for line in all_lines for name in line} - {"iteration", "time"}

    assert len(names) > 150
    for arm in shown_arms:
        for name in names:
            values_by_iteration: dict[int, list[float]] = {}
            for run in arm.runs:
                for line in run.lines:
                    if line.get(name) is not None:
                        values_by_iteration.setdefault(line["iteration"], []).append(line[name])
            means = [float(f"{fmean(values_by_iteration[key]):.5g}") for key in sorted(values_by_iteration)]
            if means:
                assert means in columns, name
            else:
                assert name in empty_names or len(shown_arms) > 1, name


def test_charts_come_in_the_order_in_which_one_diagnoses(trained: Path) -> None:
    shown_arms = arms(trained)
    sections = [summary_section(shown_arms, diagnoses(shown_arms), []), *metric_sections(shown_arms)]

    assert [section.title for section in sections] == [
        "Summary",
        "At a glance",
        "Accuracy and reward",
        "Sanity checks",
        "Mismatch, before the correction",
        "Rejection (OBRS)",
        "After the correction",
        "Staleness",
        "Models",
        "Length, tokens, time",
        "Empty metrics",
    ]


def test_arms_have_one_color_everywhere_and_limits_are_drawn(trained: Path) -> None:
    drawn_charts = charts(metric_sections(arms(trained)))
    colors = {(line.group, line.color) for chart in drawn_charts.values() for line in chart.series if line.group}

    assert len(colors) == 2
    assert {group for group, _ in colors} == {"none", "obrs"}

    [guide] = drawn_charts["obrs/acceptance"].guides
    assert (guide.y, guide.text) == (0.5, "at least 0.5")  # docs/metrics.md: unhealthy below 0.5

    bands = drawn_charts["obrs/acceptance by position: obrs"].series
    assert [line.name for line in bands[:3]] == ["0", "1-3", "4-15"]
    assert len({line.color for line in bands}) == len(bands)

    signs = drawn_charts["obrs/acceptance by the sign of the advantage"].series
    assert [(line.name, line.dash) for line in signs[::2]] == [
        ("none, advantage above 0", "solid"),
        ("none, advantage below 0", "dash"),
    ]


def test_a_caption_says_where_a_limit_is_broken(tmp_path: Path) -> None:
    for name, acceptance in (("good", [0.9] * 4), ("bad", [0.9, 0.4, 0.3, 0.6])):
        run_folder(tmp_path / name, [{"obrs/acceptance": value} for value in acceptance])
    good_chart, bad_chart = (
        charts(metric_sections(arms(tmp_path / name)))["obrs/acceptance"] for name in ("good", "bad")
    )

    assert good_chart.note == "Within its limit, at least 0.5."
    assert not good_chart.guides[0].is_broken
    assert bad_chart.note.startswith("2 of 4 values are beyond the limit, at least 0.5: ")
    assert bad_chart.guides[0].is_broken


def test_a_caption_names_the_settings_that_explain_a_value(tmp_path: Path) -> None:
    for name, setting in (("lam", "objective.correction.lam=2"), ("plain", "objective.correction.lam=1")):
        run_folder(tmp_path / name, [{"obrs/acceptance": 0.4}] * 4, setting)
    lam_chart, plain_chart = (
        charts(metric_sections(arms(tmp_path / name)))["obrs/acceptance"] for name in ("lam", "plain")
    )

    assert lam_chart.note == "Beyond its limit, at least 0.5, only as the settings explain: objective.correction.lam=2."
    assert not lam_chart.guides[0].is_broken
    assert plain_chart.guides[0].is_broken


def test_limits_are_kept_by_every_run_and_not_by_their_mean(tmp_path: Path) -> None:
    for seed, acceptance in ((1, 0.9), (2, 0.3)):
        run_lines = [{"obrs/acceptance": acceptance, "obrs/z": 0.8, "obrs/kappa": 1.0}] * 4
        run_folder(tmp_path / f"x-seed{seed}", run_lines, f"seed={seed}")

    chart = charts(metric_sections(arms(tmp_path)))["obrs/acceptance"]

    assert chart.note.startswith("4 of 8 values are beyond the limit, at least 0.5: ")
    assert chart.guides[0].is_broken
    assert set(chart.series[0].y) == {0.6}  # the mean is within


def test_a_section_with_a_metric_of_a_finding_is_not_folded(tmp_path: Path) -> None:
    for seed, failed_share in ((1, 0.0), (2, 0.4)):
        run_folder(tmp_path / f"x-seed{seed}", [{"seconds/train": 1.0, "health/a": failed_share}] * 3, f"seed={seed}")

    sections_without_finding = metric_sections(arms(tmp_path), ())
    sections_with_finding = metric_sections(arms(tmp_path), {"health/a"})

    assert [section.is_folded for section in sections_without_finding] == [True, True]
    assert [section.is_folded for section in sections_with_finding] == [False, True]


def test_three_charts_come_first_and_what_is_rare_is_folded(tmp_path: Path) -> None:
    line = {"eval/policy_accuracy": 0.5, "mismatch/kl_rollout_policy": 0.1, "obrs/acceptance": 0.9, "lag/mean": None}
    run_folder(tmp_path / "a", [line | {"seconds/train": 1.0, "eval/policy_engine_gap": 1e-7}] * 3)
    sections = {section.title: section for section in metric_sections(arms(tmp_path))}

    assert next(iter(sections)) == "At a glance"

    first_titles = ["eval/policy_accuracy", "mismatch/kl_rollout_policy", "obrs/acceptance"]
    assert [item.title for item in sections["At a glance"].items] == first_titles
    folded_titles = {title for title, section in sections.items() if section.is_folded}
    assert folded_titles == {"Sanity checks", "Length, tokens, time", "Empty metrics"}

    run_folder(tmp_path / "a", [{"checkpoint/failed": 1.0, "seconds/train": 1.0}] * 3)
    is_folded_by_title = {section.title: section.is_folded for section in metric_sections(arms(tmp_path))}

    assert is_folded_by_title == {"Sanity checks": False, "Length, tokens, time": True}


def test_an_arm_has_one_color_in_the_report_and_in_a_comparison(tmp_path: Path) -> None:
    names = ("none", "obrs", "tis", "mine")
    expected_indices = {"obrs": 0, "none": 1, "tis": 2, "mine": 3}
    assert arm_color_indices(names) == expected_indices
    assert arm_color_indices(reversed(names)) == expected_indices
    assert arm_color_indices(["b", "none", "a"]) == {"none": 1, "a": 0, "b": 2}

    for index, name in enumerate(names):
        run_folder(tmp_path / name, [{"obrs/acceptance": 0.9}] * 3, f"batch.prompts={4 + 4 * index}")
    chart = charts(metric_sections(arms(tmp_path)))["obrs/acceptance"]

    assert {series.name: series.color_index for series in chart.series} == arm_color_indices(names)

    [lone_series] = charts(metric_sections(arms(tmp_path / "none")))["obrs/acceptance"].series
    assert lone_series.color_index == 1


def color_distance(first: str, second: str) -> int:
    """The greatest difference of red, green and blue, of 255."""
    return max(abs(int(first[start : start + 2], 16) - int(second[start : start + 2], 16)) for start in (1, 3, 5))


def test_seventeen_arms_and_their_variants_look_different(tmp_path: Path) -> None:
    line = {
        "obrs/z": 0.9,
        "obrs/kappa": 1.1,
        "mismatch/kl_at_0": 0.1,
        "mismatch/kl_at_1-3": 0.2,
        "obrs/acceptance": 0.9,
    }
    line |= dict.fromkeys((f"mismatch/kl_{part}" for part in ("at_0", "at_1-3", "positive", "negative")), 0.1)

    for index in range(17):
        run_folder(tmp_path / f"arm{index:02d}", [line] * 3, f"batch.prompts={4 + 4 * index}")
    drawn_charts = charts(metric_sections(arms(tmp_path))).values()
    charts_by_arm = [chart for chart in drawn_charts if len(chart.series) == 17]

    assert {series.style for chart in charts_by_arm for series in chart.series} == {"line", "both"}
    for chart in charts_by_arm:
        colors = [series.color for series in chart.series]
        assert all(color_distance(*pair) > 30 for pair in combinations(colors, 2))

    charts_by_arm_and_sign = [chart for chart in drawn_charts if len(chart.series) == 34]
    assert len(charts_by_arm_and_sign) == 2  # acceptance and Z, the signs
    assert all(len({(series.color, series.dash) for series in chart.series}) == 34 for chart in charts_by_arm_and_sign)


def test_the_summary_says_what_became_of_each_run(tmp_path: Path) -> None:
    healthy_lines = [
        {"eval/policy_accuracy": 0.4 + 0.01 * iteration, "obrs/acceptance": 0.9} for iteration in range(10)
    ]
    sick_lines = [line | {"obrs/acceptance": 0.2} for line in healthy_lines[:8]]
    run_folder(tmp_path / "good", healthy_lines, "iterations=9")
    run_folder(
        tmp_path / "bad",
        sick_lines,
        "iterations=20",
        "seed=3",
        events=[{"event": "skipped_step", "gap": 8.61368178293742e-08}],
    )

    both_arms = arms(tmp_path)
    tables = {item.title: item for item in summary_section(both_arms, diagnoses(both_arms), ["x cannot be read"]).items}
    rows = {row[0]: row for row in tables["Runs"].rows}

    assert rows["good"][3:6] == ("9 of 9", "40.0%", "49.0%")
    assert rows["good"][-1] == "no finding"
    assert rows["bad"][2:6] == ("3", "7 of 20", "40.0%", "47.0%")
    assert rows["bad"][-1] == "unhealthy"

    [(name, signs)] = tables["Signs of the runs without a finding"].rows
    assert name == "good"
    assert signs.startswith("Looked at: events/peer_lost")
    assert "Not looked at, without a" in signs

    [finding] = tables["Findings, causes before their symptoms"].rows
    assert finding[:6] == ("bad", "obrs/acceptance", "0", "0.2", "0.2", "at least 0.5")
    assert tables["Settings that differ"].rows == (("iterations", "20", "9"),)
    assert tables["Events"].rows == (("bad", "skipped_step", "1", "0", "gap 8.614e-08"),)
    assert tables["Files left out"].rows == (("x cannot be read",),)
