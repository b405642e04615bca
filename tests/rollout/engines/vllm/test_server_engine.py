"""`VLLMServerEngine` with real vLLM servers in other processes: the shared suite, servers that die, wrong servers."""

import json
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm runs this in .venv-vllm")

from helpers.engines.conformance import NEW, OLD, NumberConformance, QueueConformance
from helpers.engines.joint_run import check_joint_run
from helpers.engines.quantized_reference import QuantizedReference
from helpers.engines.reference import Reference, save_tiny_model, tiny_model, tiny_prompt, tiny_request
from helpers.engines.servers import VLLMServer, save_untied, started
from jackpot.config.engines import VLLMServerEngineConfig
from jackpot.config.sampling import Sampling
from jackpot.core.errors import EngineError
from jackpot.core.types import Rollout, Version
from jackpot.launch.engines import make_engine
from jackpot.rollout.engines.base import Request
from jackpot.rollout.engines.vllm.server_engine import VLLMServerEngine

pytestmark = pytest.mark.vllm


LONG = Sampling(max_new_tokens=50, num_top_log_probs=20)


@pytest.fixture(scope="session")
def untied_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_untied(folder, tmp_path_factory.mktemp("models") / "untied")


@pytest.fixture(scope="session")
def servers(untied_folder: Path) -> Iterator[tuple[VLLMServer, ...]]:
    """Start two servers for all tests that kill none."""
    with started(VLLMServer(untied_folder), VLLMServer(untied_folder)) as server_pair:
        yield server_pair


def make_server_engine(
    folder: Path,
    weights_folder: Path,
    *servers: VLLMServer,
    version: Version = OLD,
    **settings,
) -> VLLMServerEngine:
    """Return an engine of these servers, which hands them new weights in `weights_folder`."""
    urls = tuple(server.url for server in servers)
    config = VLLMServerEngineConfig(
        urls=urls, weights_folder=str(weights_folder), **{"max_num_seqs": 32, "connect_timeout": 120.0} | settings
    )
    return make_engine(config, str(folder), torch.device("cpu"), version)


class OnServers(QueueConformance):
    """The shared checks on engines that share the servers of the class; one engine exists at a time."""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def set_servers(cls, servers, tmp_path_factory) -> None:
        cls.servers = servers[: cls.count]
        cls.weights_folder = tmp_path_factory.mktemp("weights")
        cls.make_engine = staticmethod(
            lambda folder, version: make_server_engine(folder, cls.weights_folder, *cls.servers, version=version)
        )

    @staticmethod
    def make_engine(folder: Path, version: Version) -> VLLMServerEngine:
        raise NotImplementedError("set_servers() puts the real one here")


class TestOneServer(OnServers, NumberConformance):
    count = 1


class TestTwoServers(OnServers):
    count = 2


def test_no_cached_state_of_old_weights_is_used(servers, folder, new_folder, tmp_path):
    engine = make_server_engine(folder, tmp_path, servers[0])
    new_reference = Reference(new_folder, torch.float32)
    prompt = tiny_prompt(50)  # longer than a block of the cache
    requests = [tiny_request(f"{i}", prompt=prompt, seed=i) for i in range(8)]

    engine.generate(requests)
    engine.update_weights(new_reference.model.named_parameters(), NEW)

    check_log_probs(engine.generate(requests), new_reference)

    engine.close()


def test_int8_weights_alone_need_no_other_server(servers, folder, new_folder, tmp_path):
    engine = make_server_engine(folder, tmp_path, servers[0], quantization="int8_w8a16")
    check_log_probs(engine.generate(long_requests(8)), QuantizedReference(folder, "int8_w8a16", None))

    engine.update_weights(tiny_model(seed=1).named_parameters(), NEW)
    check_log_probs(engine.generate(long_requests(8)), QuantizedReference(new_folder, "int8_w8a16", None))

    engine.close()


# Servers that die


@pytest.fixture(scope="module")
def mortal_servers(untied_folder: Path) -> Iterator[tuple[VLLMServer, ...]]:
    """Start two servers for the tests that kill some."""
    with started(VLLMServer(untied_folder), VLLMServer(untied_folder)) as server_pair:
        yield server_pair


def long_requests(count: int) -> list[Request]:
    """Return requests for responses of 50 tokens."""
    return [Request(uid=f"{i}", prompt=tiny_prompt(2 + i % 9), seed=i, sampling=LONG) for i in range(count)]


def check_log_probs(rollouts: list[Rollout], reference: Reference) -> None:
    """Compare log-probs as the suite does, for responses sampled without truncation."""
    TestOneServer().check_log_probs(rollouts, reference, LONG)


def test_a_server_killed_while_it_writes_costs_nothing_but_time(mortal_servers, folder, tmp_path):
    victim, survivor = mortal_servers
    engine = make_server_engine(folder, tmp_path, victim, survivor)
    requests = long_requests(300)

    engine.submit(requests)
    rollouts = engine.collect(20)
    victim.kill()
    rollouts += engine.collect(300)

    assert sorted(rollout.uid for rollout in rollouts) == sorted(request.uid for request in requests)
    check_log_probs(rollouts, Reference(folder, torch.float32))
    [loss_event] = engine.take_events()
    assert (loss_event["event"], loss_event["server"]) == ("server_lost", victim.url)
    assert loss_event["sent_again"] > 0

    victim.start().wait_until_ready()
    deadline = time.monotonic() + 120.0
    while not (events := engine.take_events()):
        assert time.monotonic() < deadline
        time.sleep(0.1)

    assert events == [{"event": "server_restarted", "server": victim.url}]
    check_log_probs(engine.generate(requests), Reference(folder, torch.float32))

    engine.close()
    assert "POST /v1/completions" in victim.log().split("Application startup complete")[-1]


@pytest.mark.sweep
def test_a_joint_run_outlives_the_death_of_its_only_server(mortal_servers, folder, new_folder, tmp_path):
    """A restarted server has the weights of its command line; its next responses must come from the newest ones."""
    [server] = mortal_servers[1:]
    engines = []

    def make_mortal(path: Path, version: Version) -> VLLMServerEngine:
        engine = make_server_engine(path, tmp_path, server, version=version, connect_timeout=300.0)
        engines.append(engine)
        plain_generate, call_numbers = engine.generate, iter(range(100))

        def generate_and_die(requests: list[Request]) -> list[Rollout]:
            if next(call_numbers) != 2:  # the third batch is the one whose server dies
                return plain_generate(requests)
            engine.submit(requests)
            rollouts = engine.collect(1)
            server.kill()
            server.start()
            rollouts += engine.collect(len(requests))
            assert sorted(rollout.uid for rollout in rollouts) == sorted(request.uid for request in requests)
            return sorted(rollouts, key=lambda rollout: [request.uid for request in requests].index(rollout.uid))

        engine.generate = generate_and_die
        return engine

    check_joint_run(make_mortal, policy=new_folder, rollout_model=folder, gap=2e-5)

    events = [event["event"] for event in engines[0].take_events()]
    assert events == ["server_lost", "server_restarted"]


# Servers that are not what they should be


def test_weights_that_another_client_names_are_an_error(servers, folder, tmp_path):
    engine = make_server_engine(folder, tmp_path, servers[0])
    body = json.dumps({"new_version": "of another run"}).encode()
    headers = {"Content-Type": "application/json"}
    urllib.request.urlopen(urllib.request.Request(f"{servers[0].url}/update_weight_version", body, headers)).close()

    with pytest.raises(EngineError, match=r"another run updates the weights of .*'of another run'"):
        engine.generate([tiny_request("one")])
    engine.close()


def test_a_server_of_another_vocabulary_gets_no_weights(servers, tmp_path):
    other_model = save_tiny_model(tmp_path / "other", seed=0, vocab_size=32)
    with pytest.raises(EngineError, match=r"serves another model: vocab_size 24, ours 32"):
        make_server_engine(other_model, tmp_path / "weights", servers[0])


def test_the_api_key_and_the_log_prob_limit_are_checked(untied_folder, folder, tmp_path, monkeypatch):
    with started(VLLMServer(untied_folder, api_key="right", max_logprobs="5")) as [server]:
        for key in ("wrong", None):
            monkeypatch.setenv("VLLM_API_KEY", key) if key else monkeypatch.delenv("VLLM_API_KEY")
            with pytest.raises(EngineError, match=r"refuses the API key .*environment variable VLLM_API_KEY"):
                make_server_engine(folder, tmp_path, server)

        monkeypatch.setenv("VLLM_API_KEY", "right")
        engine = make_server_engine(folder, tmp_path, server)
        assert engine.capabilities.num_top_log_probs == 5

        with pytest.raises(EngineError, match="max-logprobs"):
            engine.submit([tiny_request("six", num_top_log_probs=6)])

        assert len(engine.generate([tiny_request("five", num_top_log_probs=5)])) == 1
        engine.close()


def test_raw_log_probs_are_an_error(untied_folder, folder, tmp_path):
    raw_server = VLLMServer(untied_folder, logprobs_mode="raw_logprobs")
    with started(raw_server) as [server], pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
        make_server_engine(folder, tmp_path, server)


def test_a_tied_model_on_a_cpu_is_an_error(folder, tmp_path):
    with started(VLLMServer(folder)) as [server], pytest.raises(EngineError, match="untied copy"):
        make_server_engine(folder, tmp_path, server)
