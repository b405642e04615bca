"""Ray places ranks and engines, and starts again those that end; what its actors and the driver say to each other.

Ray's own processes take seconds to start, so one run sees everything that can end.
"""

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
    """Start a run by the command line; what remains of it and of Ray at the end is killed."""
    command = [sys.executable, "-m", "jackpot", "train", "quickstart", *SMALL, *settings, "--run", str(folder)]
    with folder.with_suffix(".txt").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        with suppress(psutil.NoSuchProcess):
            for descendant in family(process):
                descendant.kill()
        process.kill()
        process.wait()


def family(process: subprocess.Popen) -> list[psutil.Process]:
    """Return all processes that a process has started, and those that these have."""
    return psutil.Process(process.pid).children(recursive=True)


def wait_until(is_so: Callable[[], bool], process: subprocess.Popen, folder: Path) -> None:
    """Wait until something is so; that the process ends before, or `PATIENCE` does, fails the test."""
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert process.poll() is None, folder.with_suffix(".txt").read_text()
        assert time.monotonic() < deadline, folder.with_suffix(".txt").read_text()
        time.sleep(0.02)


def wait_for_line(iteration: int, process: subprocess.Popen, folder: Path) -> None:
    """Wait until the metrics of an iteration are written."""
    log = folder / "metrics.jsonl"
    wait_until(lambda: log.exists() and f'"iteration": {iteration},' in log.read_text(), process, folder)


def engines_of(process: subprocess.Popen) -> list[psutil.Process]:
    """Return the processes of a run's engine actors that are there now."""
    engines = []
    for descendant in family(process):
        with suppress(psutil.NoSuchProcess):  # it ends just now
            if " ".join(descendant.cmdline()).startswith("ray::EngineActor"):
                engines.append(descendant)
    return engines


@pytest.mark.slow
@needs_ray
def test_a_run_that_loses_an_actor_ends_bit_equal(tmp_path: Path) -> None:
    """2 ranks and 2 engines: an engine is killed after iteration 3, a rank after 4; the other engine hangs, and SIGTERM
    comes last.

    The run that loses none has the same ranks and engines, without Ray. All ports are on the loopback interface.
    """
    folder = tmp_path / "run"
    settings = ("checkpoint.every=3", "placement.engines=2", "placement.timeout=60")
    ray_settings = ("iterations=500", "placement.launcher=ray", "placement.ranks=2")

    with training(folder, *settings, *ray_settings) as process:
        wait_for_line(1, process, folder)
        connections = [connection for each in family(process) for connection in each.net_connections()]
        addresses = {each.laddr.ip.removeprefix("::ffff:") for each in connections if each.status == psutil.CONN_LISTEN}
        assert addresses <= {"127.0.0.1", "::1"}

        # an engine is killed
        wait_for_line(3, process, folder)
        engines = engines_of(process)
        assert len(engines) == 2
        engines[0].kill()

        # a rank is killed
        wait_for_line(4, process, folder)
        wait_until(lambda: '"peer_lost"' in (folder / "events.jsonl").read_text(), process, folder)
        os.kill(json.loads((folder / "ranks" / "1.json").read_text())["pid"], signal.SIGKILL)
        wait_until(lambda: "all ranks start again" in folder.with_suffix(".txt").read_text(), process, folder)
        wait_for_line(read_lines(folder)[-1]["iteration"] + 1, process, folder)
        wait_until(lambda: len(now := engines_of(process)) == 2 and engines[0] not in now, process, folder)
        assert engines[1] in engines_of(process)  # which lived on while all ranks started again

        # the other engine hangs
        engines[1].suspend()
        wait_until(lambda: "gave no sign of life" in (folder / "events.jsonl").read_text(), process, folder)
        wait_until(lambda: len(now := engines_of(process)) == 2 and engines[1] not in now, process, folder)

        process.terminate()
        assert process.wait(PATIENCE) == 0, folder.with_suffix(".txt").read_text()

    output = folder.with_suffix(".txt").read_text()
    assert "the same command continues" in output
    assert len(json.loads((folder / "environment.json").read_text())["starts"]) == 2
    last_iteration = read_lines(folder)[-1]["iteration"]
    assert 5 <= last_iteration < 500

    undisturbed = tmp_path / "undisturbed"
    outcome = run_ranks(2, small_config(*settings, f"iterations={last_iteration}"), undisturbed)

    assert outcome.codes == [0, 0], outcome.printed
    for role in ("policy", "rollout_model"):
        disturbed_weights, undisturbed_weights = weights(folder, role), weights(undisturbed, role)
        assert disturbed_weights.keys() == undisturbed_weights.keys()
        for name, tensor in disturbed_weights.items():
            assert torch.equal(tensor, undisturbed_weights[name]), name
    assert metrics(folder)[:-1] == metrics(undisturbed)[:-1]  # whose last iteration is evaluated


@pytest.mark.slow
@needs_ray
def test_nothing_stays_of_a_run_whose_driver_was_killed(tmp_path: Path) -> None:
    """Ranks and engines see the end of the driver within seconds; Ray's own agents, without a GPU, a little later."""
    folder = tmp_path / "run"
    settings = ("iterations=500", "placement.launcher=ray", "placement.ranks=2", "placement.engines=2")

    with training(folder, *settings) as process:
        wait_for_line(1, process, folder)
        descendants = family(process)
        actors = [each for each in descendants if "Actor" in " ".join(each.cmdline())]
        process.kill()
        _, living_actors = psutil.wait_procs(actors, timeout=10.0)
        _, living_descendants = psutil.wait_procs(descendants, timeout=60.0)

        names_of_living = [
            [" ".join(each.cmdline()).strip() for each in living] for living in (living_actors, living_descendants)
        ]
        for each in living_descendants:
            each.kill()

    assert len(actors) >= 4  # two ranks and two engines
    assert names_of_living == [[], []]


def test_a_far_actor_gets_weights_with_the_message(tmp_path: Path) -> None:
    """The actor's class, without Ray. An actor that was started again has not begun, and answers nothing."""
    sent_weights = dict(tiny_model(seed=1).named_parameters())
    weights_file = tmp_path / "weights"
    save_file({name: tensor.detach() for name, tensor in sent_weights.items()}, weights_file)
    data = np.fromfile(weights_file, np.uint8)
    hello = pack({"do": "hello"}).numpy()
    take = pack({"do": "take", "engine": "engine", "name": "engine 0", "version": [1, 1], "path": "/nowhere"}).numpy()
    engines: list[TransformersEngine] = []

    def make(setup: dict) -> dict[str, TransformersEngine]:
        engine = TransformersEngine(
            tiny_model(setup["seed"]), TransformersEngineConfig(), eos_token_ids=(EOS,), version=Version(-1, -1)
        )
        engines.append(engine)
        return {"engine": engine}

    actor = EngineActor(os.getcwd(), make)
    assert list(actor.answer(take, data)) == []

    actor.begin(pack({"seed": 0}).numpy())
    [answer] = actor.answer(take)  # without data: the path is on another machine
    assert "/nowhere" in unpack(torch.from_numpy(answer))["lost"]
    [answer] = actor.answer(take, data)
    assert unpack(torch.from_numpy(answer))["digest"] == weights_digest(sent_weights.items(), torch.float32)
    [answer] = actor.answer(hello)
    assert unpack(torch.from_numpy(answer))["held"] == {"engine": "engine 0"}

    actor.begin(pack({"seed": 0}).numpy())  # another rank 0, whose names of weights mean others
    [answer] = actor.answer(hello)
    assert unpack(torch.from_numpy(answer))["held"] == {}
    assert len(engines) == 1
    engines[0].close()


def test_without_ray_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed

    result = jackpot("train", "quickstart", "placement.launcher=ray", cwd=tmp_path)

    assert result.returncode == 2, result.stderr
    assert "pip install -c constraints.txt '.[ray]' in a clone of" in result.stderr
    assert "and start ranks with torchrun" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mode", ["", "disabled"])
def test_a_cluster_without_a_token_is_refused(mode: str, tmp_path: Path) -> None:
    cluster = {"RAY_ADDRESS": "10.0.0.1:6379", "RAY_AUTH_MODE": mode}

    result = jackpot("train", "quickstart", "placement.launcher=ray", cwd=tmp_path, **cluster)

    assert result.returncode == 2, result.stderr
    assert "without a token runs programs on it" in result.stderr


@pytest.mark.parametrize("kind", [RankError, WeightsError, type("Own", (WeightsError,), {})])
def test_an_error_of_a_rank_reaches_the_driver(kind: type[JackpotError]) -> None:
    """Classes of the user's own modules are not known there."""

    def fail() -> None:
        raise kind("why")

    name, text = RankActor().work({}, ".", fail)

    assert name == kind.__name__.replace("Own", "WeightsError")  # its nearest class that the package has
    assert issubclass(kind, getattr(errors, name))
    assert text == "why"


def test_ranks_get_the_variables_of_torchrun() -> None:
    """Two nodes; the ranks of each see its GPUs in the same order, and use that of their local number."""
    spots = [
        Spot(node="a", address="10.0.0.1", port=4000, gpus=["0"], pid=1),
        Spot(node="b", address="10.0.0.2", port=4000, gpus=["3"], pid=1),
        Spot(node="a", address="10.0.0.1", port=4001, gpus=["2"], pid=2),
    ]

    variables = environments(spots)

    assert [each["RANK"] for each in variables] == ["0", "1", "2"]
    assert [each["LOCAL_RANK"] for each in variables] == ["0", "0", "1"]
    assert [each["LOCAL_WORLD_SIZE"] for each in variables] == ["2", "1", "2"]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in variables] == ["0,2", "3", "0,2"]
    assert {each["MASTER_ADDR"] + ":" + each["MASTER_PORT"] for each in variables} == {"10.0.0.1:4000"}


def test_a_single_rank_of_ray_talks_over_the_loopback() -> None:
    spot = Spot(node="a", address="10.0.0.1", port=4000, gpus=["0"], pid=1)

    [variables] = environments([spot])

    assert variables["MASTER_ADDR"] == "127.0.0.1"
    assert variables["WORLD_SIZE"] == "1"


def test_engines_that_sleep_are_placed_with_ranks() -> None:
    settings = ("placement.launcher=ray", "placement.ranks=2", "placement.engines=3")

    # one entry for each rank and engine: the bundle that holds it
    assert bundles(small_config(*settings)) == [0, 1, 2, 3, 4]
    assert bundles(small_config(*settings, "engine.enable_sleep_mode=true")) == [0, 1, 0, 1, 0]


def test_an_actor_passes_on_the_first_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Ray; its host gives one sign and goes on when that has arrived."""
    monkeypatch.setattr("jackpot.launch.ray.SIGN_SECONDS", 0.01)
    has_arrived = threading.Event()
    actor = EngineActor(os.getcwd(), lambda setup: {})

    class BusyHost(EngineHost):
        def answer(self, message: torch.Tensor) -> torch.Tensor:
            self._sign()
            return pack(has_arrived.wait(10.0))

    actor._host = BusyHost({}, actor._sign)

    answers = []
    for answer in actor.answer(pack({}).numpy()):
        answers.append(answer)
        has_arrived.set()

    *signs, last_answer = answers
    assert [len(sign) for sign in signs] == [0]
    assert unpack(torch.from_numpy(last_answer)) is True
