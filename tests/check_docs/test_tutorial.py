"""The tutorial: what it computes, and what it says of the models before training."""

import doctest
import re

import pytest

from helpers.paths import ROOT
from jackpot.analysis.simulate.candidates import PROMPTS, simulate_candidates
from jackpot.config.recipes import resolve

TUTORIAL = ROOT / "docs" / "tutorial.md"


def test_the_example_computes_what_it_shows() -> None:
    found = doctest.testfile(str(TUTORIAL), module_relative=False)
    assert found.attempted >= 8 and found.failed == 0


@pytest.mark.slow
def test_the_numbers_before_training_are_those_of_the_command() -> None:
    """Within 2 %: other machines and versions round differently, and then sample differently."""
    (one,) = simulate_candidates(resolve("quickstart", None, []), [], PROMPTS, 0)
    rows = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", TUTORIAL.read_text(), re.M))
    stated = {
        name: [float(text.replace(",", "")) for text in re.findall(r"[\d.,]*\d", row)] for name, row in rows.items()
    }
    expected = {
        "parameters, rollout model and policy": [one.parameters, one.policy_parameters],
        "right answers, rollout model and policy": [100 * one.accuracy, 100 * one.policy_accuracy],
        "KL(policy ‖ rollout model)": [one.kl_policy_rollout],
    }

    for name, numbers in expected.items():
        assert stated[name] == pytest.approx(numbers, rel=0.02), name

    (effective,) = (numbers for name, numbers in stated.items() if name.startswith("effective share of the responses"))
    assert effective == pytest.approx([100 * one.sequence_ess], rel=0.02)
    assert f"{one.states:,} tokens" in TUTORIAL.read_text()
