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
from jackpot.config.config import Config, PlacementConfig
from jackpot.core.errors import ConfigError, EngineError
from jackpot.core.types import Prompt, Version
from jackpot.launch import engine_processes
from jackpot.launch.build import make_engines
from jackpot.launch.engine_processes import engine_gpu, engine_pool
from jackpot.launch.engines import engine_specs
from jackpot.launch.start import train_run
from jackpot.rollout.engines.base import Request
from jackpot.rollout.engines.hosted import EngineHost
from jackpot.rollout.engines.process import ProcessLink, make_starter
from jackpot.training.joint_learner import JointLearner


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> list[ProcessLink]:
    """The connections to the engine processes of the test's runs, which are forks of this process."""
    return fork_engines(monkeypatch)


def killing(links: list[ProcessLink], engine_after: dict[int, int]) -> Callable[[dict], None]:
    """Return a listener that kills an engine, by its index, when the line of an iteration is written."""

    def listen(line: dict) -> None:
        if line["iteration"] in engine_after:
            os.kill(links[engine_after[line["iteration"]]].child.pid, signal.SIGKILL)

    return listen


def assert_close_metrics(run: Path, other_run: Path) -> None:
    """All metrics but those of clocks are within 1e-3 of each other, in their own size where that is above 1."""
    for line, other_line in zip(metrics(run), metrics(other_run), strict=True):
        assert line.keys() == other_line.keys()
        for name, value in line.items():
            assert other_line[name] == (None if value is None else pytest.approx(value, rel=1e-3, abs=1e-3)), name


@pytest.mark.parametrize(("threads", "expected_threads"), [("auto", 1), ("3", 3)])
def test_engine_processes_get_the_threads_of_the_settings(
    threads: str, expected_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    setups = []

    def refusing_links(config: Config, setup: dict) -> dict:
        setups.append(setup)
        raise EngineError("no process is started here")

    monkeypatch.setattr(engine_processes, "process_links", refusing_links)
    config = small_config("placement.engines=2", f"threads={threads}")

    with pytest.raises(EngineError, match="no process"):
        engine_pool(config, engine_specs(config, config.model_paths()), torch.device("cpu"), Version(0, 0))

    assert [setup["threads"] for setup in setups] == [expected_threads]


def test_both_engines_generate_what_they_do_in_one_process(links: list[ProcessLink]) -> None:
    placed_config = small_config(SHORT, "placement.engines=2", "engine.draft={lam: 0.3}", "rollout_model.share=0.5")
    local_config = placed_config.model_copy(update={"placement": PlacementConfig()})
    paths = placed_config.model_paths()
    requests = [
        Request(
            uid=f"{seed}",
            prompt=Prompt(uid="", text="", answer="", token_ids=(5, 6)),
            seed=seed,
            sampling=placed_config.sampling,
            exact_drafts=seed < 2,
        )
        for seed in range(4)
    ]

    with ExitStack() as undo:
        local_engines, placed_engines = (
            make_engines(config, paths, torch.device("cpu"), Version(3, 4), undo)
            for config in (local_config, placed_config)
        )
        for local_engine, placed_engine in zip(local_engines, placed_engines, strict=True):
            rollout_pairs = zip(local_engine.generate(requests), placed_engine.generate(requests), strict=True)
            for local_rollout, placed_rollout in rollout_pairs:
                assert torch.equal(local_rollout.token_ids, placed_rollout.token_ids)
                assert torch.equal(local_rollout.versions, placed_rollout.versions)
                assert torch.equal(local_rollout.rollout_log_probs, placed_rollout.rollout_log_probs)
            assert local_engine.take_metrics() == placed_engine.take_metrics()

    assert len(links) == 2
    assert all(link.child is None for link in links)  # both have ended


@pytest.mark.slow
def test_a_run_does_not_depend_on_killed_or_more_engines(links, finished_run: FinishedRuns, tmp_path: Path) -> None:
    for engine_count, engine_after in ((1, {}), (2, {1: 0, 3: 1})):  # the second run loses each engine once
        config = small_config(*BRIEF, f"placement.engines={engine_count}", "placement.chunk=4")
        assert train_run(config, tmp_path / f"{engine_count}", killing(links, engine_after))
        links.clear()

    assert_same_run(tmp_path / "1", tmp_path / "2", ["policy", "rollout_model"])
    assert_close_metrics(tmp_path / "2", finished_run(*BRIEF))
    events = [json.loads(line) for line in (tmp_path / "2" / "events.jsonl").read_text().splitlines()]
    lost_peers = [event["peer"] for event in events if event["event"] == "peer_lost"]
    assert lost_peers == ["engine process 1", "engine process 2"]


@pytest.mark.slow
@pytest.mark.parametrize(("ahead", "drafts"), [(0, ("engine.draft={}", "rollout_model.share=0.25")), (1, ())])
def test_a_share_and_drafts_go_through_ranks_and_engines(ahead: int, drafts: tuple, links, finished_run, tmp_path):
    overrides = (*BRIEF, "rollout_model.share=0.5", *drafts, f"batch.ahead={ahead}")
    config = small_config(*overrides, "placement.engines=2")

    outcome = run_ranks(2, config, tmp_path / "run", killing(links, engine_after={2: 1}))

    assert outcome.codes == [0, 0], outcome.printed
    assert_close_metrics(tmp_path / "run", finished_run(*overrides))
    metric_names = read_lines(tmp_path / "run")[-1].keys()
    assert "reward/mean_by_policy" in metric_names
    assert ("draft/acceptance" in metric_names) == bool(drafts)


def write_notes(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Have ranks and engine processes, forks of this one, write what they do to a file, in its order."""

    def note(word: str) -> None:
        with path.open("a") as file:
            file.write(f"{word}\n")

    def replace_method(owner: type, name: str, label: Callable[..., str]) -> None:
        method = getattr(owner, name)

        def noting_method(self: object, *arguments: object, **keywords: object) -> object:
            note(f"{label(*arguments)} begins")
            result = method(self, *arguments, **keywords)
            note(f"{label(*arguments)} ends")
            return result

        monkeypatch.setattr(owner, name, noting_method)

    replace_method(EngineHost, "_do", lambda message: f"{message['do']} {message.get('engine', 'all')}")
    replace_method(JointLearner, "train", lambda *_: "train")
    replace_method(JointLearner, "release_memory", lambda *_: "release")


@pytest.mark.slow
def test_engines_that_share_sleep_while_two_ranks_train(links, tmp_path, monkeypatch) -> None:
    """Both ranks train between the sleep of both processes and the next weights, before which both release memory. The
    run is that of engines which never sleep, bit for bit."""
    overrides = (*BRIEF, "placement.engines=2", "placement.chunk=4")
    assert run_ranks(2, small_config(*overrides), tmp_path / "awake").codes == [0, 0]
    write_notes(monkeypatch, tmp_path / "notes")

    outcome = run_ranks(2, small_config(*overrides, "engine.enable_sleep_mode=true"), tmp_path / "asleep")

    assert outcome.codes == [0, 0], outcome.printed
    assert_same_run(tmp_path / "awake", tmp_path / "asleep", ["policy", "rollout_model"])

    notes = (tmp_path / "notes").read_text().splitlines()
    sleep_counts = {"engine": 0, "evaluation.engine": 0}  # processes in which each sleeps
    release_count = train_count = 0
    for note in notes:
        match note.split():
            case ["sleep", engine, "ends"]:
                sleep_counts[engine] += 1
            case ["train", "begins"]:
                assert min(sleep_counts.values()) == 2, notes
            case ["train", "ends"]:
                train_count += 1
                release_count = 0
            case ["release", "ends"]:
                release_count += 1
            case ["take", engine, "begins"]:  # the next weights
                assert train_count == 0 or release_count >= 2, notes
                sleep_counts[engine] = 0
            case ["generate", engine, "begins"]:
                assert sleep_counts[engine] == 0, notes
    assert train_count == 2 * 4  # ranks, and iterations
    assert notes.count("generate engine begins") > 4


@pytest.mark.slow
def test_a_run_goes_on_with_engine_processes_and_without(links, finished_run: FinishedRuns, tmp_path) -> None:
    """The processes read the models of the settings, and get the weights of the checkpoint before they generate."""
    continued_run = finished_run.copy(tmp_path / "run", *BRIEF, kill_after=2)
    unbroken_run = finished_run(*BRIEF)

    assert train_run(small_config(*BRIEF, "placement.engines=2"), continued_run, lambda line: None)

    assert_close_metrics(continued_run, unbroken_run)
    for role in ("policy", "rollout_model"):
        continued_weights, unbroken_weights = weights(continued_run, role), weights(unbroken_run, role)
        for name, tensor in continued_weights.items():
            assert torch.allclose(tensor, unbroken_weights[name], atol=1e-5), name


@pytest.mark.slow
def test_a_process_generates_what_this_does_and_ends_with_it(tmp_path: Path) -> None:
    """With the program that a run starts. A leader that is killed leaves neither a process nor memory."""
    reading, writing = os.pipe()
    leader = os.fork()
    if leader == 0:
        config = small_config("placement.engines=1", "placement.timeout=120")
        paths = config.model_paths()
        engine, _ = make_engines(config, paths, torch.device("cpu"), Version(0, 0), ExitStack())
        peer = engine._pool.pool.peers[0]
        os.write(writing, json.dumps([peer._link.child.pid, str(peer.weights["engine"].memory.path)]).encode())
        time.sleep(600)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        message = os.read(pipe.fileno(), 4096)
    engine_pid, memory_path = json.loads(message)
    assert "launch.engine_processes" in Path(f"/proc/{engine_pid}/cmdline").read_text()
    assert Path(memory_path).exists()

    engine_process = os.pidfd_open(engine_pid)
    os.kill(leader, signal.SIGKILL)
    os.waitpid(leader, 0)

    assert select.select([engine_process], [], [], 30.0)[0]  # it has ended within 30 s
    assert not Path(memory_path).exists()
    os.close(engine_process)


TORCHRUN = (  # variables that it sets
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"),
    *("ROLE_RANK", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"),
)


def test_a_process_that_a_rank_starts_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets nothing that torchrun sets: it would join the ranks, or share their cores out once more."""
    for name in TORCHRUN:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    program = "import json, os, socket, sys; connection = socket.socket(fileno=int(sys.argv[1])); "
    program += "connection.send(json.dumps(dict(os.environ)).encode())"

    async def child_environment() -> dict[str, str]:
        own_end, child_end = socket.socketpair()
        with own_end, child_end:
            child = await make_starter(program, {"CUDA_VISIBLE_DEVICES": "3"})(child_end)
            assert await child.wait() == 0
            return json.loads(own_end.recv(2**20))

    environment = asyncio.run(child_environment())

    assert not environment.keys() & set(TORCHRUN)
    assert environment["CUDA_VISIBLE_DEVICES"] == "3"
    assert environment["PATH"] == os.environ["PATH"]


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


# gpus: of the engines 0 to 3, one digit each
@pytest.mark.parametrize(("ranks", "shares", "gpus"), [(2, True, "0120"), (2, False, "2012"), (1, True, "0120")])
def test_an_engine_that_sleeps_gets_the_gpu_of_a_rank(ranks, shares, gpus, monkeypatch) -> None:
    variables = {"RANK": 0, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": ranks}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")

    assert [engine_gpu(index, shares)["CUDA_VISIBLE_DEVICES"] for index in range(4)] == list(gpus)
