"""`jackpot train` and `jackpot eval` work with a real vLLM as with transformers; `make test-vllm` runs it."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm runs this in .venv-vllm")

from helpers.engines.servers import VLLMServer, save_untied, started
from helpers.runs import assert_same_run, metrics, run, small_config
from jackpot.launch.start import launch
from jackpot.models.hub import resolve_path
from jackpot.training.trainer import MetricsLine

pytestmark = pytest.mark.vllm
JACKPOT = Path(sys.executable).with_name("jackpot")


@pytest.mark.sweep
def test_the_quickstart_learns_on_vllm(tmp_path: Path) -> None:
    """80 of its 250 iterations; docs/vllm.md has three whole seeds."""
    overrides = ["iterations=80", "evaluation.every=80", "threads=1", "seed=7"]
    command = [JACKPOT, "train", "quickstart", "engine=vllm", *overrides, "--run", tmp_path / "run"]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr

    first_line, *_, last_line = metrics(tmp_path / "run")
    assert last_line["eval/policy_accuracy"] > first_line["eval/policy_accuracy"] + 0.1
    assert last_line["eval/rollout_model_accuracy"] > first_line["eval/rollout_model_accuracy"] + 0.1

    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    checks = [event for event in events if event["event"] == "engine_check"]
    assert checks
    assert all(event["mean_gap"] < 1e-6 for event in checks)
    assert last_line["mismatch/engine_gap"] < 1e-6


@pytest.mark.parametrize(
    ("share", "draft"),
    [
        pytest.param("1.0", "null", marks=pytest.mark.sweep),
        ("{schedule: linear, hold: 1, until: 4}", "null"),
        pytest.param("0.0", "{tokens: 3}", marks=pytest.mark.sweep),
    ],
)
def test_a_stopped_run_goes_on_as_if_never_stopped(tmp_path: Path, share: str, draft: str) -> None:
    """Also where the rollouts pass from one model's vLLM to the other's, or where one drafts for the other."""
    engine = f"engine={{name: vllm, kv_cache_memory_bytes: 268435456, draft: {draft}}}"
    config = small_config(engine, f"rollout_model.share={share}")
    run(config, tmp_path / "whole")

    run(config, tmp_path / "stopped", kill_after=2)
    run(config, tmp_path / "stopped")

    assert_same_run(tmp_path / "whole", tmp_path / "stopped", ["policy", "rollout_model"])

    for line in metrics(tmp_path / "whole")[1:]:
        assert line["mismatch/engine_gap"] < 1e-6
        assert ("draft/acceptance" in line) == (draft != "null")


def test_a_model_is_measured_with_vllm_as_with_transformers(tmp_path: Path) -> None:
    """The engines draw other answers; how often they are right differs by chance alone."""
    accuracies = []

    for engine, overrides in (("transformers", []), ("vllm", ["engine.kv_cache_memory_bytes=268435456"])):
        folder = tmp_path / engine
        arguments = ["--benchmarks", "arithmetic", "--k", "4", "--engine", engine, "--out", folder, "problems=64"]
        command = [JACKPOT, "eval", "starter:policy", *arguments, *overrides]
        process = subprocess.run(command, capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        assert "mean@4" in process.stdout, process.stderr
        table = pq.read_table(folder / "arithmetic.parquet").to_pydict()
        assert table["sample"] == [0, 1, 2, 3] * 64
        assert set(table["finish"]) == {"stop"}
        accuracies.append(sum(table["correct"]) / 256)  # 4 answers to each of 64 problems

    standard_error = (2 * 0.25 / 256) ** 0.5  # of the difference of two shares of 256 answers, at most
    assert abs(accuracies[0] - accuracies[1]) < 4 * standard_error


@pytest.mark.parametrize("arm", ["obrs", "on_policy"])
def test_the_policy_can_be_evaluated_with_another_engine(tmp_path: Path, arm: str) -> None:
    engine = "engine={name: vllm, kv_cache_memory_bytes: 268435456}"

    run(small_config(engine, "evaluation.engine=transformers", arm=arm), tmp_path)

    last_line = metrics(tmp_path)[-1]
    assert max(last_line["eval/policy_engine_gap"], last_line["eval/rollout_model_engine_gap"]) < 1e-6


def test_a_tool_can_take_turns_with_vllm(tmp_path: Path) -> None:
    run(small_config("engine={name: vllm, kv_cache_memory_bytes: 268435456}", arm="tool"), tmp_path)
    assert metrics(tmp_path)[-1]["response/tool_tokens"] > 0.0


def test_a_server_that_dies_and_comes_back_costs_only_time(tmp_path: Path) -> None:
    server = VLLMServer(save_untied(Path(resolve_path("starter:rollout_model")), tmp_path / "untied"))

    def restart(line: MetricsLine) -> None:
        if line["iteration"] == 2:  # of 4; what comes next is asked of a server that is not there
            server.kill()
            server.start()

    overrides = ["engine=vllm_server", f"engine.urls={server.url}", f"engine.weights_folder={tmp_path / 'weights'}"]
    config = small_config(*overrides, "evaluation.engine=transformers")

    with started(server), contextlib.closing(launch(config, tmp_path / "run", restart)) as trainer:
        assert trainer.train()

    lines = metrics(tmp_path / "run")
    assert [line["iteration"] for line in lines] == [0, 1, 2, 3, 4]
    assert all(line["mismatch/engine_gap_max"] < 1e-4 for line in lines[1:])
    assert all(line["response/aborted"] == 0.0 for line in lines[1:])

    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    server_events = [event["event"] for event in events if event["event"].startswith("server_")]
    assert server_events == ["server_lost", "server_restarted"]

    assert not list((tmp_path / "weights").iterdir())
