"""Breaks every formula on purpose, one operator at a time: a test must notice.

`FORMULAS` names functions and the test files of which at least one test has to fail. A mutant that computes the same
stands in `EQUIVALENT` with the reason.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jackpot
from helpers.paths import TESTS
from mutants.operators import mutants

pytestmark = pytest.mark.mutants
PACKAGE = Path(jackpot.__file__).parent
CORRECTIONS = tuple(f"objectives/test_{name}.py" for name in ("corrections", "ratio_corrections", "attribution"))
FORMULAS = {  # "file::function": test files
    **dict.fromkeys(
        [f"objectives/obrs.py::{name}" for name in ("acceptance", "accept", "log_kept_mass", "exact_z", "weight")],
        ("objectives/test_obrs.py", *CORRECTIONS),
    ),
    "objectives/obrs.py::topk_z": ("objectives/test_topk_z.py",),
    "objectives/obrs.py::kappa": CORRECTIONS,
    "objectives/losses.py::clipped_surrogate": ("objectives/test_losses.py",),
    "objectives/losses.py::clipped_value_error": ("objectives/test_losses.py", "training/test_critic.py"),
    "objectives/losses.py::_seq_mean_token_mean": ("objectives/test_losses.py",),
    "objectives/losses.py::_seq_mean_token_sum_norm": ("objectives/test_losses.py",),
    "objectives/losses.py::k2": ("objectives/test_regularizers.py",),
    "objectives/losses.py::k3": ("objectives/test_regularizers.py",),
    **dict.fromkeys(
        [f"objectives/advantages.py::{name}" for name in ("grpo", "dr_grpo", "rloo", "gae")],
        ("objectives/test_advantages.py",),
    ),
    **dict.fromkeys(
        [
            f"objectives/corrections/ratios.py::{name}"
            for name in ("TruncatedImportanceSampling.apply", "_ratio_within", "SequenceMask.apply")
        ],
        CORRECTIONS,
    ),
    **dict.fromkeys(
        [f"objectives/corrections/budgeted.py::{name}" for name in ("_capped", "ZWeighted._kappa_value")], CORRECTIONS
    ),
    "objectives/joint.py::joint_loss": ("objectives/test_joint.py", "objectives/test_regularizers.py"),
    "objectives/joint.py::_rollout_model_loss": ("objectives/test_joint.py",),
}
EQUIVALENT = {  # the name of a mutant: why it computes the same
    "topk_z: (1.0 / scale).clamp(max=1.0) -> (1.0 / scale).clamp(min=1.0)": "it mends rounding alone",
    "clipped_value_error: (held > free).detach() -> held > free": "a comparison carries no gradient",
}

CASES = [
    (place, number, mutant.name)
    for place in FORMULAS
    for number, mutant in enumerate(mutants((PACKAGE / place.split("::")[0]).read_text(), place.split("::")[1]))
]


@pytest.fixture(scope="module")
def results() -> list[dict]:
    """What came of every mutant, and last, on the code as it is, of all tests that failed."""
    jobs = [
        {"file": str(PACKAGE / file), "function": function, "number": number, "tests": FORMULAS[place]}
        for place, number, _ in CASES
        for file, function in [place.split("::")]
    ]
    paths = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    server = subprocess.run(
        [sys.executable, TESTS / "mutants" / "server.py"],
        input=json.dumps(jobs),
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert server.returncode == 0, server.stderr
    return json.loads(server.stdout)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{place}: {name}" for place, _, name in CASES])
def test_a_test_notices_the_mutant(number, results):
    assert results[number]["failed"] is not None, results[number]["text"]
    _, _, name = CASES[number]
    survives = results[number]["failed"] == ""
    assert survives == (name in EQUIVALENT), f"{name}: {'survives' if survives else 'is noticed and is in EQUIVALENT'}"


def test_what_noticed_a_mutant_passes_on_the_code_as_it_is(results):
    """Where the mutants ran, and as they ran; the tests' other cases `make test` runs as well."""
    assert results[-1]["failed"] == "", f"{results[-1]['failed']}\n{results[-1]['text']}"


def test_every_exception_is_a_mutant():
    assert EQUIVALENT.keys() <= {name for _, _, name in CASES}
