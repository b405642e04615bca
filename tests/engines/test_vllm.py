"""The shared suite on `VLLMEngine`, with the real vLLM in this process; `make test-all` installs it."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-all runs this in .venv-vllm")

from engines.conformance import EngineConformance
from engines.reference import rollout_of, tiny_prompt, tiny_request
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

    def test_more_prompts_than_fit_into_a_step_of_vllm_are_written_and_scored(self, folder, reference):
        """A prompt read in two steps would end vLLM on a CPU, whose generators cannot go back by a number."""
        engine = make(folder, max_batch_size=128)
        try:
            requests = [tiny_request(f"{i}", prompt=tiny_prompt(50, i), max_new_tokens=2) for i in range(120)]
            rollouts = engine.generate(requests)
            self.check_log_probs(rollouts[::10], reference, requests[0].sampling)
            written = [rollout_of(request.prompt, [2, 3, 4]) for request in requests]
            scores = engine.score(written, 1.0)
        finally:
            engine.close()
        exact = reference.log_probs(requests[-1].prompt, [2, 3, 4], requests[-1].sampling)
        assert scores[-1].tolist() == pytest.approx([exact[t, t + 2] for t in range(3)], abs=self.tolerance)
