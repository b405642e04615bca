"""The shared suite on `VLLMServerEngine`, with real vLLM servers in other processes, and what happens when they die."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-all runs this in .venv-vllm")

from engines.conformance import OLD, EngineConformance
from engines.servers import VLLMServer, save_untied, started
from jackpot.config_engines import VLLMServerEngineConfig
from jackpot.engines.vllm_server import VLLMServerEngine
from jackpot.launch.engines import make_engine
from jackpot.types import Version

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def untied_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_untied(folder, tmp_path_factory.mktemp("models") / "untied")


@pytest.fixture(scope="session")
def servers(untied_folder: Path) -> Iterator[tuple[VLLMServer, ...]]:
    """Two, for every test that breaks none."""
    with started(VLLMServer(untied_folder), VLLMServer(untied_folder)) as both:
        yield both


def make(
    folder: Path,
    weights_folder: Path,
    *servers: VLLMServer,
    version: Version = OLD,
    **settings,
) -> VLLMServerEngine:
    urls = tuple(server.url for server in servers)
    config = VLLMServerEngineConfig(
        urls=urls, weights_folder=str(weights_folder), **{"max_batch_size": 32, "patience": 120.0} | settings
    )
    return make_engine(config, str(folder), torch.device("cpu"), version)


class OnServers(EngineConformance):
    """The engines of a class share its servers; one is made at a time."""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def place(cls, servers, tmp_path_factory) -> None:
        cls.servers, cls.weights_folder = servers[: cls.count], tmp_path_factory.mktemp("weights")
        cls.make_engine = staticmethod(
            lambda folder, version: make(folder, cls.weights_folder, *cls.servers, version=version)
        )

    @staticmethod
    def make_engine(folder: Path, version: Version) -> VLLMServerEngine:
        raise NotImplementedError("place() puts the real one here")


class TestOneServer(OnServers):
    count = 1


class TestTwoServers(OnServers):
    count = 2
