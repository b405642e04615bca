"""Lines of several runs, arms, and the charts of every metric."""

import math
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
        {"iteration": number} | ({} if value == "absent" else {metric: value}) for number, value in enumerate(values)
    ]


def arms(folder: Path) -> list[Arm]:
    return arms_of(read_runs(find_runs([folder])[0]))


def charts(sections: list[Section]) -> dict[str, Chart]:
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
    half, gaps = random.randrange(2, 26), random.choice((0.0, 0.3, 0.9, 1.0))
    stretches = random.randrange(5, 41)
    values: list[float | None] = []
    for _ in range(stretches):  # of 10 values each, none of which is a number in a gap
        is_gap = random.random() < gaps
        values += [None if is_gap else random.uniform(-1e6, 1e6) for _ in range(10)]
    numbers = [value for value in values if value is not None]
    low, high = ([None if value is None else value + by for value in values] for by in (-1.0, 1.0))
    line = downsample(MeanLine(list(range(len(values))), values, low, high), most=2 * half)

    assert len(line.x) <= 2 * half
    assert line.x == sorted(set(line.x))
    for column, whole in ((line.y, values), (line.low, low), (line.high, high)):
        assert column == [whole[x] for x in line.x]
    if numbers:
        assert min(line.numbers) == min(numbers)
        assert max(line.numbers) == max(numbers)

    wide = 2 * math.ceil(len(values) / half)
    for begin in range(len(values) - wide):
        if all(value is None for value in values[begin : begin + wide]):
            assert any(begin <= x < begin + wide and y is None for x, y in zip(line.x, line.y, strict=True))


def test_quantiles_stand_in_one_logarithmic_chart(tmp_path: Path) -> None:
    line = {"mismatch/ratio_p1": 0.1, "mismatch/ratio_p50": 1.0, "mismatch/ratio_p99": 3.0}
    run_folder(tmp_path, [line] * 3)
    chart = charts(metric_sections(arms(tmp_path)))["Ratio: median, and from the 1st to the 99th percentile"]

    assert [(one.name, one.y[0]) for one in chart.series] == [
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
    half, none = arms(tmp_path)

    assert (half.name, len(half.runs)) == ("quickstart-half", 1)
    assert (none.name, [one.config.seed for one in none.runs]) == ("quickstart-none", [1, 2])
    assert differing([half.runs, none.runs]) == {"objective.correction.lam": ["0.5", "1.0"]}


def test_arms_of_one_name_are_told_apart_by_what_differs(tmp_path: Path) -> None:
    run_folder(tmp_path / "x-seed1", lines(1.0), "seed=1")
    run_folder(tmp_path / "x-seed2", lines(1.0), "seed=2", "batch.prompts=8")
    assert [arm.name for arm in arms(tmp_path)] == ["x (batch.prompts=4)", "x (batch.prompts=8)"]


def drawn_numbers(sections: list[Section]) -> list[list[float]]:
    """Every line, without gaps."""
    drawn = [one for chart in charts(sections).values() for one in chart.series]
    columns = [column for one in drawn for column in (one.y, one.low, one.high) if column]
    return [[value for value in column if value is not None] for column in columns]


@pytest.mark.parametrize("which", ["all arms", "one arm"])
def test_every_metric_of_a_real_run_is_drawn_or_listed_as_empty(trained: Path, which: str) -> None:
    found = arms(trained) if which == "all arms" else arms(trained / "none-seed0")
    found[0].runs[0].lines[-1]["brandnew/thing"] = 0.123  # a metric that somebody adds later
    sections = metric_sections(found)
    columns = drawn_numbers(sections)
    listed = {row[0] for section in sections for item in section.items if isinstance(item, Table) for row in item.rows}
    names = {name for arm in found for run in arm.runs for line in run.lines for name in line} - {"iteration", "time"}

    assert len(names) > 150
    for arm in found:
        for name in names:
            at: dict[int, list[float]] = {}
            for one in arm.runs:
                for line in one.lines:
                    if line.get(name) is not None:
                        at.setdefault(line["iteration"], []).append(line[name])
            means = [float(f"{fmean(at[iteration]):.5g}") for iteration in sorted(at)]
            assert means in columns if means else name in listed or len(found) > 1, name


def test_charts_come_in_the_order_in_which_one_diagnoses(trained: Path) -> None:
    found = arms(trained)
    titles = [section.title for section in [summary_section(found, diagnoses(found), []), *metric_sections(found)]]
    expected = [
        "Summary",
        "At a glance",
        "Accuracy and reward",
        "Sanity checks",
        "Mismatch, before the correction",
        "Rejection (OBRS)",
    ]
    expected += ["After the correction", "Staleness", "Models", "Length, tokens, time", "Empty metrics"]

    assert titles == expected


def test_arms_have_one_color_everywhere_and_limits_are_drawn(trained: Path) -> None:
    drawn = charts(metric_sections(arms(trained)))
    colors = {(one.group, one.color) for item in drawn.values() for one in item.series if one.group}

    assert len(colors) == 2
    assert {group for group, _ in colors} == {"none", "obrs"}

    [guide] = drawn["obrs/acceptance"].guides
    assert (guide.y, guide.text) == (0.5, "at least 0.5")  # docs/metrics.md: unhealthy below 0.5

    bands = drawn["obrs/acceptance by position: obrs"].series
    assert [one.name for one in bands[:3]] == ["0", "1-3", "4-15"]
    assert len({one.color for one in bands}) == len(bands)

    signs = drawn["obrs/acceptance by the sign of the advantage"].series
    assert [(one.name, one.dash) for one in signs[::2]] == [
        ("none, advantage above 0", "solid"),
        ("none, advantage below 0", "dash"),
    ]


def test_a_caption_says_where_a_limit_is_broken(tmp_path: Path) -> None:
    for name, acceptance in (("good", [0.9] * 4), ("bad", [0.9, 0.4, 0.3, 0.6])):
        run_folder(tmp_path / name, [{"obrs/acceptance": one} for one in acceptance])
    good, bad = (charts(metric_sections(arms(tmp_path / name)))["obrs/acceptance"] for name in ("good", "bad"))

    assert good.note == "Within its limit, at least 0.5."
    assert not good.guides[0].is_broken
    assert bad.note.startswith("2 of 4 values are beyond the limit, at least 0.5: ")
    assert bad.guides[0].is_broken


def test_a_caption_names_the_settings_that_explain_a_value(tmp_path: Path) -> None:
    for name, setting in (("lam", "objective.correction.lam=2"), ("plain", "objective.correction.lam=1")):
        run_folder(tmp_path / name, [{"obrs/acceptance": 0.4}] * 4, setting)
    lam, plain = (charts(metric_sections(arms(tmp_path / name)))["obrs/acceptance"] for name in ("lam", "plain"))

    assert lam.note == "Beyond its limit, at least 0.5, only as the settings explain: objective.correction.lam=2."
    assert not lam.guides[0].is_broken
    assert plain.guides[0].is_broken


def test_limits_are_kept_by_every_run_and_not_by_their_mean(tmp_path: Path) -> None:
    for seed, acceptance in ((1, 0.9), (2, 0.3)):
        lines_of = [{"obrs/acceptance": acceptance, "obrs/z": 0.8, "obrs/kappa": 1.0}] * 4
        run_folder(tmp_path / f"x-seed{seed}", lines_of, f"seed={seed}")
    chart = charts(metric_sections(arms(tmp_path)))["obrs/acceptance"]

    assert chart.note.startswith("4 of 8 values are beyond the limit, at least 0.5: ")
    assert chart.guides[0].is_broken
    assert set(chart.series[0].y) == {0.6}  # the mean is within


def test_a_section_with_a_metric_of_a_finding_is_not_folded(tmp_path: Path) -> None:
    for seed, failed in ((1, 0.0), (2, 0.4)):
        run_folder(tmp_path / f"x-seed{seed}", [{"seconds/train": 1.0, "health/a": failed}] * 3, f"seed={seed}")
    folded, opened = (metric_sections(arms(tmp_path), named) for named in ((), {"health/a"}))
    assert [one.is_folded for one in folded] == [True, True]
    assert [one.is_folded for one in opened] == [False, True]


def test_three_charts_come_first_and_what_is_rare_is_folded(tmp_path: Path) -> None:
    line = {"eval/policy_accuracy": 0.5, "mismatch/kl_rollout_policy": 0.1, "obrs/acceptance": 0.9, "lag/mean": None}
    run_folder(tmp_path / "a", [line | {"seconds/train": 1.0, "eval/policy_engine_gap": 1e-7}] * 3)
    sections = {section.title: section for section in metric_sections(arms(tmp_path))}

    assert next(iter(sections)) == "At a glance"

    first = ["eval/policy_accuracy", "mismatch/kl_rollout_policy", "obrs/acceptance"]
    assert [item.title for item in sections["At a glance"].items] == first
    assert {title for title, section in sections.items() if section.is_folded} == {
        "Sanity checks",
        "Length, tokens, time",
        "Empty metrics",
    }

    run_folder(tmp_path / "a", [{"checkpoint/failed": 1.0, "seconds/train": 1.0}] * 3)
    broken = {section.title: section.is_folded for section in metric_sections(arms(tmp_path))}

    assert broken == {"Sanity checks": False, "Length, tokens, time": True}


def test_an_arm_has_one_color_in_the_report_and_in_a_comparison(tmp_path: Path) -> None:
    names = ("none", "obrs", "tis", "mine")
    assert arm_color_indices(names) == {"obrs": 0, "none": 1, "tis": 2, "mine": 3} == arm_color_indices(reversed(names))
    assert arm_color_indices(["b", "none", "a"]) == {"none": 1, "a": 0, "b": 2}

    for number, name in enumerate(names):
        run_folder(tmp_path / name, [{"obrs/acceptance": 0.9}] * 3, f"batch.prompts={4 + 4 * number}")
    [chart] = [one for title, one in charts(metric_sections(arms(tmp_path))).items() if title == "obrs/acceptance"]

    assert {one.name: one.color_index for one in chart.series} == arm_color_indices(names)

    [alone] = charts(metric_sections(arms(tmp_path / "none")))["obrs/acceptance"].series
    assert alone.color_index == 1


def apart(one: str, other: str) -> int:
    """The greatest difference of red, green and blue, of 255."""
    return max(abs(int(one[at : at + 2], 16) - int(other[at : at + 2], 16)) for at in (1, 3, 5))


def test_seventeen_arms_and_their_variants_look_different(tmp_path: Path) -> None:
    whole = {
        "obrs/z": 0.9,
        "obrs/kappa": 1.1,
        "mismatch/kl_at_0": 0.1,
        "mismatch/kl_at_1-3": 0.2,
        "obrs/acceptance": 0.9,
    }
    whole |= dict.fromkeys((f"mismatch/kl_{part}" for part in ("at_0", "at_1-3", "positive", "negative")), 0.1)
    for number in range(17):
        run_folder(tmp_path / f"arm{number:02d}", [whole] * 3, f"batch.prompts={4 + 4 * number}")
    drawn = charts(metric_sections(arms(tmp_path))).values()
    by_arms = [item for item in drawn if len(item.series) == 17]

    assert {one.style for item in by_arms for one in item.series} == {"line", "both"}
    for item in by_arms:
        colors = [one.color for one in item.series]
        assert all(apart(one, other) > 30 for place, one in enumerate(colors) for other in colors[:place])

    several = [item for item in drawn if len(item.series) == 34]
    assert len(several) == 2  # acceptance and Z, the signs
    assert all(len({(one.color, one.dash) for one in item.series}) == 34 for item in several)


def test_the_summary_says_what_became_of_each_run(tmp_path: Path) -> None:
    healthy = [{"eval/policy_accuracy": 0.4 + 0.01 * number, "obrs/acceptance": 0.9} for number in range(10)]
    sick = [line | {"obrs/acceptance": 0.2} for line in healthy[:8]]
    run_folder(tmp_path / "good", healthy, "iterations=9")
    run_folder(
        tmp_path / "bad",
        sick,
        "iterations=20",
        "seed=3",
        events=[{"event": "skipped_step", "gap": 8.61368178293742e-08}],
    )
    found = arms(tmp_path)
    tables = {item.title: item for item in summary_section(found, diagnoses(found), ["x cannot be read"]).items}
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
