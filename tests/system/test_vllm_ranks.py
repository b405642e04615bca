"""Two ranks of torchrun train with engine processes or a server of a real vLLM, and a kill changes nothing.

The commands are those for GPUs, here on a CPU.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm runs this in .venv-vllm")

from helpers.engines.servers import VLLMServer, save_untied, started
from helpers.runs import SMALL, assert_same_run, metrics
from jackpot.analysis.plan.tiny_models import save_tiny
from jackpot.models.hub import resolve_path
from jackpot.models.load import load_config

pytestmark = pytest.mark.vllm
TORCHRUN = Path(sys.executable).with_name("torchrun")
VLLM = ("engine.name=vllm", "engine.kv_cache_memory_bytes=67108864")
SIZE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}


def tiny_model_path(folder: Path, name: str, seed: int) -> str:
    """Save a small model with the architecture of a published one and the tokens of the starters; return its path."""
    save_tiny(folder / str(seed), load_config(name), SIZE, "starter:policy", [], seed)
    return str(folder / str(seed))


def train(folder: Path, *settings: str, meanwhile: Callable[[int], None] = lambda pid: None) -> None:
    """Type torchrun with two ranks, which it may start again, and wait for their success."""
    words = ["--nproc-per-node", "2", "--max-restarts", "3", "-m", "--", "jackpot", "train", "quickstart"]
    with (folder.parent / f"{folder.name}.log").open("w+") as log:
        command = [TORCHRUN, *words, *SMALL, "checkpoint.every=1", "threads=1", *settings, "--run", folder]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        try:
            meanwhile(process.pid)
            code = process.wait(500)
        finally:
            process.kill()
        log.seek(0)
        assert code == 0, log.read()[-3000:]


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, from any of its threads, and those that they have."""
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for thread in threads for child in thread.read_text().split()]
    return children + [grandchild for child in children for grandchild in descendants(child)]


def process_of(pid: int, pattern: str) -> int:
    """Return the first descendant whose command and environment match."""
    for child in descendants(pid):
        description = b"\0".join(Path(f"/proc/{child}/{name}").read_bytes() for name in ("cmdline", "environ"))
        if re.search(pattern, description.decode(errors="replace")):
            return child
    raise AssertionError(f"no process matches {pattern}")


def test_two_families_train_jointly_with_engines_beside_ranks(tmp_path: Path) -> None:
    """Nothing says where engines are: `placement.engines: auto` gives vLLM a process beside each rank."""
    policy = tiny_model_path(tmp_path, "Qwen/Qwen3-4B-Base", seed=1)
    rollout_model = tiny_model_path(tmp_path, "Qwen/Qwen2.5-1.5B", seed=2)

    train(tmp_path / "run", *VLLM, f"policy.path={policy}", f"rollout_model.path={rollout_model}")

    *_, last_line = metrics(tmp_path / "run")
    assert last_line["iteration"] == 4
    assert {"eval/policy_accuracy", "eval/rollout_model_accuracy"} <= last_line.keys()

    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    checks = [event for event in events if event["event"] == "engine_check"]
    assert len(checks) == 2
    assert all(check["mean_gap"] < 1e-5 for check in checks)
    assert last_line["mismatch/engine_gap"] < 1e-5


@pytest.mark.sweep
def test_a_kill_of_each_kind_of_process_changes_nothing(tmp_path: Path) -> None:
    model = tiny_model_path(tmp_path, "HuggingFaceTB/SmolLM2-135M-Instruct", seed=3)
    one_model = ("rollout_model=null", "objective.correction=none")  # one engine a process
    overrides = (*VLLM, f"policy.path={model}", *one_model, "placement.chunk=8", "iterations=4")
    patterns = [r"jackpot\.launch\.engine_processes", r"\0RANK=1\0", r"\0RANK=0\0"]
    killed_ids = []

    def kill(pid: int) -> None:
        for iteration, pattern in enumerate(patterns):
            deadline, log = time.monotonic() + 200, tmp_path / "killed" / "metrics.jsonl"
            while not (log.exists() and f'"iteration": {iteration},' in log.read_text()):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            killed_ids.append(process_of(pid, pattern))
            os.kill(killed_ids[-1], signal.SIGKILL)

    train(tmp_path / "whole", *overrides)
    train(tmp_path / "killed", *overrides, meanwhile=kill)

    assert len(set(killed_ids)) == 3
    assert_same_run(tmp_path / "whole", tmp_path / "killed", ["policy"])


@pytest.mark.sweep
def test_ranks_train_from_a_server(tmp_path: Path) -> None:
    server = VLLMServer(save_untied(Path(resolve_path("starter:rollout_model")), tmp_path / "untied"))
    overrides = ["engine=vllm_server", f"engine.urls={server.url}", f"engine.weights_folder={tmp_path / 'weights'}"]

    with started(server):
        train(tmp_path / "run", *overrides, "evaluation.engine=transformers")

    assert all(line["mismatch/engine_gap_max"] < 1e-4 for line in metrics(tmp_path / "run")[1:])
