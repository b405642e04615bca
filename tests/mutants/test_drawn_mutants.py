"""Breaks code of five floors where a hash says, one statement or operator at a time: a test of its room must notice.

Of each floor the functions with the smallest hashes are broken, each in one place, so that a new function takes the
place of one at most. A mutant is a copy of the package with one changed file, as many tests start processes of their
own. JACKPOT_MUTANTS names a file that keeps what was found, so that the next call goes on.
"""

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import pytest

import jackpot
from helpers.paths import ROOT, TESTS
from mutants.operators import Mutant, count, functions, mutant

pytestmark = pytest.mark.mutants
PACKAGE = Path(jackpot.__file__).parent
SEED = 40  # of the hashes
MUTANTS_PER_FLOOR = 20
SECONDS = 500  # for the tests of a mutant; it may loop for ever
FLOORS = {  # folders of the package, without folders that are a floor of their own
    "launch": "launch",
    "rollout": "rollout",
    "run folder": "training/run_folder",
    "rewards": "rollout/rewards",
    "analysis": "analysis",
}
ELSEWHERE = (  # run only where vLLM, SGLang, reasoning-gym, W&B or a cluster are, and so do their tests
    "rollout/tasks/reasoning_gym.py",
    "rollout/tasks/gym_scorer.py",
    "rollout/engines/vllm/",
    "rollout/engines/sglang/",
    "launch/ray.py",
    "training/run_folder/trackers.py",
)
RUN_FOLDER = "training/run_folder"
ENGINES, VERIFIER = "rollout/engines", "rollout/rewards/verifier"
SERVERS = (
    f"{ENGINES}/vllm/test_client.py",
    f"{ENGINES}/vllm/test_server_engine.py",
    f"{ENGINES}/vllm/test_protocol.py",
)
POOLS = (f"{ENGINES}/test_pool.py", f"{ENGINES}/test_sleeping_pool.py")
DECODING = (f"{ENGINES}/transformers/test_decoding.py", f"{ENGINES}/transformers/test_engine.py")
REPLAY = tuple(f"analysis/replay/test_{name}.py" for name in ("formats", "replay", "mixups", "export", "gradient"))
ROOMS = {  # the longest start of a file's name: tests, the likeliest first
    "launch/": (
        "launch/test_lengths.py",
        "launch/test_local.py",
        "training/test_head_rows.py",
        f"{RUN_FOLDER}/test_starts.py",
    ),
    "launch/checks.py": (
        "launch/test_lengths.py",
        "launch/test_checks.py",
        "analysis/plan/test_start.py",
        "training/test_head_rows.py",
    ),
    "launch/engine_processes.py": ("launch/test_engine_processes.py",),
    "launch/engines.py": (
        *("launch/test_local.py", "launch/test_engine_processes.py", f"{ENGINES}/test_sleep_and_events.py"),
        *("training/test_head_rows.py", "training/test_drafted_runs.py"),
    ),
    "launch/head_kernel.py": ("launch/test_head_kernel.py", "objectives/kernels/test_reader.py"),
    "launch/library.py": ("launch/test_library.py",),
    "launch/ranks.py": ("launch/test_ranks.py",),
    "launch/slurm.py": ("launch/test_slurm.py",),
    "launch/start.py": tuple(f"{RUN_FOLDER}/test_{name}.py" for name in ("starts", "resume", "crashes")),
    "rollout/evaluate.py": ("rollout/test_evaluate.py", "training/test_evaluation_in_training.py"),
    "rollout/generation.py": ("rollout/test_generation.py", "rollout/test_sampler.py"),
    "rollout/multi_turn.py": ("rollout/test_multi_turn.py", "rollout/test_stream.py"),
    "rollout/pass_at_k.py": ("rollout/test_pass_at_k.py",),
    "rollout/sampler.py": (
        *("rollout/test_sampler.py", "rollout/test_stream.py", "rollout/test_share.py", "rollout/test_ahead.py"),
        "rollout/test_generation.py",
    ),
    f"{ENGINES}/": (*POOLS, *DECODING, f"{ENGINES}/test_threaded.py", f"{ENGINES}/test_sleep_and_events.py"),
    f"{ENGINES}/checks.py": (*DECODING, *POOLS, *SERVERS[:2]),
    f"{ENGINES}/process.py": ("launch/test_engine_processes.py", *POOLS),
    f"{ENGINES}/pool.py": (*POOLS, *SERVERS[:2]),
    f"{ENGINES}/servers/": SERVERS,
    f"{ENGINES}/transformers/": (*DECODING, f"{ENGINES}/test_sleep_and_events.py", f"{ENGINES}/test_quantized.py"),
    f"{ENGINES}/transformers/drafting.py": (f"{ENGINES}/transformers/test_drafting.py",),
    f"{ENGINES}/transformers/static_decoding.py": (f"{ENGINES}/transformers/test_static_decoding.py",),
    "rollout/rewards/": ("rollout/rewards/test_rewards.py", "rollout/test_evaluate.py"),
    f"{VERIFIER}/": tuple(
        f"{VERIFIER}/test_{name}.py" for name in ("numbers", "compare", "choices", "extract", "twins", "expressions")
    ),
    f"{VERIFIER}/expressions.py": (f"{VERIFIER}/test_expressions.py", "rollout/rewards/test_rewards.py"),
    "rollout/tasks/": (
        *("rollout/tasks/test_data.py", "rollout/tasks/test_rows.py", "rollout/tasks/test_math.py"),
        *("rollout/tasks/test_mix.py", "rollout/tasks/test_problems.py", "rollout/tasks/test_environment.py"),
        *("config/test_config.py", "examples/test_examples.py"),
    ),
    "rollout/tasks/arithmetic.py": tuple(
        f"rollout/tasks/test_{name}.py" for name in ("arithmetic", "sums", "tool_arithmetic")
    ),
    "rollout/tasks/environment.py": ("rollout/tasks/test_environment.py",),
    "rollout/tasks/registry.py": (
        "rollout/test_evaluate.py",
        "rollout/tasks/test_mix.py",
        "rollout/tasks/test_math.py",
    ),
    "rollout/tasks/synthetic.py": ("rollout/tasks/test_synthetic.py", "rollout/tasks/test_sums.py"),
    "rollout/tasks/templates.py": ("rollout/tasks/test_templates.py", "rollout/tasks/test_math.py"),
    f"{RUN_FOLDER}/": tuple(
        f"{RUN_FOLDER}/test_{name}.py"
        for name in ("checkpoint", "folder", "wandb", "starts", "crashes", "full_disk", "resume")
    ),
    f"{RUN_FOLDER}/saved_rollouts.py": ("training/test_own_rewards.py", "ui/report/test_inspector.py"),
    "analysis/advice/": ("analysis/advice/test_rule.py", "analysis/simulate/test_candidates.py"),
    "analysis/compare/": tuple(
        f"analysis/compare/test_{name}.py" for name in ("summary", "scheduler", "stop_rule", "comparison")
    ),
    "analysis/diagnose/": tuple(f"analysis/diagnose/test_{name}.py" for name in ("diagnose", "collapse", "causes")),
    "analysis/evaluate/": ("analysis/evaluate/test_evaluation_folder.py", "rollout/test_evaluate.py"),
    "analysis/evaluate/sample.py": (f"{RUN_FOLDER}/test_crashes.py", "ui/test_cli.py", "system/test_cli.py"),
    "analysis/mismatch/": ("analysis/mismatch/test_measure.py", "analysis/mismatch/test_sides.py"),
    "analysis/plan/": (
        *(f"analysis/plan/test_{name}.py" for name in ("cost_model", "sharding", "memory", "estimate", "start")),
        *("check_docs/test_cost.py", "check_docs/test_placements.py"),
    ),
    "analysis/plan/tiny": ("analysis/plan/test_tiny.py", "analysis/plan/test_tiny_models.py"),
    "analysis/replay/": REPLAY,
    "analysis/replay/distributions.py": ("analysis/replay/test_distributions.py", "analysis/replay/test_gradient.py"),
    "analysis/replay/gradient.py": ("analysis/replay/test_gradient.py", *REPLAY[:2]),
    "analysis/simulate/": ("analysis/simulate/test_candidates.py", "analysis/simulate/test_distributions.py"),
}
EQUIVALENT = {  # the name of a mutant: why no test can notice it
    "launch/engine_processes.py::make_hosted: 1 -> 2": "the version before any weights is replaced before it is read",
    "rollout/engines/pool.py::Peer.close: return -> pass": "it is the last statement",
    "analysis/plan/dry_step.py::MemoryTracker.__init__: super().__init__() -> pass": "torch makes up for it",
    "launch/engines.py::make_engine: return VLLMEngine(path, settings, device=device, version=version, "
    "drafter=drafter, rows=rows) -> return None": "it runs only where vLLM is, as the tests of make test-vllm do",
}
UNBROKEN = "the code as it is"  # beside the names of the mutants


class DrawnMutant(NamedTuple):
    """A function of a file, and the number of a mutant of it."""

    file: str
    function: str
    number: int

    def mutant(self) -> Mutant:
        return mutant((PACKAGE / self.file).read_text(), self.function, self.number, control=True)

    @property
    def name(self) -> str:
        return f"{self.file}::{self.mutant().name}"

    @property
    def job(self) -> dict[str, object]:
        room = ROOMS[max((start for start in ROOMS if self.file.startswith(start)), key=len)]
        return job(self.file, ast.unparse(self.mutant().module), [f"tests/{test}" for test in room])


def hash_of(*parts: str) -> int:
    """Return a whole number that these names alone decide."""
    return int.from_bytes(hashlib.sha256("\n".join((str(SEED), *parts)).encode()).digest()[:8], "big")


def draw(floor: str) -> Iterator[DrawnMutant]:
    """Yield a mutant of each function of a floor, those with the smallest hashes first."""
    folder = FLOORS[floor]
    inner_floors = tuple(f"{other}/" for other in FLOORS.values() if other.startswith(f"{folder}/"))
    excluded_prefixes = (*ELSEWHERE, *inner_floors)
    files = (str(path.relative_to(PACKAGE)) for path in sorted((PACKAGE / folder).rglob("*.py")))
    sources = {file: (PACKAGE / file).read_text() for file in files if not file.startswith(excluded_prefixes)}
    pairs = [(file, function) for file, source in sources.items() for function in functions(source)]

    for file, function in sorted(pairs, key=lambda pair: hash_of(*pair)):
        if mutant_count := count(sources[file], function, control=True):
            yield DrawnMutant(file, function, hash_of(file, function, "which") % mutant_count)


DRAWN_MUTANTS = [drawn for floor in FLOORS for drawn in islice(draw(floor), MUTANTS_PER_FLOOR)]


@pytest.fixture(scope="module")
def answer_by_mutant(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the test that noticed each mutant, by the mutant's name; "" is none.

    The file of JACKPOT_MUTANTS spares the mutants that it knows.
    """
    answer_file = Path(os.environ.get("JACKPOT_MUTANTS") or tmp_path_factory.mktemp("mutants") / "found.json")
    known_answers: dict[str, str] = json.loads(answer_file.read_text()) if answer_file.is_file() else {}
    unknown_mutants = [drawn for drawn in DRAWN_MUTANTS if not known_answers.get(drawn.name)]

    copy = tmp_path_factory.mktemp("copy") / "src"
    shutil.copytree(PACKAGE, copy / "jackpot")
    new_answers = answers(copy, [drawn.job for drawn in unknown_mutants])
    for drawn, answer in zip(unknown_mutants, new_answers, strict=True):
        known_answers[drawn.name] = answer
        answer_file.write_text(json.dumps(known_answers, indent=1))

    noticing_tests = sorted({name for name in known_answers.values() if "::" in name})
    source = (PACKAGE / "__init__.py").read_text()
    [known_answers[UNBROKEN]] = answers(copy, [job("__init__.py", source, noticing_tests, seconds=SECONDS * 4)])
    return known_answers


def answers(copy: Path, jobs: list[dict[str, object]]) -> Iterator[str]:
    """Yield the first test that fails in each job, "" for none."""
    command = [sys.executable, TESTS / "mutants" / "copies.py", copy]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        json.dump(jobs, server.stdin)
        server.stdin.close()
        yield from map(json.loads, server.stdout)
    assert server.returncode == 0


def job(file: str, source: str, arguments: Iterable[str], seconds: int = SECONDS) -> dict[str, object]:
    """Return what `copies.py` is asked."""
    return {"file": f"jackpot/{file}", "source": source, "arguments": list(arguments), "seconds": seconds}


@pytest.mark.parametrize("drawn", DRAWN_MUTANTS, ids=[drawn.name for drawn in DRAWN_MUTANTS])
def test_a_test_of_its_room_notices_the_mutant(drawn: DrawnMutant, answer_by_mutant: dict[str, str]) -> None:
    answer = answer_by_mutant[drawn.name]
    assert not answer.startswith("no tests"), drawn.name

    survives = answer == ""
    assert survives == (drawn.name in EQUIVALENT), f"{drawn.name}: {'survives' if survives else 'is in EQUIVALENT'}"


def test_what_noticed_a_mutant_passes_on_the_code_as_it_is(answer_by_mutant: dict[str, str]) -> None:
    assert answer_by_mutant[UNBROKEN] == ""


def test_every_exception_is_a_drawn_mutant() -> None:
    assert EQUIVALENT.keys() <= {drawn.name for drawn in DRAWN_MUTANTS}


def test_every_room_has_its_tests() -> None:
    assert all((TESTS / test).is_file() for tests in ROOMS.values() for test in tests)
