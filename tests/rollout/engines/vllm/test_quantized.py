"""The shared suite on a quantized vLLM, and tests of what only it promises.

On a CPU vLLM 0.32 truncates keys and values to FP8, where a GPU rounds.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here; make test-vllm runs this in .venv-vllm")

from helpers.engines.conformance import NEW
from helpers.engines.quantized_reference import QuantizedReference
from helpers.engines.reference import Reference, tiny_model, tiny_request
from jackpot.config.sampling import Sampling
from jackpot.core.digest import weights_digest
from jackpot.core.types import Rollout, Version
from jackpot.models.quantization.convert import quantize_named
from jackpot.rollout.engines.vllm.engine import VLLMEngine
from rollout.engines.test_quantized import QuantizedConformance
from rollout.engines.vllm.test_engine import make

pytestmark = pytest.mark.vllm


class TestVLLMInInt8WithAnFp8Cache(QuantizedConformance):
    quantization, kv_cache_dtype = "int8_w8a8", "fp8 cut"
    training_gap = 0.3

    @staticmethod
    def make_engine(folder: Path, version: Version) -> VLLMEngine:
        return make(folder, version, quantization="int8_w8a8", kv_cache_dtype="fp8")


def gap(rollouts: list[Rollout], log_probs: list[torch.Tensor], reference: Reference) -> float:
    """Return the mean difference of log-probs over all tokens, nats."""
    gaps = []
    for rollout, given in zip(rollouts, log_probs, strict=True):
        exact = reference.log_probs(rollout.prompt, rollout.token_ids.tolist(), Sampling())
        gaps.append(np.abs(exact[np.arange(len(given)), rollout.token_ids] - given.double().numpy()))
    return float(np.concatenate(gaps).mean())


@pytest.mark.parametrize(("quantization", "kv_cache_dtype"), [("int8_w8a16", None), ("int8_w8a8", None), (None, "fp8")])
def test_quantized_log_probs_after_an_update_are_a_fresh_engines(folder, new_folder, quantization, kv_cache_dtype):
    settings = {"quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
    requests = [tiny_request(f"{i}", 1 + i, seed=i, max_new_tokens=16) for i in range(10)]
    engine, fresh = make(folder, **settings), make(new_folder, **settings)
    assert engine.capabilities.quantized
    new = tiny_model(seed=1)
    try:
        for place, weights, as_codes in ((folder, None, False), (new_folder, new, False), (new_folder, new, True)):
            if weights:
                named, codes, dtype = list(weights.named_parameters()), engine.capabilities.coded_weights, torch.float32
                assert (codes is not None) == (quantization == "int8_w8a8")
                if codes and as_codes:
                    named, dtype = list(quantize_named(named, codes.names, codes.scheme)), None
                assert engine.update_weights(named, NEW) == weights_digest(named, dtype)
            rollouts = engine.generate(requests)
            rounded = QuantizedReference(place, quantization, kv_cache_dtype and "fp8 cut")
            for log_probs in ([one.rollout_log_probs for one in rollouts], engine.score(rollouts, 1.0)):
                assert gap(rollouts, log_probs, rounded) < 1e-3
                assert gap(rollouts, log_probs, Reference(place, torch.float32)) > 1e-2
        for one, other in zip(rollouts, fresh.generate(requests), strict=True):
            assert torch.equal(one.token_ids, other.token_ids)
            assert torch.equal(one.rollout_log_probs, other.rollout_log_probs)
    finally:
        engine.close()
        fresh.close()
