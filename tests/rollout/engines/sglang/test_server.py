"""The shared suite on `SGLangServerEngine` with a real SGLang server on the CPU, which ignores seeds there."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from helpers.engines.conformance import NEW, OLD, EngineConformance
from helpers.engines.reference import Reference, tiny_prompt, tiny_request
from helpers.engines.servers import SGLANG_PYTHON, SGLangServer, started
from jackpot.config.engines import SGLangServerEngineConfig
from jackpot.core.errors import EngineError
from jackpot.core.types import Version
from jackpot.launch.engines import make_engine
from jackpot.rollout.engines.sglang.server_engine import SGLangServerEngine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SGLANG_PYTHON.exists(), reason="SGLang is not installed in .venv-sglang (docs/vllm.md)"),
]


def make(server: SGLangServer, path: Path, weights_folder: Path | None, version: Version = OLD) -> SGLangServerEngine:
    """Make an engine of the server; without a folder of its own it leaves the weights in shared memory."""
    folder = None if weights_folder is None else str(weights_folder)
    config = SGLangServerEngineConfig(urls=[server.url], weights_folder=folder, timeout=60.0, connect_timeout=60.0)
    return make_engine(config, str(path), torch.device("cpu"), version)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[SGLangServer]:
    with started(SGLangServer(folder)) as [server]:
        yield server


class TestSGLangServer(EngineConformance):
    """The suite on engines that share one server; one engine exists at a time."""

    moved_responses = 1.0  # SGLang takes seeds on a GPU alone
    reserved = 6
    has_filters = False

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def use(cls, server: SGLangServer, tmp_path_factory: pytest.TempPathFactory) -> None:
        weights_folder = tmp_path_factory.mktemp("weights")
        cls.make_engine = staticmethod(lambda path, version: make(server, path, weights_folder, version))

    @staticmethod
    def make_engine(folder: Path, version: Version) -> SGLangServerEngine:
        raise NotImplementedError("use() puts the real one here")


def test_no_cached_state_of_old_weights_is_used(server, folder, new_folder, tmp_path):
    engine, new_reference = make(server, folder, tmp_path), Reference(new_folder, torch.float32)
    requests = [tiny_request(f"{i}", prompt=tiny_prompt(50), seed=i, max_new_tokens=8) for i in range(8)]
    engine.generate(requests)

    engine.update_weights(new_reference.model.named_parameters(), NEW)

    TestSGLangServer().check_log_probs(engine.generate(requests), new_reference, requests[0].sampling)
    engine.close()


def test_weights_in_shared_memory_are_one_runs_alone(server, folder, tmp_path):
    earlier_engine, later_engine = make(server, folder, tmp_path), make(server, folder, weights_folder=None)
    requests = [tiny_request(f"{i}", seed=i) for i in range(4)]
    reference = Reference(folder, torch.float32)
    TestSGLangServer().check_log_probs(later_engine.generate(requests), reference, requests[0].sampling)

    with pytest.raises(EngineError, match="another run updates the weights"):
        earlier_engine.generate(requests)

    earlier_engine.close()
    later_engine.close()
