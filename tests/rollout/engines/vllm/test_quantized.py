"""vLLM with quantized weights or cached keys and values: its log-probs are those of the rounded model after updates.

The shared suite of quantized engines runs on it too. On a CPU vLLM 0.32 truncates keys and values to FP8, where a GPU
rounds.
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


def mean_gap(rollouts: list[Rollout], log_probs: list[torch.Tensor], reference: Reference) -> float:
    """Return the mean difference of log-probs over all tokens, nats."""
    differences = []
    for rollout, response_log_probs in zip(rollouts, log_probs, strict=True):
        exact_log_probs = reference.log_probs(rollout.prompt, rollout.token_ids.tolist(), Sampling())
        exact_log_probs = exact_log_probs[np.arange(len(response_log_probs)), rollout.token_ids]
        differences.append(np.abs(exact_log_probs - response_log_probs.double().numpy()))

    return float(np.concatenate(differences).mean())


@pytest.mark.parametrize(("quantization", "kv_cache_dtype"), [("int8_w8a16", None), ("int8_w8a8", None), (None, "fp8")])
def test_quantized_log_probs_after_an_update_are_a_fresh_engines(folder, new_folder, quantization, kv_cache_dtype):
    settings = {"quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
    requests = [tiny_request(f"{n}", 1 + n, seed=n, max_new_tokens=16) for n in range(10)]

    engine, fresh_engine = make(folder, **settings), make(new_folder, **settings)
    assert engine.capabilities.quantized

    new_model = tiny_model(seed=1)
    try:
        updates = (  # folder of the reference, new weights of the engine, whether they are sent as codes
            (folder, None, False),
            (new_folder, new_model, False),
            (new_folder, new_model, True),
        )
        for model_folder, weights, sends_codes in updates:
            if weights:
                tensors, dtype = list(weights.named_parameters()), torch.float32
                coded_weights = engine.capabilities.coded_weights
                assert (coded_weights is not None) == (quantization == "int8_w8a8")
                if coded_weights and sends_codes:
                    tensors, dtype = list(quantize_named(tensors, coded_weights.names, coded_weights.scheme)), None
                assert engine.update_weights(tensors, NEW) == weights_digest(tensors, dtype)

            rollouts = engine.generate(requests)
            rounded_reference = QuantizedReference(model_folder, quantization, kv_cache_dtype and "fp8 cut")
            for log_probs in ([rollout.rollout_log_probs for rollout in rollouts], engine.score(rollouts, 1.0)):
                assert mean_gap(rollouts, log_probs, rounded_reference) < 1e-3
                assert mean_gap(rollouts, log_probs, Reference(model_folder, torch.float32)) > 1e-2

        for rollout, fresh_rollout in zip(rollouts, fresh_engine.generate(requests), strict=True):
            assert torch.equal(rollout.token_ids, fresh_rollout.token_ids)
            assert torch.equal(rollout.rollout_log_probs, fresh_rollout.rollout_log_probs)
    finally:
        engine.close()
        fresh_engine.close()
