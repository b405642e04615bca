"""The tutorial: what it computes, and what it says of the models before training."""

import doctest
import re

import pytest

from helpers.paths import ROOT
from jackpot.analysis.simulate.candidates import PROMPTS, simulate_candidates
from jackpot.config.recipes import resolve

TUTORIAL = ROOT / "docs" / "tutorial.md"


def test_the_example_computes_what_it_shows() -> None:
    examples = doctest.testfile(str(TUTORIAL), module_relative=False)
    assert examples.attempted >= 8 and examples.failed == 0


@pytest.mark.slow
def test_the_numbers_before_training_are_those_of_the_command() -> None:
    """Within 2 %: other machines and versions round differently, and then sample differently."""
    (candidate,) = simulate_candidates(resolve("quickstart", None, []), [], PROMPTS, 0)

    rows = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", TUTORIAL.read_text(), re.M))
    stated = {
        name: [float(text.replace(",", "")) for text in re.findall(r"[\d.,]*\d", row)] for name, row in rows.items()
    }
    expected = {
        "parameters, rollout model and policy": [candidate.parameters, candidate.policy_parameters],
        "right answers, rollout model and policy": [100 * candidate.accuracy, 100 * candidate.policy_accuracy],
        "KL(policy ‖ rollout model)": [candidate.kl_policy_rollout],
    }

    for name, numbers in expected.items():
        assert stated[name] == pytest.approx(numbers, rel=0.02), name

    (effective,) = (numbers for name, numbers in stated.items() if name.startswith("effective share of the responses"))
    assert effective == pytest.approx([100 * candidate.sequence_ess], rel=0.02)
    assert f"{candidate.states:,} tokens" in TUTORIAL.read_text()
