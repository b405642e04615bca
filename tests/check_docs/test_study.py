"""docs/study.md: what is written there is what the committed runs say, and they are the runs that it says they are."""

import importlib.util
import sys
from collections import Counter
from dataclasses import dataclass
from types import ModuleType

import pytest

from helpers.paths import ROOT
from jackpot.analysis.compare.summary import RunSummary


@dataclass(frozen=True)
class Study:
    runs: ModuleType  # benchmarks/study.py
    page: ModuleType  # benchmarks/study_page.py
    tuning: list[RunSummary]
    reported: list[RunSummary]


@pytest.fixture(scope="module")
def study() -> Study:
    runs, page = script("study"), script("study_page")
    return Study(runs, page, runs.read("tuning"), runs.read("reported"))


def script(name: str) -> ModuleType:
    """A file of benchmarks/, which is no package, by the name under which others there import it."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rate(run: RunSummary) -> float:
    return run.settings["policy"]["optimizer"]["learning_rate"]


def test_the_page_is_what_its_generator_writes(study: Study) -> None:
    assert study.page.PAGE.read_text() == study.page.page(study.tuning, study.reported)


def test_every_arm_of_every_pair_was_tuned_alike(study: Study) -> None:
    counts = Counter((run.arm, run.seed) for run in study.tuning)
    grid = {
        (study.runs.name_of(cell, factor), seed)
        for cell in study.runs.cells()
        for factor in study.runs.FACTORS
        for seed in study.runs.TUNING_SEEDS
    }
    assert counts.keys() == grid and set(counts.values()) == {1}


def test_every_arm_is_reported_on_the_same_seeds_and_was_tuned_on_none_of_them(study: Study) -> None:
    seeds, cells = study.runs.SEEDS, study.runs.cells()
    assert len(seeds) >= 5 and not set(seeds) & {run.seed for run in study.tuning}
    counts = Counter((run.arm, run.seed) for run in study.reported)
    assert counts.keys() == {(study.runs.name_of(cell), seed) for cell in cells for seed in seeds}
    assert set(counts.values()) == {1}


def test_what_is_reported_has_the_learning_rate_that_did_best_in_tuning(study: Study) -> None:
    """Scored here once more: mean of the last three evaluations, 0 where the run collapsed."""
    for name in map(study.runs.name_of, study.runs.cells()):
        scores: dict[float, list[float]] = {}
        for run in study.tuning:
            if run.arm.rpartition(" ")[0] == name:
                ends = [point.policy_accuracy for point in run.points[-3:]]
                scores.setdefault(rate(run), []).append(0.0 if run.collapse else sum(ends) / 3)
        best = max(scores, key=lambda one: sum(scores[one]))
        assert len(scores) == 3, name
        assert {rate(run) for run in study.reported if run.arm == name} == {best}, name


def test_runs_went_to_the_end_or_collapsed_at_one_budget(study: Study) -> None:
    for run in [*study.tuning, *study.reported]:
        assert (run.problems == 512 and run.last.iteration == 80) or run.collapse, (run.arm, run.seed)
        assert run.last.sequences == 256 * run.last.iteration, (run.arm, run.seed)


def test_the_rollout_models_are_at_least_five_times_smaller_than_the_policy(study: Study) -> None:
    sizes = {name: study.page.parameters(spec) for name, spec in study.page.STUDY_MODELS.items()}
    assert all(sizes["policy"] > 5 * sizes[name] for name in study.runs.PAIRS)
