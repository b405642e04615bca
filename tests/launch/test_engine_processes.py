"""Runs whose engines generate in processes of their own (`placement.engines`), here in forks of this one."""

import asyncio
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from helpers.engines.hosts import fork_engines
from helpers.led import run_ranks
from helpers.runs import BRIEF, SHORT, FinishedRuns, assert_same_run, metrics, read_lines, small_config, weights
from jackpot.config.config import PlacementConfig
from jackpot.core.errors import ConfigError
from jackpot.core.types import Prompt, Version
from jackpot.launch.build import make_engines
from jackpot.launch.engine_processes import engine_gpu
from jackpot.launch.start import train_run
from jackpot.rollout.engines.base import Request
from jackpot.rollout.engines.hosted import EngineHost
from jackpot.rollout.engines.process import ProcessLink, make_starter
from jackpot.training.joint_learner import JointLearner


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> list[ProcessLink]:
    return fork_engines(monkeypatch)


def killing(links: list[ProcessLink], at: dict[int, int]) -> Callable[[dict], None]:
    """Kill the engine with a number when the line of an iteration is written."""

    def listen(line: dict) -> None:
        if line["iteration"] in at:
            os.kill(links[at[line["iteration"]]].child.pid, signal.SIGKILL)

    return listen


def assert_close(one: Path, other: Path) -> None:
    """All metrics but those of clocks are within 1e-3 of each other, in their own size where that is above 1."""
    for line, same in zip(metrics(one), metrics(other), strict=True):
        assert line.keys() == same.keys()
        for name, value in line.items():
            assert same[name] == (None if value is None else pytest.approx(value, rel=1e-3, abs=1e-3)), name


def test_both_engines_generate_what_they_do_in_one_process(forked: list[ProcessLink]) -> None:
    config = small_config(SHORT, "placement.engines=2", "engine.draft={lam: 0.3}", "rollout_model.share=0.5")
    here = config.model_copy(update={"placement": PlacementConfig()})
    paths = config.model_paths()
    with ExitStack() as undo:
        both = [make_engines(one, paths, torch.device("cpu"), Version(3, 4), undo) for one in (here, config)]
        for one, placed in zip(*both, strict=True):
            wanted = [
                Request(uid=f"{seed}", prompt=Prompt(uid="", text="", answer="", token_ids=(5, 6)), seed=seed,
                        sampling=config.sampling, exact_drafts=seed < 2) for seed in range(4)
            ]  # fmt: skip
            for ours, theirs in zip(one.generate(wanted), placed.generate(wanted), strict=True):
                assert torch.equal(ours.token_ids, theirs.token_ids) and torch.equal(ours.versions, theirs.versions)
                assert torch.equal(ours.rollout_log_probs, theirs.rollout_log_probs)
            assert one.take_metrics() == placed.take_metrics()
    assert len(forked) == 2 and all(link.child is None for link in forked)


@pytest.mark.slow
def test_a_run_does_not_depend_on_killed_or_more_engines(forked, finished_run: FinishedRuns, tmp_path: Path) -> None:
    for number, at in ((1, {}), (2, {1: 0, 3: 1})):
        config = small_config(*BRIEF, f"placement.engines={number}", "placement.chunk=4")
        assert train_run(config, tmp_path / f"{number}", killing(forked, at))
        forked.clear()
    assert_same_run(tmp_path / "1", tmp_path / "2", ["policy", "rollout_model"])
    assert_close(tmp_path / "2", finished_run(*BRIEF))
    events = [json.loads(line) for line in (tmp_path / "2" / "events.jsonl").read_text().splitlines()]
    told = [(one["event"], one["peer"]) for one in events if one["event"].startswith("peer_")]
    lost = [("peer_lost", "engine process 1"), ("peer_lost", "engine process 2")]
    assert [one for one in told if one[0] == "peer_lost"] == lost


@pytest.mark.slow
@pytest.mark.parametrize(("ahead", "drafts"), [(0, ("engine.draft={}", "rollout_model.share=0.25")), (1, ())])
def test_a_share_and_drafts_go_through_ranks_and_engines(ahead: int, drafts: tuple, forked, finished_run, tmp_path):
    overrides = (*BRIEF, "rollout_model.share=0.5", *drafts, f"batch.ahead={ahead}")
    config = small_config(*overrides, "placement.engines=2")
    ended = run_ranks(2, config, tmp_path / "run", killing(forked, {2: 1}))
    assert ended.codes == [0, 0], ended.printed
    assert_close(tmp_path / "run", finished_run(*overrides))
    names = read_lines(tmp_path / "run")[-1].keys()
    assert "reward/mean_by_policy" in names and ("draft/acceptance" in names) == bool(drafts)


def noting(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Have ranks and engine processes, forks of this one, write what they do to a file, in its order."""

    def note(word: str) -> None:
        with path.open("a") as file:
            file.write(f"{word}\n")

    def noted(owner: type, name: str, say: Callable[..., str]) -> None:
        done = getattr(owner, name)

        def do(self: object, *given: object, **named: object) -> object:
            note(f"{say(*given)} begins")
            result = done(self, *given, **named)
            note(f"{say(*given)} ends")
            return result

        monkeypatch.setattr(owner, name, do)

    noted(EngineHost, "_do", lambda ask: f"{ask['do']} {ask.get('engine', 'all')}")
    noted(JointLearner, "train", lambda *_: "train")
    noted(JointLearner, "release_memory", lambda *_: "release")


@pytest.mark.slow
def test_engines_that_share_sleep_while_two_ranks_train(forked, tmp_path, monkeypatch) -> None:
    """Both ranks train between the sleep of both processes and the next weights, before which both release memory. The
    run is that of engines which never sleep, bit for bit."""
    overrides = (*BRIEF, "placement.engines=2", "placement.chunk=4")
    assert run_ranks(2, small_config(*overrides), tmp_path / "awake").codes == [0, 0]
    noting(monkeypatch, tmp_path / "notes")
    ended = run_ranks(2, small_config(*overrides, "engine.enable_sleep_mode=true"), tmp_path / "asleep")
    assert ended.codes == [0, 0], ended.printed
    assert_same_run(tmp_path / "awake", tmp_path / "asleep", ["policy", "rollout_model"])
    notes = (tmp_path / "notes").read_text().splitlines()
    asleep, released, trained = {"engine": 0, "evaluation.engine": 0}, 0, 0
    for one in notes:
        match one.split():
            case ["sleep", engine, "ends"]:
                asleep[engine] += 1
            case ["train", "begins"]:
                assert min(asleep.values()) == 2, notes
            case ["train", "ends"]:
                trained, released = trained + 1, 0
            case ["release", "ends"]:
                released += 1
            case ["take", engine, "begins"]:
                assert trained == 0 or released >= 2, notes
                asleep[engine] = 0
            case ["generate", engine, "begins"]:
                assert asleep[engine] == 0, notes
    assert trained == 2 * 4 and notes.count("generate engine begins") > 4


@pytest.mark.slow
def test_a_run_goes_on_with_engine_processes_and_without(forked, finished_run: FinishedRuns, tmp_path) -> None:
    """The processes read the models of the settings, and get the weights of the checkpoint before they generate."""
    run, whole = finished_run.copy(tmp_path / "run", *BRIEF, kill_after=2), finished_run(*BRIEF)
    assert train_run(small_config(*BRIEF, "placement.engines=2"), run, lambda line: None)
    assert_close(run, whole)
    for role in ("policy", "rollout_model"):
        ours, theirs = weights(run, role), weights(whole, role)
        assert all(torch.allclose(ours[name], theirs[name], atol=1e-5) for name in ours)


@pytest.mark.slow
def test_a_process_generates_what_this_does_and_ends_with_it(tmp_path: Path) -> None:
    """With the program that a run starts. A leader that is killed leaves neither a process nor memory."""
    reading, writing = os.pipe()
    if not (leader := os.fork()):
        config = small_config("placement.engines=1", "placement.timeout=120")
        paths = config.model_paths()
        engine, _ = make_engines(config, paths, torch.device("cpu"), Version(0, 0), ExitStack())
        peer = engine._pool.pool.peers[0]
        os.write(writing, json.dumps([peer._link.child.pid, str(peer.weights["engine"].memory.path)]).encode())
        time.sleep(600)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        found = os.read(pipe.fileno(), 4096)
    pid, memory = json.loads(found)
    assert "launch.engine_processes" in Path(f"/proc/{pid}/cmdline").read_text() and Path(memory).exists()
    ends = os.pidfd_open(pid)
    os.kill(leader, signal.SIGKILL)
    os.waitpid(leader, 0)
    assert select.select([ends], [], [], 30.0)[0] and not Path(memory).exists()
    os.close(ends)


TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
TORCHRUN += ("ROLE_RANK", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE")


def test_a_process_that_a_rank_starts_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what torchrun sets it is given nothing: it would join the ranks, or share their cores out once more."""
    for name in TORCHRUN:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    entry = "import json, os, socket, sys; ours = socket.socket(fileno=int(sys.argv[1])); "
    entry += "ours.send(json.dumps(dict(os.environ)).encode())"

    async def given() -> dict[str, str]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            child = await make_starter(entry, {"CUDA_VISIBLE_DEVICES": "3"})(theirs)
            assert await child.wait() == 0
            return json.loads(ours.recv(2**20))

    found = asyncio.run(given())
    assert not found.keys() & set(TORCHRUN)
    assert found["CUDA_VISIBLE_DEVICES"] == "3" and found["PATH"] == os.environ["PATH"]


@pytest.mark.parametrize(
    ("overrides", "error"),
    [
        (("rollout_model=null", "objective.correction=none", "engine={name: vllm_server, urls: 'http://127.0.0.1:1', "
          "weights_folder: w}"), "placement.engines is 2, but all engines are servers"),
        (("engine={name: vllm, device: 1}",), "engine.device is for an engine in the process that trains"),
        (("engine={name: vllm, enable_sleep_mode: true}",), "vLLM has one engine that sleeps in a process"),
        (("engine.enable_sleep_mode=true", "batch.ahead=1"), "with batch.ahead 1 they generate then"),
        (("engine={draft: {}, enable_sleep_mode: true}", "rollout_model.share=0.5"), "two engines generate together"),
        (("placement.engines=-1",), "placement.engines"),
        (("placement.engines=0", "placement.chunk=4"), "chunk is 4, but there are no engine processes"),
    ],
)  # fmt: skip
def test_engines_that_cannot_be_placed_are_refused_by_name(overrides: tuple[str, ...], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        small_config("placement.engines=2", *overrides)


@pytest.mark.parametrize(("ranks", "shares", "gpus"), [(2, True, "0120"), (2, False, "2012"), (1, True, "0120")])
def test_an_engine_that_sleeps_gets_the_gpu_of_a_rank(ranks, shares, gpus, monkeypatch) -> None:
    names = {"RANK": 0, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": ranks}
    for name, number in names.items():
        monkeypatch.setenv(name, str(number))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    assert [engine_gpu(number, shares)["CUDA_VISIBLE_DEVICES"] for number in range(4)] == list(gpus)
