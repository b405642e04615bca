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
    ended = run_ranks(2, config, tmp_path / "two")
    assert ended.codes == [0, 0], ended.printed
    run(config, tmp_path / "one")
    for role in ("policy", "rollout_model", *(["critic"] if config.critic else [])):
        ours, theirs = weights(tmp_path / "two", role), weights(tmp_path / "one", role)
        assert ours.keys() == theirs.keys()
        assert compared([ours[name] for name in theirs], theirs.values()) <= 1e-6
    (first, *_), (same, *_) = (metrics(tmp_path / name)[1:] for name in ("two", "one"))
    assert first.keys() == same.keys() and first["tokens/rollout"] == same["tokens/rollout"]


@pytest.mark.parametrize(("lost", "ranks"), [(1, 1), pytest.param(0, 3, marks=pytest.mark.slow)])
def test_a_killed_rank_ends_all_and_other_ranks_continue(
    lost: int, ranks: int, finished_run: FinishedRuns, tmp_path: Path
) -> None:
    """The error names the last command of the rank that was lost, and the run ends as that of one process.

    A step is one micro-batch here, so other ranks read empty ones and nothing is added in another order. What the ranks
    listen on is the loopback interface. Gloo nearly always sees at once that a rank has died; where it misses the
    moment the time limit ends the wait.
    """
    run, heard = tmp_path / "run", tmp_path / "listening"
    config = small_config(*BRIEF, "placement.timeout=20")

    kill = sending(signal.SIGKILL, lost, run, after=3)

    def look(line: dict) -> None:
        all_ranks = [psutil.Process(), *psutil.Process(os.getppid()).children()]
        open_ports = [one for rank in all_ranks for one in rank.net_connections() if one.status == psutil.CONN_LISTEN]
        heard.write_text(" ".join(one.laddr.ip for one in open_ports))
        kill(line)

    ended = run_ranks(2, config, run, look)
    assert ended.codes[lost] == -signal.SIGKILL and ended.codes[1 - lost] == 2
    error = ended.printed[1 - lost]
    assert f"error: rank {1 - lost} lost another rank in " in error
    last = json.loads((run / "ranks" / f"{lost}.json").read_text())
    assert f"rank {lost} (process {last['pid']} on " in error
    assert f"command {last['number']} ({last['command']})" in error
    assert (run / "checkpoints" / "last").readlink() == Path("step-2")
    assert set(heard.read_text().split()) == {"127.0.0.1"}
    ended = run_ranks(ranks, config, run)
    assert ended.codes == [0] * ranks, ended.printed
    assert_close_runs(finished_run(*BRIEF), run)
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [start["ranks"] for start in json.loads((run / "environment.json").read_text())["starts"]] == [2, ranks]
    changed = [one["ranks"] for one in events if one["event"] == "environment_changed"]
    assert changed == [f"ranks 2 -> {ranks}"]


@pytest.mark.slow
def test_a_rank_that_stands_still_is_an_error_in_time(tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = small_config(SHORT, "iterations=500", "placement.timeout=5")
    ended = run_ranks(2, config, run, sending(signal.SIGSTOP, 1, run, after=0), patience=0.0)
    assert ended.codes == [2, -signal.SIGKILL] and "rank 0 lost another rank in command " in ended.printed[0]


@pytest.mark.slow
def test_a_signal_ends_all_ranks_after_a_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def terminate(line: dict) -> None:
        for rank in (1, 0):
            sending(signal.SIGTERM, rank, run, after=1)(line)

    ended = run_ranks(2, small_config(SHORT, "iterations=500"), run, terminate)
    assert ended.codes == [0, 0], ended.printed
    assert (run / "checkpoints" / "last").readlink() == Path(f"step-{read_lines(run)[-1]['iteration']}")
    first, second = (json.loads((run / "ranks" / f"{rank}.json").read_text()) for rank in range(2))
    assert first["number"] == second["number"] > 4 and first["state"] == second["state"] == "done"
    assert first["pid"] != second["pid"]


def test_ranks_with_a_gpu_each_use_nccl_beside_gloo(monkeypatch) -> None:
    """What a machine with two GPUs would do; none has run it."""
    taken: list[int] = []
    second = ProcessRank(3, 4, 1, 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert BACKENDS[_own_device("cpu", second).type] == "gloo" and not taken
    device = _own_device("auto", second)
    assert (device, taken, BACKENDS[device.type]) == (torch.device("cuda", 1), [1], "cpu:gloo,cuda:nccl")
    with pytest.raises(ConfigError, match=r"3 ranks on a machine with 2 GPUs.*--nproc-per-node 2, or device=cpu"):
        _own_device("cuda", ProcessRank(0, 3, 0, 3))


def test_ranks_share_out_the_free_cores_of_their_machine(monkeypatch) -> None:
    monkeypatch.setattr(cores, "free_cores", lambda: 9)
    for ranks, wanted in ((1, 9), (4, 2), (16, 1)):
        numbers = {"RANK": 0, "WORLD_SIZE": 16, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": ranks}
        for name, number in numbers.items():
            monkeypatch.setenv(name, str(number))
        assert cores.pick_threads("auto") == wanted


def test_a_group_that_cannot_start_says_why_once(tmp_path: Path) -> None:
    config = small_config("engine=vllm", "evaluation.engine=transformers", "placement.engines=0")
    ended = run_ranks(2, config, tmp_path / "run", patience=0.0)
    assert ended.codes[0] == 2 and "and engine vllm sets up torch.distributed in the process" in ended.printed[0]
    assert ended.printed[1] == ""


@pytest.mark.parametrize(("here", "interface"), [(2, "lo"), (1, None)])
def test_ranks_of_one_machine_talk_over_its_loopback(here: int, interface: str | None, monkeypatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(RankError, match="rank 0 of 2 does not reach the others"):
        _store(ProcessRank(0, 2, 0, here))
    assert os.environ.get("GLOO_SOCKET_IFNAME") == interface
