"""docs/study.md: what is written there is what the committed runs say, and they are the runs that it says they are."""

import importlib.util
import sys
from collections import Counter
from types import ModuleType

import pytest

from helpers.paths import ROOT
from jackpot.analysis.compare.summary import RunSummary


def script(name: str) -> ModuleType:
    """A file of benchmarks/, which is no package, by the name under which others there import it."""
    path = ROOT / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


study, study_page = script("study"), script("study_page")
TUNING, REPORTED = study.read("tuning"), study.read("reported")


def rate(run: RunSummary) -> float:
    return run.settings["policy"]["optimizer"]["learning_rate"]


def test_the_page_is_what_its_generator_writes() -> None:
    assert study_page.PAGE.read_text() == study_page.page(TUNING, REPORTED)


def test_every_arm_of_every_pair_was_tuned_alike() -> None:
    counts = Counter((run.arm, run.seed) for run in TUNING)
    grid = {
        (study.name_of(cell, factor), seed)
        for cell in study.cells()
        for factor in study.FACTORS
        for seed in study.TUNING_SEEDS
    }
    assert counts.keys() == grid and set(counts.values()) == {1}


def test_every_arm_is_reported_on_the_same_seeds_and_was_tuned_on_none_of_them() -> None:
    assert len(study.SEEDS) >= 5 and not set(study.SEEDS) & {run.seed for run in TUNING}
    counts = Counter((run.arm, run.seed) for run in REPORTED)
    assert counts.keys() == {(study.name_of(cell), seed) for cell in study.cells() for seed in study.SEEDS}
    assert set(counts.values()) == {1}


@pytest.mark.parametrize("cell", study.cells(), ids=study.name_of)
def test_what_is_reported_has_the_learning_rate_that_did_best_in_tuning(cell: tuple[str, str]) -> None:
    """Scored here once more: mean of the last three evaluations, 0 where the run collapsed."""
    scores = {}
    for run in TUNING:
        if run.arm.rpartition(" ")[0] == study.name_of(cell):
            ends = [point.policy_accuracy for point in run.points[-3:]]
            scores.setdefault(rate(run), []).append(0.0 if run.collapse else sum(ends) / 3)
    best = max(scores, key=lambda one: sum(scores[one]))
    assert len(scores) == 3
    assert {rate(run) for run in REPORTED if run.arm == study.name_of(cell)} == {best}


@pytest.mark.parametrize("cell", study.cells(), ids=study.name_of)
def test_runs_went_to_the_end_or_collapsed_at_one_budget(cell: tuple[str, str]) -> None:
    for run in [*TUNING, *REPORTED]:
        if run.arm.split(" ")[0] == study.name_of(cell):
            assert (run.problems == 512 and run.last.iteration == 80) or run.collapse
            assert run.last.sequences == 256 * run.last.iteration


def test_the_writers_are_at_least_five_times_smaller_than_the_policy() -> None:
    sizes = {name: study_page.parameters(spec) for name, spec in study_page.STUDY_STARTERS.items()}
    assert all(sizes["policy"] > 5 * sizes[name] for name in study.PAIRS)
