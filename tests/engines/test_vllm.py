"""The shared suite on `VLLMEngine`, with the real vLLM in this process; `make test-all` installs it."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-all runs this in .venv-vllm")

from engines.conformance import EngineConformance
from jackpot.config_engines import VLLMEngineConfig
from jackpot.engines.vllm import VLLMEngine
from jackpot.launch.engines import make_engine
from jackpot.types import Version

pytestmark = pytest.mark.slow


def make(folder: Path, version: Version = Version(0, 0), **settings) -> VLLMEngine:  # noqa: B008
    config = VLLMEngineConfig(**{"cache_gib": 0.25, "max_batch_size": 32} | settings)
    return make_engine(config, str(folder), torch.device("cpu"), version)


class TestVLLMEngine(EngineConformance):
    @staticmethod
    def make_engine(folder: Path, version: Version) -> VLLMEngine:
        return make(folder, version)
