"""One faulty message between the processes of a run never changes what the run makes.

Each kind of message is once the last of its sender, late beyond every timeout, cut, repeated and other bytes. Each time
the work ends bit-equal to that of undisturbed processes, or in an error of ours, after which the same work done again
ends so. No process stays.
"""

import asyncio
import itertools
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, suppress
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers.engines.conformance import NEW, OLD
from helpers.engines.hosts import forking, make_sleeper, pool_of
from helpers.engines.reference import EOS, save_tiny_model, tiny_model, tiny_request
from helpers.engines.scripted_server import ScriptedServer
from helpers.engines.sglang_server import SGLangStandIn
from helpers.led import Ended, fork_ranks
from helpers.runs import BRIEF, assert_same_run, small_config
from helpers.taps import FAULTS, HTTPTap, Tap, TappedActor, TCPTap, tap_ranks, tapped
from jackpot.config.engines import SGLangServerEngineConfig, VLLMServerEngineConfig
from jackpot.core.errors import JackpotError
from jackpot.core.process_rank import process_rank
from jackpot.core.types import TOKEN_COLUMNS
from jackpot.launch.ranks import follow_leader, leading
from jackpot.launch.ray import EngineActor, RayLink, _cluster
from jackpot.launch.start import train_run
from jackpot.rollout.engines.base import Engine
from jackpot.rollout.engines.process import ProcessLink
from jackpot.rollout.engines.servers.http import open_session
from jackpot.rollout.engines.sglang.server_engine import SGLangServerEngine
from jackpot.rollout.engines.vllm.client import VLLMClient
from jackpot.rollout.engines.vllm.server_engine import VLLMServerEngine

LIMIT = 120  # seconds of a piece of work, after which it counts as hanging
GRACE = 10.0  # seconds that other processes have to end, once the first has
Work = Callable[[Tap, Path], list]
SIZES = {"max_new_tokens": 8, "num_top_log_probs": 3}
NO_FAULT = Tap("", "none")
SLOW, SWEEP = [pytest.mark.slow], [pytest.mark.slow, pytest.mark.sweep]
WAITS = ("late", "stalled")  # faults that last as long as a time limit


def fault_cases(kinds: Sequence[str], quick: Collection[tuple[str, str]], swept: Collection[str] = ()) -> list:
    """Return each kind of message with each fault: all but the `quick` ones are slow, those that wait in the sweep.

    Args:
        swept: kinds whose faults are all in the sweep.
    """

    def marks(kind: str, fault: str) -> list:
        return SWEEP if fault in WAITS or kind in swept else SLOW

    cases = itertools.product(kinds, FAULTS)
    return [pytest.param(*case, marks=[] if case in quick else marks(*case), id=" ".join(case)) for case in cases]


def outcome(work: Work, tap: Tap, folder: Path) -> tuple[Ended, list | None]:
    """Work in a fork; return how it ended, and what it made."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)

    def limited(rank: int) -> None:
        signal.alarm(LIMIT)
        result.write_text(json.dumps(work(tap, folder)))

    ending = fork_ranks(1, limited, folder / "output")
    return ending, json.loads(result.read_text()) if result.exists() else None


def healed_work(work: Work, tap: Tap, folder: Path) -> tuple[str, list | None]:
    """Work with a fault, then again where that ended it; return how the first time ended, and what was made at last."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    tap.note = folder / "happened"

    ending, results = outcome(work, tap, folder)
    [code], [output] = ending.codes, ending.printed
    sender_dies = tap.kind[:6] not in ("answer", "sign") and tap.fault in ("last", "cut")

    assert code in (0, 2, -signal.SIGKILL), ending
    assert "Traceback" not in output, ending
    assert (code == -signal.SIGKILL) == sender_dies, ending
    assert tap.note.exists(), "there was no such message"
    assert_processes_gone(folder)

    if code:
        ending, results = outcome(work, NO_FAULT, folder)
        assert ending.codes == [0], ending
    return output.strip() if code else "at once", results


def assert_processes_gone(folder: Path) -> None:
    """No process whose id is noted in a folder is there after a while."""
    deadline = time.monotonic() + GRACE
    for line in (folder / "processes").read_text().split() if (folder / "processes").exists() else ():
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(int(line))
            while process.status() != psutil.STATUS_ZOMBIE:
                assert time.monotonic() < deadline, f"process {line} stays"
                time.sleep(0.05)


def results_of_use(engine: Engine, sleep_and_score: bool = False) -> list:
    """Have an engine do what a run asks of it, sleep and scores too if wanted; return all that it made.

    Groups of two share a prompt.
    """
    results = []
    for seed in range(3):
        if seed:
            if sleep_and_score:
                engine.sleep()
            results.append(engine.update_weights(tiny_model(seed=seed).named_parameters(), NEW))
        rollouts = engine.generate([tiny_request(f"{index}", 2 + index // 2, index, **SIZES) for index in range(6)])
        results += [getattr(rollout, name).tolist() for rollout in rollouts for name in TOKEN_COLUMNS]
        results += [scores.tolist() for scores in engine.score(rollouts[:2], 1.0)] if sleep_and_score else []
    return results


# Engines in processes of their own

ASKS = ("hello", "take", "generate", "score", "sleep")
TO_ENGINES = ("setup", *ASKS)
FROM_ENGINES = ("sign", *(f"answer to {ask}" for ask in ASKS))
PROCESSES = fault_cases((*TO_ENGINES, *FROM_ENGINES), {("generate", "repeated"), ("answer to generate", "fuzzed")})


def use_process(tap: Tap, folder: Path) -> list:
    """Use an engine in a process of its own, of which there is one."""
    start = tapped(forking(make_sleeper), tap)

    async def start_and_note(connection):
        child = await start(connection)
        with (folder / "processes").open("a") as file:
            file.write(f"{child.pid}\n")
        return child

    links = {"host": ProcessLink(start_and_note, str(folder.parent / "model"), silence=1.5)}
    pool = pool_of(links, folder.parent / "model", OLD, chunk=3, patience=6.0)
    with closing(pool.engines["engine"]) as engine:
        return results_of_use(engine, sleep_and_score=True)


# Engine actors of Ray, which takes long to start: all share one

ALTERED_CASES = [*itertools.product(("begin", *ASKS), ("repeated", "fuzzed", "noise")), ("sign", "noise")]
ALTERED_CASES += itertools.product((f"answer to {ask}" for ask in ASKS), ("fuzzed", "noise"))
LOST_CASES = [("answer to begin", "last"), ("answer to take", "last"), ("sign", "cut"), ("answer to generate", "cut")]
ACTORS = {"altered": ALTERED_CASES, "lost": LOST_CASES, "late": [("generate", "late"), ("answer to take", "late")]}
SILENCE = 20.0  # seconds, in which a busy machine starts an actor again


def use_actor(ray: Any, tap: Tap, model: Path) -> list:
    """Use the engine actor of this process's Ray."""

    def kill() -> None:
        for process in psutil.Process().children(recursive=True):
            if process.name().startswith("ray::EngineActor"):
                process.kill()

    TappedActor(actor := ray.get_actor("engine"), tap, kill)
    links = {"actor": RayLink(actor, str(model), SILENCE)}
    with closing(pool_of(links, model, OLD, chunk=3, patience=3 * SILENCE).engines["engine"]) as engine:
        results = results_of_use(engine, sleep_and_score=True)
        assert not [event for event in engine.take_events() if "\n" in event.get("why", "")]
        return results


def try_actors(model: Path, note: Callable[[str, str], None]) -> None:
    """Start Ray, and note how each case ends: equal to undisturbed work, or with an error and, done again, equal."""
    with _cluster(small_config("placement.launcher=ray", "placement.engines=1")) as ray:
        options = {"name": "engine", "max_restarts": -1}
        actor = ray.remote(EngineActor).options(**options).remote(os.getcwd(), make_sleeper)
        ray.get(actor.node.remote())
        expected_results = use_actor(ray, NO_FAULT, model)
        for kind, fault in itertools.chain(*ACTORS.values()):
            tap = Tap(kind, fault, late=SILENCE + 3.0)
            try:
                ending = "equal" if use_actor(ray, tap, model) == expected_results else "other"
            except JackpotError as error:
                ending = f"{error}, again {'equal' if use_actor(ray, NO_FAULT, model) == expected_results else 'other'}"
            note(f"{kind} {fault}", ending if tap.seen[kind] else "no such message")


@pytest.fixture(scope="module")
def actors(home: Path) -> dict[str, str]:
    """How the work of engine actors ended, by kind and fault of a message; a case that hangs has no entry."""
    (home / "actors").touch()

    def note(case: str, ending: str) -> None:
        with (home / "actors").open("a") as file:
            file.write(json.dumps([case, ending]) + "\n")

    def work(rank: int) -> None:
        signal.alarm(5 * LIMIT)
        try_actors(home / "model", note)

    ending = fork_ranks(1, work, home / "output")
    cases = dict(map(json.loads, (home / "actors").read_text().splitlines()))
    assert ending.codes == [0], (ending, cases)
    return cases


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed; make test-all installs it")
@pytest.mark.parametrize("faults", ACTORS)
def test_an_engine_actor_heals_from_faulty_messages(faults: str, actors: dict[str, str]) -> None:
    for case in map(" ".join, ACTORS[faults]):
        ending = actors[case]
        assert ending.endswith("equal"), (case, ending)
        assert "\n" not in ending, (case, ending)
        # only a `begin` of other bytes ends the work with an error before it is done again
        assert (ending == "equal") == (case not in ("begin fuzzed", "begin noise")), (case, ending)


# Servers

ROUTES = ("/v1/models", "/server_info", "get_model_inspection", "/weight_checker", "/weight_info", "/pause")
ROUTES += ("reload_weights", "/reset_prefix_cache", "/update_weight_version", "/resume", "/v1/completions")
SERVERS = fault_cases(
    (*ROUTES, *(f"answer to {route}" for route in ROUTES)), {("answer to /v1/completions", "repeated")}
)
SGLANG_ROUTES = ("/model_info", "/server_info", "/weights_checker", "/update_weights_from_disk", "/generate")
SGLANG_KINDS = (*SGLANG_ROUTES, *(f"answer to {route}" for route in SGLANG_ROUTES))
SGLANG_SERVERS = fault_cases(SGLANG_KINDS, (), swept=[kind for kind in SGLANG_KINDS if "/generate" not in kind])


def use_server(tap: Tap, folder: Path, program: str = "vllm") -> list:
    """Use the server of a program, whose address a folder has, behind a tap."""
    url, pid = (folder.parent / f"{program} address").read_text().split()
    proxy = HTTPTap(int(url.rpartition(":")[2]), tap, lambda: os.kill(int(pid), signal.SIGUSR1))
    settings = {"weights_folder": str(folder / "weights"), "dtype": "fp32", "max_num_seqs": 2, "timeout": 1.0}
    make, configure = PROGRAMS[program]
    config = configure(urls=[f"http://127.0.0.1:{proxy.port}"], connect_timeout=6.0, **settings)
    with closing(make(tiny_model(seed=0), config, eos_token_ids=(EOS,), version=OLD)) as engine:
        return results_of_use(engine)


PROGRAMS = {
    "vllm": (VLLMServerEngine, VLLMServerEngineConfig),
    "sglang": (SGLangServerEngine, SGLangServerEngineConfig),
}
use_sglang = partial(use_server, program="sglang")
USES = {"process": use_process, "server": use_server, "sglang": use_sglang}


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, ScriptedServer]]:
    """A server of each program; SIGUSR1 has them start again."""
    servers = {"vllm": ScriptedServer(), "sglang": SGLangStandIn()}
    previous_handler = signal.signal(signal.SIGUSR1, lambda *_: [server.restart() for server in servers.values()])
    yield servers
    signal.signal(signal.SIGUSR1, previous_handler)
    for server in servers.values():
        server.close()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, servers: dict[str, ScriptedServer]) -> Path:
    """A folder with a tiny model and the addresses of the servers."""
    home = tmp_path_factory.mktemp("messages")
    save_tiny_model(home / "model", seed=0)
    for program, server in servers.items():
        (home / f"{program} address").write_text(f"{server.url} {os.getpid()}")
    return home


@pytest.fixture(scope="module")
def undisturbed_results(home: Path) -> Callable[[str], list]:
    """What undisturbed work makes, by the other side."""

    @cache
    def results_of(name: str) -> list:
        (home / name).mkdir()
        ending, results = outcome(USES[name], NO_FAULT, home / name)
        assert ending.codes == [0], ending
        return results

    return results_of


@pytest.mark.parametrize(("kind", "fault"), PROCESSES)
def test_an_engine_process_heals_from_a_faulty_message(kind: str, fault: str, home: Path, undisturbed_results) -> None:
    expected_results = undisturbed_results("process")

    ending, results = healed_work(use_process, Tap(kind, fault), home / "process")

    print(ending)
    assert results == expected_results


@pytest.mark.parametrize(("kind", "fault"), SERVERS)
def test_work_with_a_server_heals_from_a_faulty_message(kind: str, fault: str, home: Path, undisturbed_results) -> None:
    expected_results = undisturbed_results("server")

    ending, results = healed_work(use_server, Tap(kind, fault), home / "server-")

    print(ending)
    assert results == expected_results


@pytest.mark.parametrize(("kind", "fault"), SGLANG_SERVERS)
def test_work_with_an_sglang_server_heals_from_a_faulty_message(
    kind: str, fault: str, home: Path, undisturbed_results
) -> None:
    expected_results = undisturbed_results("sglang")

    ending, results = healed_work(use_sglang, Tap(kind, fault), home / "sglang-")

    print(ending)
    assert results == expected_results


def test_an_answer_that_comes_twice_does_not_answer_the_next(servers: dict[str, ScriptedServer]) -> None:
    tap = HTTPTap(int(servers["vllm"].url.rpartition(":")[2]), Tap("answer to /v1/completions", "repeated"))
    url = f"http://127.0.0.1:{tap.port}"

    async def answers() -> list[list[int]]:
        async with open_session([url], "VLLM_API_KEY") as session:
            client = VLLMClient(url, session, timeout=10.0)
            token_ids = []
            for seed in (1, 2):
                body = {"prompt": [2, 3], "max_tokens": 2, "logprobs": 1, "seed": seed}
                token_ids.append(await client.complete(body, lambda answer: answer["choices"][0]["token_ids"]))
                await asyncio.sleep(0.3)
            return token_ids

    assert asyncio.run(answers()) == [[3, 4], [4, 5]]  # the stand-in counts up from 2 + seed


# Ranks

COMMANDS = ("build", "score", "train", "values", "keep_weights", "weights", "release_memory", "save")
FROM_LEADER, FROM_FOLLOWER = ("setup", *COMMANDS, "sign", "end"), tuple(f"reply to {name}" for name in COMMANDS)
SAMPLE = {("setup", "fuzzed"), ("train", "repeated"), ("score", "noise"), ("build", "cut")}
SAMPLE |= {("reply to train", "fuzzed"), ("reply to score", "repeated"), ("reply to release_memory", "noise")}
SAMPLE |= {("score", "late"), ("train", "stalled")}
RANKS = [
    pytest.param(*row, marks=SLOW if row in SAMPLE else SWEEP, id=" ".join(row))
    for row in itertools.product((*FROM_LEADER, *FROM_FOLLOWER), FAULTS)
]
SETTINGS = ("iterations=2", "checkpoint.every=1", "batch.ahead=1", "engine.enable_sleep_mode=true")
CRITIC = ("objective.advantage=gae", "critic={optimizer: {learning_rate: 1e-3}}")
ROLES = ["policy", "rollout_model", "critic"]


def train(folder: Path, tap: Tap = NO_FAULT) -> Ended:
    """Type the command of a run of two ranks. Where nothing waits, a busy machine must not be taken for a lost rank."""
    timeout = 5 if tap.fault in WAITS else 30
    config = small_config(*BRIEF, *SETTINGS, *CRITIC, f"placement.timeout={timeout}")

    def work(rank: int) -> None:
        signal.alarm(LIMIT)
        if rank:
            if tap.kind in ("sent", "received"):
                os.environ["MASTER_PORT"] = str(TCPTap(int(os.environ["MASTER_PORT"]), tap).port)
            follow_leader(process_rank())
            return
        with leading(config, folder) as build:
            train_run(config, folder, lambda line: None, build=build)

    return fork_ranks(2, work, folder.with_name(f"{folder.name}-output"), patience=4 * GRACE)


@pytest.fixture(scope="module")
def undisturbed_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks without a fault."""
    folder = tmp_path_factory.mktemp("ranks") / "whole"
    ending = train(folder)
    assert ending.codes == [0, 0], ending
    return folder


def train_tapped(folder: Path, tap: Tap) -> None:
    """Type a command whose ranks are tapped, and again where that ended it; check how the ranks ended."""
    tap.note = folder.with_name("happened")
    tap.note.unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        tap_ranks(patch, tap)
        ending = train(folder, tap)

    assert tap.note.exists(), "there was no such message"
    rank_kills = [code == -signal.SIGKILL for code in ending.codes]
    sender_dies = tap.fault in ("last", "cut")
    assert rank_kills == [sender_dies and tap.kind in FROM_LEADER, sender_dies and tap.kind not in FROM_LEADER], ending

    for code, printed in zip(ending.codes, ending.printed, strict=True):
        assert code in (0, 2, -signal.SIGKILL), ending
        assert "Traceback" not in printed, ending
    print(ending.codes, [output.strip().splitlines()[-1:] for output in ending.printed])
    if ending.codes != [0, 0]:
        second_ending = train(folder)
        assert second_ending.codes == [0, 0], second_ending


@pytest.mark.parametrize(("kind", "fault"), RANKS)
def test_a_run_of_two_ranks_heals_from_a_faulty_message(
    kind: str, fault: str, undisturbed_run: Path, tmp_path: Path
) -> None:
    train_tapped(tmp_path / "run", Tap(kind, fault, late=12.0))
    assert_same_run(undisturbed_run, tmp_path / "run", ROLES)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["shut", "stalled"])
def test_a_run_heals_from_a_lost_gloo_connection_within_a_sum(
    fault: str, undisturbed_run: Path, tmp_path: Path
) -> None:
    train_tapped(tmp_path / "run", Tap("connection", fault, number=2))
    assert_same_run(undisturbed_run, tmp_path / "run", ROLES)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("message_index", range(1, 9))
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", ["sent", "received"])
def test_a_run_heals_from_faulty_bytes_of_the_rendezvous_store(
    kind: str, fault: str, message_index: int, undisturbed_run: Path, tmp_path: Path
) -> None:
    train_tapped(tmp_path / "run", Tap(kind, fault, number=message_index, late=12.0))
    assert_same_run(undisturbed_run, tmp_path / "run", ROLES)
