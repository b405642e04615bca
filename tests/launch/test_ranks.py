"""Ranks that train one run together: rank 0 leads, the others follow its commands."""

import json
import os
import signal
from pathlib import Path

import psutil
import pytest
import torch

from helpers.led import assert_close_runs, run_ranks, sending
from helpers.runs import BRIEF, SHORT, FinishedRuns, metrics, read_lines, run, small_config, weights
from helpers.sharded import compared
from jackpot.core import cores
from jackpot.core.errors import ConfigError, RankError
from jackpot.core.process_rank import ProcessRank
from jackpot.launch.ranks import BACKENDS, _own_device, _store

REGIMES = {
    "critic and lora": (
        *("objective.advantage=gae", "critic={optimizer: {learning_rate: 1e-3}}"),
        *("policy.lora={rank: 4, alpha: 8}", "policy.optimizer.learning_rate=1e-3"),
    ),
    "reference, ahead": ("objective.reference={kl_loss_coef: 0.1}", "batch.ahead=2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("regime", REGIMES)
def test_two_ranks_train_what_one_trains_with(regime: str, tmp_path: Path) -> None:
    """Each rank adds micro-batches up, so weights are equal up to rounding."""
    config = small_config(*BRIEF, *REGIMES[regime], "batch.micro_batch_tokens=64")

    outcome = run_ranks(2, config, tmp_path / "two_ranks")
    run(config, tmp_path / "one_rank")

    assert outcome.codes == [0, 0], outcome.printed
    for role in ("policy", "rollout_model", *(["critic"] if config.critic else [])):
        two_rank_weights, one_rank_weights = (weights(tmp_path / name, role) for name in ("two_ranks", "one_rank"))
        assert two_rank_weights.keys() == one_rank_weights.keys()
        assert compared([two_rank_weights[name] for name in one_rank_weights], one_rank_weights.values()) <= 1e-6

    two_rank_line, one_rank_line = (metrics(tmp_path / name)[1] for name in ("two_ranks", "one_rank"))
    assert two_rank_line.keys() == one_rank_line.keys()
    assert two_rank_line["tokens/rollout"] == one_rank_line["tokens/rollout"]


@pytest.mark.parametrize(("lost", "ranks"), [(1, 1), pytest.param(0, 3, marks=pytest.mark.slow)])
def test_a_killed_rank_ends_all_and_other_ranks_continue(
    lost: int, ranks: int, finished_run: FinishedRuns, tmp_path: Path
) -> None:
    """The error names the last command of the rank that was lost, and the run ends as that of one process.

    A step is one micro-batch here, so other ranks read empty ones and nothing is added in another order. What the ranks
    listen on is the loopback interface. Gloo nearly always sees at once that a rank has died; where it misses the
    moment the time limit ends the wait.
    """
    run, addresses_file = tmp_path / "run", tmp_path / "listening"
    config = small_config(*BRIEF, "placement.timeout=20")
    survivor = 1 - lost
    kill = sending(signal.SIGKILL, lost, run, after=3)

    def note_addresses_and_kill(line: dict) -> None:
        all_ranks = [psutil.Process(), *psutil.Process(os.getppid()).children()]
        connections = [connection for rank in all_ranks for connection in rank.net_connections()]
        addresses = [each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN]
        addresses_file.write_text(" ".join(addresses))
        kill(line)

    outcome = run_ranks(2, config, run, note_addresses_and_kill)

    assert outcome.codes[lost] == -signal.SIGKILL
    assert outcome.codes[survivor] == 2
    error = outcome.printed[survivor]
    assert f"error: rank {survivor} lost another rank in " in error
    last_command = json.loads((run / "ranks" / f"{lost}.json").read_text())
    assert f"rank {lost} (process {last_command['pid']} on " in error
    assert f"command {last_command['number']} ({last_command['command']})" in error
    assert (run / "checkpoints" / "last").readlink() == Path("step-2")  # one every two iterations
    assert set(addresses_file.read_text().split()) == {"127.0.0.1"}

    outcome = run_ranks(ranks, config, run)

    assert outcome.codes == [0] * ranks, outcome.printed
    assert_close_runs(finished_run(*BRIEF), run)
    starts = json.loads((run / "environment.json").read_text())["starts"]
    assert [start["ranks"] for start in starts] == [2, ranks]
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    rank_changes = [event["ranks"] for event in events if event["event"] == "environment_changed"]
    assert rank_changes == [f"ranks 2 -> {ranks}"]


@pytest.mark.slow
def test_a_rank_that_stands_still_is_an_error_in_time(tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = small_config(SHORT, "iterations=500", "placement.timeout=5")

    outcome = run_ranks(2, config, run, sending(signal.SIGSTOP, 1, run, after=0), patience=0.0)

    assert outcome.codes == [2, -signal.SIGKILL]  # the one that stands still is killed from outside
    assert "rank 0 lost another rank in command " in outcome.printed[0]


@pytest.mark.slow
def test_a_signal_ends_all_ranks_after_a_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def terminate(line: dict) -> None:
        for rank in (1, 0):
            sending(signal.SIGTERM, rank, run, after=1)(line)

    outcome = run_ranks(2, small_config(SHORT, "iterations=500"), run, terminate)

    assert outcome.codes == [0, 0], outcome.printed
    assert (run / "checkpoints" / "last").readlink() == Path(f"step-{read_lines(run)[-1]['iteration']}")
    last_commands = [json.loads((run / "ranks" / f"{rank}.json").read_text()) for rank in range(2)]
    assert [command["state"] for command in last_commands] == ["done", "done"]
    assert last_commands[0]["number"] == last_commands[1]["number"]
    assert last_commands[0]["number"] > 4
    assert last_commands[0]["pid"] != last_commands[1]["pid"]


def test_ranks_with_a_gpu_each_use_nccl_beside_gloo(monkeypatch) -> None:
    """What a machine with two GPUs would do; none has run it."""
    chosen_gpus: list[int] = []
    last_rank = ProcessRank(rank=3, size=4, local_rank=1, local_size=2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen_gpus.append)

    device = _own_device("cpu", last_rank)
    assert BACKENDS[device.type] == "gloo"
    assert chosen_gpus == []

    device = _own_device("auto", last_rank)
    assert device == torch.device("cuda", 1)
    assert chosen_gpus == [1]
    assert BACKENDS[device.type] == "cpu:gloo,cuda:nccl"

    with pytest.raises(ConfigError, match=r"3 ranks on a machine with 2 GPUs.*--nproc-per-node 2, or device=cpu"):
        _own_device("cuda", ProcessRank(rank=0, size=3, local_rank=0, local_size=3))


def test_ranks_share_out_the_free_cores_of_their_machine(monkeypatch) -> None:
    monkeypatch.setattr(cores, "free_cores", lambda: 9)

    for local_ranks, expected_threads in ((1, 9), (4, 2), (16, 1)):  # 9 // ranks, and at least 1
        variables = {"RANK": 0, "WORLD_SIZE": 16, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": local_ranks}
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))

        assert cores.pick_threads("auto") == expected_threads


def test_a_group_that_cannot_start_says_why_once(tmp_path: Path) -> None:
    config = small_config("engine=vllm", "evaluation.engine=transformers", "placement.engines=0")

    outcome = run_ranks(2, config, tmp_path / "run", patience=0.0)

    assert outcome.codes[0] == 2
    assert "and engine vllm sets up torch.distributed in the process" in outcome.printed[0]
    assert outcome.printed[1] == ""


@pytest.mark.parametrize(("local_size", "interface"), [(2, "lo"), (1, None)])
def test_ranks_of_one_machine_talk_over_its_loopback(local_size: int, interface: str | None, monkeypatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")  # so that the test's end undoes what `_store` sets
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.delenv("MASTER_ADDR", raising=False)

    with pytest.raises(RankError, match="rank 0 of 2 does not reach the others"):
        _store(ProcessRank(rank=0, size=2, local_rank=0, local_size=local_size))

    assert os.environ.get("GLOO_SOCKET_IFNAME") == interface
