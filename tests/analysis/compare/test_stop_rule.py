"""A comparison stops a run that has collapsed, unless its plan says otherwise."""

from pathlib import Path

import pytest

from helpers.runs import small_config
from jackpot.analysis.compare.arms import ComparisonPlan, _why_to_stop
from jackpot.analysis.compare.process import ArmRun

FALLEN = [{"iteration": n, "eval/policy_accuracy": accuracy} for n, accuracy in enumerate((0.6, 0.0, 0.0))]


@pytest.mark.parametrize(("plan", "stops"), [(ComparisonPlan(), True), (ComparisonPlan(stop_collapsed=False), False)])
def test_a_collapsed_run_is_stopped_unless_told_otherwise(plan, stops) -> None:
    run = ArmRun(arm="a", seed=0, folder=Path("a"), log=Path("a.log"), config=small_config("evaluation.problems=64"))
    why = _why_to_stop(plan, run, FALLEN, [])
    assert (why is not None and why.startswith("collapsed: 0.0% right at iteration 1")) == stops
