"""Every formula broken on purpose, one at a time: the test named beside it must notice.

`mutations.txt` lists them. "@" names the file below src/jackpot and the test below tests/ that has to fail; "-" is the
exact source and "+" what becomes of it, line by line. A snippet that no longer stands in its file exactly once fails
here, so the list cannot outlive the code.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import jackpot

pytestmark = pytest.mark.mutants
HERE = Path(__file__).parent
PACKAGE = Path(jackpot.__file__).parent


class Mutation(NamedTuple):
    file: str
    test: str
    snippet: str
    broken: str


def read_mutations() -> list[Mutation]:
    mutations = []
    for block in (HERE / "mutations.txt").read_text().split("\n\n"):
        head, *lines = block.strip("\n").split("\n")
        assert head.startswith("@ ") and {line[:2] for line in lines} == {"- ", "+ "}, block
        parts = ["\n".join(line[2:] for line in lines if line.startswith(sign)) for sign in "-+"]
        mutations.append(Mutation(*head[2:].split(" ", 1), *parts))
    return mutations


MUTATIONS = read_mutations()
IDS = [f"{one.file}: {one.broken.splitlines()[0].strip()[:70]}" for one in MUTATIONS]
KERNELS = ("linear_head", "forward", "backward", "tiles", "autograd", "topk")
FORMULAS = tuple(f"objectives/kernels/{name}.py" for name in KERNELS)
FORMULAS += tuple(f"objectives/corrections/{name}.py" for name in ("base", "budgeted", "ratios"))
FORMULAS += tuple(f"objectives/{name}.py" for name in ("obrs", "advantages", "joint", "losses", "metrics"))


@pytest.fixture(scope="module")
def results() -> list[dict]:
    """What came of every mutation, and last, on the code as it is, of all the items that failed."""
    jobs = [one._asdict() | {"file": str(PACKAGE / one.file)} for one in MUTATIONS]
    server = subprocess.run(
        [sys.executable, HERE / "server.py"], input=json.dumps(jobs), capture_output=True, text=True
    )
    assert server.returncode == 0, server.stderr
    return json.loads(server.stdout)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=IDS)
def test_the_snippet_stands_in_the_code_exactly_once(mutation):
    assert (PACKAGE / mutation.file).read_text().count(mutation.snippet) == 1
    assert mutation.snippet != mutation.broken


@pytest.mark.parametrize("number", range(len(MUTATIONS)), ids=IDS)
def test_the_named_test_notices_the_mutation(number, results):
    assert results[number]["failed"] is not None, results[number]["text"]
    assert results[number]["failed"] != "", f"{MUTATIONS[number].test} still passes"


def test_what_noticed_a_mutation_passes_on_the_code_as_it_is(results):
    """Where the mutations ran, and as they ran; the tests' other cases `make test` runs as well."""
    assert results[-1]["failed"] == "", f"{results[-1]['failed']}\n{results[-1]['text']}"


def test_every_file_with_formulas_is_on_the_list():
    trained = {f"training/{name}.py" for name in ("optimizer", "joint_learner", "batching")}
    assert {one.file for one in MUTATIONS} >= {*FORMULAS, *trained}
