"""Ray places ranks and engines. Its own processes take seconds to start, so one run sees everything that can end."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import save_file

from helpers.commands import jackpot
from helpers.engines.reference import EOS, tiny_model
from helpers.led import run_ranks
from helpers.runs import SMALL, metrics, read_lines, small_config, weights
from jackpot.config.engines import TransformersEngineConfig
from jackpot.core import errors
from jackpot.core.digest import weights_digest
from jackpot.core.errors import JackpotError, RankError, WeightsError
from jackpot.core.messages import pack, unpack
from jackpot.core.types import Version
from jackpot.launch.ray import EngineActor, RankActor, Spot, bundles, environments
from jackpot.rollout.engines.hosted import EngineHost
from jackpot.rollout.engines.transformers.engine import TransformersEngine

PATIENCE = 400.0  # seconds; on a busy machine Ray takes a minute to start
has_ray = importlib.util.find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not has_ray, reason="ray is not installed; make test-all installs it")


@contextmanager
def training(folder: Path, *settings: str) -> Iterator[subprocess.Popen]:
    """A run that the command line starts; what is left of it and of Ray at the end is killed."""
    command = [sys.executable, "-m", "jackpot", "train", "quickstart", *SMALL, *settings, "--run", str(folder)]
    with folder.with_suffix(".txt").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        with suppress(psutil.NoSuchProcess):
            for one in family(process):
                one.kill()
        process.kill()
        process.wait()


def family(process: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def wait_until(is_so: Callable[[], bool], process: subprocess.Popen, folder: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert process.poll() is None and time.monotonic() < deadline, folder.with_suffix(".txt").read_text()
        time.sleep(0.02)


def wait_for_line(iteration: int, process: subprocess.Popen, folder: Path) -> None:
    log = folder / "metrics.jsonl"
    wait_until(lambda: log.exists() and f'"iteration": {iteration},' in log.read_text(), process, folder)


def engines_of(process: subprocess.Popen) -> list[psutil.Process]:
    found = []
    for one in family(process):
        with suppress(psutil.NoSuchProcess):  # it ends just now
            if " ".join(one.cmdline()).startswith("ray::EngineActor"):
                found.append(one)
    return found


@pytest.mark.slow
@needs_ray
def test_a_run_that_loses_an_actor_ends_bit_equal(tmp_path: Path) -> None:
    """2 ranks and 2 engines: an engine is killed after iteration 3, a rank after 4; the other engine hangs, and SIGTERM
    comes last.

    The run that loses none has the same ranks and engines, without Ray. All ports are on the loopback interface.
    """
    folder = tmp_path / "run"
    settings = ("checkpoint.every=3", "placement.engines=2", "placement.timeout=60")
    placed = ("iterations=500", "placement.launcher=ray", "placement.ranks=2")
    with training(folder, *settings, *placed) as process:
        wait_for_line(1, process, folder)
        started = family(process)
        open_ports = [one for each in started for one in each.net_connections() if one.status == psutil.CONN_LISTEN]
        assert {one.laddr.ip.removeprefix("::ffff:") for one in open_ports} <= {"127.0.0.1", "::1"}
        wait_for_line(3, process, folder)
        engines = engines_of(process)
        assert len(engines) == 2
        engines[0].kill()
        wait_for_line(4, process, folder)
        wait_until(lambda: '"peer_lost"' in (folder / "events.jsonl").read_text(), process, folder)
        os.kill(json.loads((folder / "ranks" / "1.json").read_text())["pid"], signal.SIGKILL)
        wait_until(lambda: "all ranks start again" in folder.with_suffix(".txt").read_text(), process, folder)
        wait_for_line(read_lines(folder)[-1]["iteration"] + 1, process, folder)
        wait_until(lambda: len(back := engines_of(process)) == 2 and engines[0] not in back, process, folder)
        assert engines[1] in engines_of(process)  # which lived on while all ranks started again
        engines[1].suspend()
        wait_until(lambda: "gave no sign of life" in (folder / "events.jsonl").read_text(), process, folder)
        wait_until(lambda: len(back := engines_of(process)) == 2 and engines[1] not in back, process, folder)
        process.terminate()
        assert process.wait(PATIENCE) == 0, folder.with_suffix(".txt").read_text()
    output = folder.with_suffix(".txt").read_text()
    assert "the same command continues" in output
    assert len(json.loads((folder / "environment.json").read_text())["starts"]) == 2
    newest = read_lines(folder)[-1]["iteration"]
    assert 5 <= newest < 500
    ended = run_ranks(2, small_config(*settings, f"iterations={newest}"), tmp_path / "undisturbed")
    assert ended.codes == [0, 0], ended.printed
    for role in ("policy", "rollout_model"):
        ours, theirs = weights(folder, role), weights(tmp_path / "undisturbed", role)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert metrics(folder)[:-1] == metrics(tmp_path / "undisturbed")[:-1]  # its last iteration is evaluated


@pytest.mark.slow
@needs_ray
def test_nothing_stays_of_a_run_whose_driver_was_killed(tmp_path: Path) -> None:
    """Ranks and engines see the end of the driver within seconds; Ray's own agents, without a GPU, a little later."""
    folder = tmp_path / "run"
    settings = ("iterations=500", "placement.launcher=ray", "placement.ranks=2", "placement.engines=2")
    with training(folder, *settings) as process:
        wait_for_line(1, process, folder)
        started = family(process)
        actors = [one for one in started if "Actor" in " ".join(one.cmdline())]
        process.kill()
        _, alive = psutil.wait_procs(actors, timeout=10.0)
        _, others = psutil.wait_procs(started, timeout=60.0)

        names = [[" ".join(one.cmdline()).strip() for one in left] for left in (alive, others)]
        for one in others:
            one.kill()

    assert len(actors) >= 4  # two ranks and two engines
    assert names == [[], []]


def test_a_far_actor_gets_weights_with_the_message(tmp_path: Path) -> None:
    """The actor's class, without Ray. An actor that was started again has not begun, and answers nothing."""
    sent = dict(tiny_model(seed=1).named_parameters())
    save_file({name: tensor.detach() for name, tensor in sent.items()}, file := tmp_path / "weights")
    take = {"do": "take", "engine": "engine", "name": "engine 0", "version": [1, 1], "path": "/nowhere"}
    message, data = pack(take).numpy(), np.fromfile(file, np.uint8)

    def make(setup: dict) -> dict[str, TransformersEngine]:
        made = TransformersEngine(
            tiny_model(setup["seed"]), TransformersEngineConfig(), eos_token_ids=(EOS,), version=Version(-1, -1)
        )
        made_engines.append(made)
        return {"engine": made}

    made_engines: list[TransformersEngine] = []
    actor = EngineActor(os.getcwd(), make)
    assert list(actor.answer(message, data)) == []
    actor.begin(pack({"seed": 0}).numpy())
    [lost] = actor.answer(message)
    assert "/nowhere" in unpack(torch.from_numpy(lost))["lost"]
    [answer] = actor.answer(message, data)
    assert unpack(torch.from_numpy(answer))["digest"] == weights_digest(sent.items(), torch.float32)
    hello = pack({"do": "hello"}).numpy()
    [answer] = actor.answer(hello)
    assert unpack(torch.from_numpy(answer))["held"] == {"engine": "engine 0"}
    actor.begin(pack({"seed": 0}).numpy())  # another rank 0, whose names of weights mean others
    [answer] = actor.answer(hello)
    assert unpack(torch.from_numpy(answer))["held"] == {} and len(made_engines) == 1
    made_engines[0].close()


def test_without_ray_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    result = jackpot("train", "quickstart", "placement.launcher=ray", cwd=tmp_path)
    command = "pip install -c constraints.txt '.[ray]'"
    assert result.returncode == 2 and f"{command} in a clone of" in result.stderr, result.stderr
    assert "and start ranks with torchrun" in result.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize("mode", ["", "disabled"])
def test_a_cluster_without_a_token_is_refused(mode: str, tmp_path: Path) -> None:
    cluster = {"RAY_ADDRESS": "10.0.0.1:6379", "RAY_AUTH_MODE": mode}
    result = jackpot("train", "quickstart", "placement.launcher=ray", cwd=tmp_path, **cluster)
    assert result.returncode == 2 and "without a token runs programs on it" in result.stderr, result.stderr


@pytest.mark.parametrize("kind", [RankError, WeightsError, type("Own", (WeightsError,), {})])
def test_an_error_of_a_rank_reaches_the_driver(kind: type[JackpotError]) -> None:
    """Classes of the user's own modules are not known there."""

    def fail() -> None:
        raise kind("why")

    name, text = RankActor().work({}, ".", fail)
    assert issubclass(kind, getattr(errors, name)) and name == kind.__name__.replace("Own", "WeightsError")
    assert text == "why"


def test_ranks_get_the_variables_of_torchrun() -> None:
    """Two nodes; the ranks of each see its GPUs in the same order, and use that of their local number."""
    spots = [Spot(node, ip, 4000, [gpu], 1) for node, ip, gpu in (("a", "10.0.0.1", "0"), ("b", "10.0.0.2", "3"))]
    spots.append(Spot("a", "10.0.0.1", 4001, ["2"], 2))
    found = environments(spots)
    assert [one["RANK"] + one["LOCAL_RANK"] + one["LOCAL_WORLD_SIZE"] for one in found] == ["002", "101", "212"]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == ["0,2", "3", "0,2"]
    assert {one["MASTER_ADDR"] + ":" + one["MASTER_PORT"] for one in found} == {"10.0.0.1:4000"}
    alone = environments(spots[:1])
    assert alone[0]["MASTER_ADDR"] == "127.0.0.1" and alone[0]["WORLD_SIZE"] == "1"


def test_engines_that_sleep_are_placed_with_ranks() -> None:
    placed = ("placement.launcher=ray", "placement.ranks=2", "placement.engines=3")
    assert bundles(small_config(*placed)) == [0, 1, 2, 3, 4]
    assert bundles(small_config(*placed, "engine.enable_sleep_mode=true")) == [0, 1, 0, 1, 0]


def test_an_actor_passes_on_the_first_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Ray; its host gives one sign and goes on when that has arrived."""
    monkeypatch.setattr("jackpot.launch.ray.SIGN_SECONDS", 0.01)
    has_arrived = threading.Event()
    actor = EngineActor(os.getcwd(), lambda setup: {})

    class Busy(EngineHost):
        def answer(self, message: torch.Tensor) -> torch.Tensor:
            self._sign()
            return pack(has_arrived.wait(10.0))

    actor._host = Busy({}, actor._sign)
    answers = []
    for answer in actor.answer(pack({}).numpy()):
        answers.append(answer)
        has_arrived.set()
    assert [len(one) for one in answers[:-1]] == [0] and unpack(torch.from_numpy(answers[-1])) is True
