"""docs/study.md and the runs behind it: the plan, what is refused, and the page's numbers."""

import json
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev

import pytest

from jackpot.analysis.compare.summary import EvaluationPoint, RunSummary
from jackpot.analysis.diagnose.collapse import Collapse
from jackpot.config.changes import settings_of
from jackpot.config.recipes import load_recipe
from jackpot.core.statistics import Interval, Sample
from jackpot.models.cost import forward_cost
from jackpot.models.hub import resolve_path
from research import reference, study, study_page
from research.reference import ROOT
from tools.toy_models import STUDY_MODELS, make_meta_model

SOURCE = "0" * 40


def empty_study(folder: Path) -> "study.Study":
    """A study without results."""
    return study.Study(results=folder / "results", runs=folder / "runs", source=SOURCE)


# What is committed


def test_the_page_is_what_its_generator_writes() -> None:
    if not study.committed().is_complete("first"):
        pytest.skip("the panel `first` has not run: docs/study.md is of the first edition")
    assert study_page.PAGE.read_text() == study_page.page(study.committed())


@pytest.mark.slow
def test_committed_runs_are_of_one_digest_and_its_plan() -> None:
    committed = study.committed()
    runs_of = {panel: committed.read(panel) for panel in ("tuning", *study.PANELS)}

    for panel, runs in runs_of.items():
        assert len({finished_run.reference or finished_run.source for finished_run in runs}) <= 1, panel
        keys = [(finished_run.run.arm, finished_run.run.seed) for finished_run in runs]
        assert len(set(keys)) == len(keys), panel
        for finished_run in runs:
            assert finished_run.run.problems == 2048 and (finished_run.run.is_done), (panel, finished_run.run.arm)
        if panel != "tuning" and runs:
            planned = committed.reported_runs(panel)
            assert set(keys) <= {(run.arm, run.seed) for run in planned}
            replace(committed, reference=runs[0].reference).check(panel, planned)


# The plan


def test_the_plan_says_its_core_hours_and_what_is_cut(tmp_path: Path) -> None:
    text, hours = empty_study(tmp_path).plan(study.PANELS)
    assert 14.0 < hours <= 30.0
    assert f"{hours:.1f} core-hours in all" in text and "Cut:" in text
    rows = [line.split()[0] for line in text.splitlines() if re.search(r" \d\.\d\d$", line)]
    assert list(dict.fromkeys(rows)) == list(study.PANELS)


def test_every_cell_is_an_arm_with_five_seeds_or_a_reason() -> None:
    arms = load_recipe(str(study.RECIPE))["arms"]
    cells = [(panel, cell) for panel, cells in study.PANELS.items() for cell in cells]
    assert {cell.arm for _, cell in cells} == set(arms)

    few = {panel for panel, cell in cells if len(cell.seeds) < 5 and not cell.arm.endswith("drafted")}
    assert few == {"ablation"} and all(len(cell.seeds) == 3 for panel, cell in cells if panel == "ablation")
    assert study.TUNING_SEED not in study.SEEDS


def test_an_estimate_counts_who_writes_and_who_learns(tmp_path: Path) -> None:
    def seconds(arm: str) -> float:
        pair = "alone" if arm == "on_policy" or arm.startswith("stale") else "close"
        cell = study.Cell(pair=pair, arm=arm)
        return study.seconds(empty_study(tmp_path).config(cell, 1.0, 101, is_tuning=False))

    assert seconds("on_policy") < seconds("annealed_expected") < seconds("expected") < seconds("mixed_half")
    assert seconds("stale_64_clip") < seconds("stale_128_clip")
    assert seconds("mixed_half") - seconds("expected") == pytest.approx(80 * study.GENERATE["policy"])


@pytest.mark.parametrize(("name", "times"), [("close", 5), ("far", 5), ("gap", 12)])
def test_a_token_of_a_rollout_model_costs_so_many_times_less(name: str, times: int) -> None:

    policy, small = (forward_cost(make_meta_model(STUDY_MODELS[model])).per_token for model in ("policy", name))
    assert policy >= times * small


# Runs that nobody trained


def finished(edition: "study.Study", cell: "study.Cell", seed: int, *, factor: float | None = None) -> "study.Finished":
    """A run whose accuracies and costs depend on its name, tuning where a factor is given."""
    config = edition.config(cell, factor or 1.0, seed, is_tuning=factor is not None)
    share = 0.2 if cell.pair != "alone" else 1.0
    end = 0.7 + 0.01 * (sum(map(ord, cell.name)) % 10) + 0.001 * (seed % 7)
    points = tuple(
        EvaluationPoint(
            iteration=iteration,
            sequences=256.0 * iteration,
            tokens=2000.0 * iteration,
            flops=1e9 * share * iteration,
            training_flops=3e9 * iteration,
            seconds=float(iteration),
            cpu_seconds=float(iteration),
            policy_accuracy=0.4 + (end - 0.4) * iteration / config.iterations,
            rollout_model_accuracy=None if cell.pair == "alone" else 0.3,
            acceptance=0.9,
            kl=0.1,
        )
        for iteration in range(0, config.iterations + 1, config.iterations // 2)
    )
    run = RunSummary(
        arm=cell.name if factor is None else study.tuning_name(cell, factor),
        seed=seed,
        points=points,
        iterations=config.iterations,
        problems=2048,
        collapse=None,
        settings=settings_of(config),
        environment={"python": "3", "torch": "2", "transformers": "5"},
    )

    return study.Finished(source=edition.source, run=run, draft_acceptance=0.88 if cell.arm == "drafted" else None)


def grid(finished_run: "study.Finished", cell: "study.Cell") -> list["study.Finished"]:
    """The same run at every factor of the tuning."""
    return [
        replace(finished_run, run=replace(finished_run.run, arm=study.tuning_name(cell, factor)))
        for factor in study.FACTORS
    ]


def write(edition: "study.Study", name: str, runs: Sequence["study.Finished"]) -> None:
    """Write the results of a panel."""
    edition.results.mkdir(exist_ok=True)
    (edition.results / f"{name}.jsonl").write_text("".join(f"{run.to_json()}\n" for run in runs))


def fill(edition: "study.Study", panel: str) -> None:
    """Finish a panel, and the tuning of its cells besides what is there."""
    tuned = dict.fromkeys(cell.tuned for cell in edition.cells(panel))
    known = {run.run.arm for run in edition.read("tuning")}
    new = [renamed for cell in tuned for renamed in grid(finished(edition, cell, 0, factor=1.0), cell)]
    write(edition, "tuning", [*edition.read("tuning"), *(run for run in new if run.run.arm not in known)])

    runs = []
    for cell in edition.cells(panel):
        first = finished(edition, cell, cell.seeds[0])
        for seed in cell.seeds:
            moved = replace(
                first.run,
                seed=seed,
                settings={**first.run.settings, "seed": seed},
                points=tuple(
                    replace(point, policy_accuracy=point.policy_accuracy + 0.001 * (seed % 7))
                    for point in first.run.points
                ),
            )
            runs.append(replace(first, run=moved))
    write(edition, panel, runs)


def last(finished_run: "study.Finished") -> float:
    """Return the accuracy at the end."""
    return finished_run.run.last.policy_accuracy


def ending(finished_run: "study.Finished", accuracy: float) -> "study.Finished":
    """Change the accuracy at the end."""
    points = (*finished_run.run.points[:-1], replace(finished_run.run.last, policy_accuracy=accuracy))
    return replace(finished_run, run=replace(finished_run.run, points=points))


def spending(finished_run: "study.Finished", times: float) -> "study.Finished":
    """Change the FLOPs of rollouts, at every evaluation."""
    points = tuple(replace(point, flops=times * point.flops) for point in finished_run.run.points)
    return replace(finished_run, run=replace(finished_run.run, points=points))


@pytest.fixture(scope="module")
def whole_study(tmp_path_factory: pytest.TempPathFactory) -> "study.Study":
    """A study whose every panel is finished."""
    edition = empty_study(tmp_path_factory.mktemp("study"))
    for panel in study.PANELS:
        fill(edition, panel)
    return edition


def test_the_page_needs_the_first_panel(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="needs the whole panel `first`"):
        study_page.page(empty_study(tmp_path))


def test_a_whole_study_has_ten_findings_and_every_panel(whole_study: "study.Study") -> None:
    text = study_page.page(whole_study)
    assert re.findall(r"^(\d+)\. \*\*", text, re.MULTILINE) == [str(index) for index in range(1, 11)]

    text = text.replace(study_page.predicted_table(whole_study), "")  # of no panel
    assert "not run yet" not in text.lower()
    for panel in study.PANELS.keys() - {"ablation", "long", "hard"}:  # in a sentence, or not on the page yet
        for cell in whole_study.cells(panel):
            arm = cell.arm.removeprefix("stale_64_").removeprefix("stale_128_")
            assert f"| `{arm}` |" in text, cell.name


def test_a_first_panel_says_which_others_have_not_run(whole_study: "study.Study", tmp_path: Path) -> None:
    edition = empty_study(tmp_path)
    for name in ("tuning", "first"):
        write(edition, name, whole_study.read(name))

    text = study_page.page(edition)
    assert "the largest difference to `obrs` is not run yet" in text and "\nNot run yet\n" in text
    assert not edition.is_complete("gap") and edition.is_complete("first")


def test_the_long_run_takes_the_best_arm_at_half_cost(whole_study: "study.Study") -> None:
    first = whole_study.read("first")
    none, best = whole_study.cells("long")
    arms = study_page.Arms(first, "far")

    accuracies = {arm: arms.spread(arm).mean for arm in study.FIRST}
    assert none.arm == "none" and accuracies[best.arm] == max(accuracies.values())

    annealed = study.long_cell("annealed_linear")
    share = whole_study.config(annealed, 1.0, 101, is_tuning=False).rollout_model.share
    assert (share.hold, share.until) == (125, 250)


def test_costs_count_until_the_accuracy_is_reached(whole_study: "study.Study") -> None:
    """On a line between evaluations at 0, 40 and 80; the arm spends 3.2 FLOPs where its base spends 4."""
    arms = study_page.Arms(whole_study.read("first"), "close")
    base = arms.runs["on_policy"]
    arms.runs["tis"] = {
        seed: ending(finished_run, last(base[seed]) + 0.02) for seed, finished_run in arms.runs["tis"].items()
    }
    tis, alone = arms.runs["tis"][101].run, base[101].run
    middle, end = tis.points[1].policy_accuracy, last(arms.runs["tis"][101])
    share_of_run = 0.5 + 0.5 * (last(base[101]) - middle) / (end - middle)

    assert alone.points[0].policy_accuracy < middle < alone.last.policy_accuracy
    assert arms.reaching_cost("tis", "all", 0.0)[0] == pytest.approx(0.8 * share_of_run)
    assert arms.reaching_cost("tis", "rollout", 0.0)[0] == pytest.approx(0.2 * share_of_run)

    arms.runs["tis"] = {
        seed: ending(finished_run, last(base[seed]) - 0.02) for seed, finished_run in arms.runs["tis"].items()
    }
    assert arms.reaching_cost("tis", "all", 0.01) == () and len(arms.reaching_cost("tis", "all", 0.03)) == 5
    assert study_page.ratio_text((0.5, 2.0)) == "1.00" and study_page.ratio_text(()) == "-"
    assert study_page.ratio_text((0.5, 1.0, 2.0)) == "1.00 [0.18, 5.59]"


@pytest.mark.slow
def test_a_page_draws_one_picture(whole_study: "study.Study", tmp_path: Path) -> None:
    runs = [*whole_study.read("first"), *whole_study.read("gap")]
    study_page.draw(tmp_path / "study.png", [study_page.Arms(runs, name) for name in study_page.PAIRS])
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")


def test_a_difference_is_paired_and_has_students_interval(whole_study: "study.Study") -> None:
    arms = study_page.Arms(whole_study.read("first"), "close")
    jumps = (0.01, 0.03, 0.02, 0.05, 0.04)
    base = sorted(arms.runs["none"].items())
    arms.runs["tis"] = {
        seed: ending(finished_run, last(finished_run) + jump)
        for (seed, finished_run), jump in zip(base, jumps, strict=True)
    }

    gap = arms.difference("tis", "none")
    half = 2.7764451 * stdev(jumps) / math.sqrt(5)  # of the interval: t of four degrees of freedom

    interval = study.interval_of(gap)
    assert gap.mean == pytest.approx(mean(jumps)) and interval.high - gap.mean == pytest.approx(half)
    assert arms["tis-none"] == f"+3.0 [{100 * (0.03 - half):+.1f}, {100 * (0.03 + half):+.1f}]"
    assert interval.low == pytest.approx(0.03 - half, abs=1e-6)
    assert arms["nobody-none"] == "not run yet"
    assert study.interval_of(Sample((0.3,))) == Interval(0.3, low=None, high=None)


def test_the_target_needs_the_interval_and_the_cost(whole_study: "study.Study") -> None:
    arms = study_page.Arms(whole_study.read("first"), "close")
    base = arms.runs["on_policy"]
    for arm in study.FIRST:
        arms.runs[arm] = {
            seed: ending(finished_run, last(base[seed]) - 0.05) for seed, finished_run in arms.runs[arm].items()
        }

    assert study_page.target_text([arms]) == "close: none"

    near = {seed: ending(finished_run, last(base[seed]) - 0.01) for seed, finished_run in arms.runs["tis"].items()}
    arms.runs["tis"] = near
    # as near, at 60 % of the FLOPs
    arms.runs["obrs"] = {seed: spending(finished_run, 3.0) for seed, finished_run in near.items()}

    assert study_page.target_text([arms]) == "close: `tis`"
    assert study_page.target_text([arms], -0.01) == "close: none"


def test_equal_cost_lies_between_two_evaluations(whole_study: "study.Study") -> None:
    """The arm ends at a fifth of the FLOPs, and its base, evaluated at 0, 40 and 80, is on the way to its 40."""
    arms = study_page.Arms(whole_study.read("first"), "close")
    base = arms.runs["on_policy"][101].run.points
    at = 0.4 + (base[1].policy_accuracy - base[0].policy_accuracy) * 0.2 / 0.5 + 0.001 * (101 % 7)
    expected = last(arms.runs["none"][101]) - at

    assert arms.at_equal_cost("none").values[0] == pytest.approx(expected)
    assert arms.share("none", "rollout") == pytest.approx(0.2)
    assert arms.share("none", "all") == pytest.approx(3.2 / 4.0)


def test_time_by_the_cost_model_follows_the_schedule(whole_study: "study.Study") -> None:
    arms = study_page.Arms(whole_study.read("first"), "close")
    clock = study_page._clock()
    small, alone = clock.at(1.0).iterations, study_page.hours_alone(clock).iterations

    assert arms.share("none", "time") == pytest.approx(small / alone)
    assert arms.share("annealed_none", "time") == pytest.approx(0.75 * small / alone + 0.25)
    assert arms.share("drafted", "time") == pytest.approx(study_page.hours_drafted(clock, 0.88).iterations / alone)

    costs = {**clock.costs, "rollout_model": replace(clock.costs["rollout_model"], trained=0)}
    frozen = replace(clock, costs=costs)  # it falls along a line to the policy alone at iteration 60
    hours = [frozen.at(1.0 - iteration / 60).iterations for iteration in range(1, 60)]

    assert arms.share("frozen_annealed", "time") == pytest.approx((sum(hours) + 21 * alone) / (80 * alone))

    shares = [arms.share(arm, "time") for arm in ("none", "annealed_none", "annealed_half")]
    assert all(before < after for before, after in pairwise(shares))


# Tuning, and what is refused


def test_tuning_counts_a_collapse_as_0(whole_study: "study.Study") -> None:
    cell = study.FAR_OBRS
    tuning = {factor: finished(whole_study, cell, 0, factor=factor) for factor in study.FACTORS}
    tuning[2.0] = ending(tuning[2.0], 0.99)

    assert study.best_factor([*tuning.values()], cell) == 2.0

    fallen = Collapse(iteration=40, accuracy=0.1, best=0.9, first_sign="", why="fell")
    tuning[2.0] = replace(tuning[2.0], run=replace(tuning[2.0].run, collapse=fallen))
    assert study.best_factor([*tuning.values()], cell) == 0.5  # equal scores: the smaller


def test_a_reported_run_has_the_tuned_rate_or_twice_it(whole_study: "study.Study") -> None:
    tuned, doubled = study.PANELS["stale"][:2]
    best = finished(whole_study, tuned, 0, factor=0.5)
    rates = [tuning for tuning in whole_study.read("tuning") if tuning.run.arm != best.run.arm]
    other = replace(whole_study, results=whole_study.results.parent / "rates")
    write(other, "tuning", [*rates, ending(best, 0.99)])

    runs = {(run.arm, run.seed): run.config for run in other.reported_runs("stale")}
    assert runs[tuned.name, 101].policy.optimizer.learning_rate == pytest.approx(0.5e-4)
    assert runs[doubled.name, 101].policy.optimizer.learning_rate == pytest.approx(1e-4)


def test_runs_of_other_settings_are_refused(whole_study: "study.Study") -> None:
    planned = whole_study.reported_runs("gap")
    rates = {run.arm: run.config.policy.optimizer.learning_rate for run in planned}
    assert set(rates.values()) == {0.5e-4}  # equal scores, and the summaries were made at 1e-4

    with pytest.raises(SystemExit, match="with other settings"):
        whole_study.check("gap", planned)


def test_runs_are_not_added_to_those_of_other_code(tmp_path: Path, monkeypatch) -> None:
    cells = [study.Cell(pair="close", arm="tis", seeds=(101, 102))]
    monkeypatch.setitem(study.PANELS, "gap", cells)
    edition = replace(empty_study(tmp_path), reference="here")
    fill(edition, "gap")

    lines = [
        replace(line, run=replace(line.run, settings=settings_of(run.config)), reference="there")
        for line, run in zip(edition.read("gap"), edition.reported_runs("gap"), strict=True)
    ]
    write(edition, "gap", lines)
    edition.check("gap", edition.reported_runs("gap"))  # whole: nothing would be added

    write(edition, "gap", lines[:1])
    monkeypatch.setattr(reference, "digest_of_commit", {SOURCE: "there"}.__getitem__)
    with pytest.raises(SystemExit, match=rf"src/ at {SOURCE}.*git worktree add"):
        edition.check("gap", edition.reported_runs("gap"))

    monkeypatch.setattr(reference, "digest_of_commit", {SOURCE: "here"}.__getitem__)
    edition.check("gap", edition.reported_runs("gap"))  # that commit computes the same on this machine


@pytest.mark.slow
def test_a_digest_is_of_what_a_short_run_computes(tmp_path: Path) -> None:
    (tmp_path / "src").symlink_to(ROOT / "src")
    assert reference.digest_of(tmp_path) == reference.digest_of(ROOT) and len(reference.digest_of(ROOT)) == 16

    changed = tmp_path / "changed"
    shutil.copytree(ROOT / "src", changed / "src", ignore=shutil.ignore_patterns("__pycache__"))
    path = changed / "src" / "jackpot" / "core" / "prng.py"
    path.write_text(path.read_text().replace("0x9E3779B97F4A7C15)", "0x9E3779B97F4A7C17)"))

    assert reference.digest_of(changed) != reference.digest_of(ROOT)


@pytest.mark.slow
def test_a_tiny_study_runs_is_written_down_and_is_not_run_again(tmp_path: Path, monkeypatch) -> None:
    alone, close = (
        study.Cell(pair=pair, arm=arm, seeds=(101,)) for pair, arm in (("alone", "on_policy"), ("close", "tis"))
    )
    drafted = study.Cell(pair="close", arm="drafted", rate_of=alone, seeds=(101,))
    monkeypatch.setitem(study.PANELS, "first", [alone, close, drafted])
    monkeypatch.setattr(study, "FACTORS", (1.0,))

    models = tmp_path / "runs" / "models"
    models.mkdir(parents=True)
    for name, starter in {"policy": "starter:policy", "close": "starter:rollout_model"}.items():
        (models / name).symlink_to(resolve_path(starter))

    small = (
        "iterations=2",
        "batch.prompts=2",
        "batch.group_size=4",
        "batch.mini_batch_size=4",
        "evaluation.problems=8",
    )
    edition = replace(empty_study(tmp_path), overrides=small)
    edition.run("tuning", edition.tuning_runs("first"), 2)
    edition.run("first", edition.reported_runs("first"), 2)
    assert edition.is_complete("first") and len(edition.read("tuning")) == 2

    by_arm = {line.run.arm: line for line in edition.read("first")}
    assert by_arm["close/drafted"].draft_acceptance > 0.0 and by_arm["close/drafted"].run.last.iteration == 2
    assert by_arm["close/tis"].run.last.flops < by_arm["alone/on_policy"].run.last.flops
    assert not list(edition.runs.glob("*/first/*/checkpoints")) and list(edition.runs.glob("*/first/*/rollouts/*"))

    before = (edition.results / "first.jsonl").read_text()
    edition.run("first", edition.reported_runs("first"), 2)
    assert (edition.results / "first.jsonl").read_text() == before

    (edition.results / "first.jsonl").write_text(before.splitlines(keepends=True)[0])
    edition.run("first", edition.reported_runs("first"), 2)
    assert edition.is_complete("first")
    assert all(json.loads(line)["source"] == SOURCE for line in before.splitlines())
