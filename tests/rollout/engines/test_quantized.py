"""The shared suite on quantized engines, and tests of what only they promise."""

from pathlib import Path

import numpy as np
import pydantic
import pytest
import torch

from helpers.engines.conformance import NEW, OLD, NumberConformance, RunConformance
from helpers.engines.joint_run import check_joint_run
from helpers.engines.quantized_reference import QuantizedReference
from helpers.engines.reference import Reference, tiny_model, tiny_request
from jackpot.config.sampling import Sampling
from jackpot.core.digest import weights_digest
from jackpot.core.errors import EngineError
from jackpot.core.messages import pack, unpack
from jackpot.core.types import Version
from jackpot.models.quantization.convert import quantize_named, scales_suffix
from jackpot.models.quantization.quantizer import E4M3, SCHEMES
from jackpot.rollout.engines.hosted import _capabilities, _describe
from jackpot.rollout.engines.transformers.engine import TransformersEngine
from rollout.engines.transformers.test_decoding import make_engine, make_model
from rollout.engines.transformers.test_engine import make

KINDS = [("int8_w8a16", None), ("int8_w8a8", None), ("fp8", None), (None, "fp8"), ("fp8", "fp8")]  # (weights, KV cache)


class QuantizedConformance(RunConformance, NumberConformance):
    """The numbers with wide tolerances: a last-bit difference can move an activation to the next code."""

    quantization: str | None = None
    kv_cache_dtype: str | None = None
    attn_implementation: str = "sdpa"
    tolerance = 0.15
    moved_supports = 0.05
    moved_responses = 0.15

    @classmethod
    def make_reference(cls, folder: Path) -> QuantizedReference:
        return QuantizedReference(folder, cls.quantization, cls.kv_cache_dtype)

    @classmethod
    def make_engine(cls, folder: Path, version: Version) -> TransformersEngine:
        settings = {name: getattr(cls, name) for name in ("quantization", "kv_cache_dtype", "attn_implementation")}
        return make(folder, torch.float32, version, max_num_seqs=32, **settings)


@pytest.mark.slow
class TestInt8Weights(QuantizedConformance):
    quantization = "int8_w8a16"
    tolerance = 2e-5  # activations are not rounded
    moved_supports = moved_responses = 0.0
    training_gap = 0.05


@pytest.mark.slow
class TestFp8WithAnFp8Cache(QuantizedConformance):
    quantization = kv_cache_dtype = "fp8"
    training_gap = 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "gap"),
    [
        ({"quantization": "int8_w8a8"}, 0.1),
        ({"quantization": "fp8"}, 0.5),
        ({"kv_cache_dtype": "fp8", "attn_implementation": "eager"}, 0.2),
    ],
)
def test_a_joint_training_run_goes_through_a_quantized_engine(folder, new_folder, settings, gap):
    def make_engine(path: Path, version: Version) -> TransformersEngine:
        return make(path, torch.float32, version, max_num_seqs=32, **settings)

    check_joint_run(make_engine, policy=new_folder, rollout_model=folder, gap=gap)


@pytest.mark.parametrize(
    ("quantization", "kv_cache_dtype", "attention"),
    [*((*kind, "sdpa") for kind in KINDS[:4]), ("fp8", "fp8", "eager")],
)
def test_quantized_log_probs_are_those_of_the_definition(folder, quantization, kv_cache_dtype, attention):
    engine = make(folder, quantization=quantization, kv_cache_dtype=kv_cache_dtype, attn_implementation=attention)

    assert engine.capabilities.quantized
    assert engine.capabilities.dtype == torch.float32

    rollouts = engine.generate([tiny_request(f"{i}", 1 + i, seed=i, max_new_tokens=12) for i in range(6)])

    references = QuantizedReference(folder, quantization, kv_cache_dtype), Reference(folder, torch.float32)

    def error(reference: Reference, log_probs: list[torch.Tensor]) -> float:
        """Return the mean difference of log-probs over all tokens, nats."""
        return np.concatenate(
            [
                np.abs(
                    reference.log_probs(rollout.prompt, rollout.token_ids.tolist(), Sampling())[
                        np.arange(len(rollout.token_ids)), rollout.token_ids
                    ]
                    - engine_log_probs.double().numpy()
                )
                for rollout, engine_log_probs in zip(rollouts, log_probs, strict=True)
            ]
        ).mean()

    for log_probs in ([rollout.rollout_log_probs for rollout in rollouts], engine.score(rollouts, 1.0)):
        rounded_error, plain_error = (error(reference, log_probs) for reference in references)
        assert plain_error > 1e-2
        assert rounded_error < 5e-3
        assert plain_error > 15 * rounded_error


@pytest.mark.parametrize(("quantization", "kv_cache_dtype"), KINDS[1:4])
def test_weights_are_quantized_again_at_every_update(folder, new_folder, quantization, kv_cache_dtype):
    settings = {"quantization": quantization, "kv_cache_dtype": kv_cache_dtype}
    updated_engine, fresh_engine = make(folder, **settings), make(new_folder, **settings)
    new_model = tiny_model(seed=1)
    digest = updated_engine.update_weights(new_model.named_parameters(), NEW)

    assert digest == weights_digest(new_model.named_parameters(), torch.float32)

    requests = [tiny_request(f"{i}", 1 + i % 5, seed=i) for i in range(5)]
    for updated_rollout, fresh_rollout in zip(
        updated_engine.generate(requests), fresh_engine.generate(requests), strict=True
    ):
        assert torch.equal(updated_rollout.token_ids, fresh_rollout.token_ids)
        assert torch.equal(updated_rollout.rollout_log_probs, fresh_rollout.rollout_log_probs)


@pytest.mark.parametrize("quantization", SCHEMES)
def test_codes_and_scales_are_held_and_digested_as_they_came(folder, new_folder, quantization):
    updated_engine, fresh_engine = (make(path, quantization=quantization) for path in (folder, new_folder))
    new_model, codes = tiny_model(seed=1), updated_engine.capabilities.coded_weights
    named_codes = list(quantize_named(new_model.named_parameters(), codes.names, codes.scheme))

    assert updated_engine.update_weights(iter(named_codes), NEW) == weights_digest(named_codes, dtype=None)

    requests = [tiny_request(f"{i}", 1 + i % 5, seed=i) for i in range(5)]
    for updated_rollout, fresh_rollout in zip(
        updated_engine.generate(requests), fresh_engine.generate(requests), strict=True
    ):
        assert torch.equal(updated_rollout.token_ids, fresh_rollout.token_ids)
        assert torch.equal(updated_rollout.rollout_log_probs, fresh_rollout.rollout_log_probs)

    indices = {name: index for index, (name, _) in enumerate(named_codes)}
    codes_name = "model.layers.1.mlp.down_proj.weight"
    for changed_name in (codes_name, codes_name + scales_suffix(codes.scheme)):
        changed_codes = [(name, tensor.clone()) for name, tensor in named_codes]
        # the last bit of a code or of a scale
        changed_codes[indices[changed_name]][1].view(torch.uint8).view(-1)[0] ^= 1
        assert updated_engine.update_weights(changed_codes, NEW) != weights_digest(named_codes, dtype=None)


def test_codes_that_do_not_fit_leave_the_old_weights(folder):
    engine, new_model = make(folder, quantization="fp8"), tiny_model(seed=1)
    codes = dict(quantize_named(new_model.named_parameters(), engine.capabilities.coded_weights.names, SCHEMES["fp8"]))
    request = [tiny_request("0")]
    old_log_probs = engine.generate(request)[0].rollout_log_probs

    name = "model.layers.1.mlp.down_proj.weight"

    codes_without_scales = {key: tensor for key, tensor in codes.items() if key != f"{name}_scale_inv"}
    weight_without_codes = codes | {name: new_model.get_parameter(name)}
    codes_with_head = codes | {"model.embed_tokens.weight": new_model.model.embed_tokens.weight.to(E4M3)}

    for sent_weights, reason in (
        (codes_without_scales, "1 missing"),
        (weight_without_codes, f"such as {name}"),
        (codes_with_head, "such as model.embed"),
    ):
        with pytest.raises(EngineError, match=reason):
            engine.update_weights(sent_weights.items(), NEW)
    with pytest.raises(EngineError, match="does not take"):
        make(folder, quantization="int8_w8a8").update_weights(codes.items(), NEW)
    assert torch.equal(engine.generate(request)[0].rollout_log_probs, old_log_probs)


def test_a_weight_changed_on_the_way_changes_the_digest(folder):
    engine = make(folder, quantization="fp8")
    weights = {name: tensor.detach().clone() for name, tensor in tiny_model(seed=0).named_parameters()}
    old_digest = engine.update_weights(weights.items(), OLD)
    weights["model.layers.1.mlp.down_proj.weight"][3, 5] *= 1 + 1e-6  # far less than a code
    assert engine.update_weights(weights.items(), OLD) != old_digest


def test_an_engine_in_bfloat16_quantizes_what_it_would_have_held(folder):
    engine = make(folder, torch.bfloat16, quantization="fp8")
    weights = dict(tiny_model(seed=1).named_parameters())
    digest = engine.update_weights(weights.items(), NEW)

    assert digest == weights_digest(weights.items(), torch.bfloat16)

    engine_of_rounded_weights = make(folder, torch.bfloat16, quantization="fp8")
    engine_of_rounded_weights.update_weights(((name, tensor.bfloat16()) for name, tensor in weights.items()), NEW)
    requests = [tiny_request(f"{i}", seed=i) for i in range(4)]

    for rollout, expected_rollout in zip(
        engine.generate(requests), engine_of_rounded_weights.generate(requests), strict=True
    ):
        assert torch.equal(rollout.rollout_log_probs, expected_rollout.rollout_log_probs)


def test_an_engine_reports_once_what_it_quantized(folder):
    engine = make(folder, quantization="fp8")
    [event] = engine.take_events()

    # two layers: q and o, k and v, and three matrices of the MLP
    layers = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)

    assert event == {
        "event": "quantized",
        "to": "fp8",
        "share": layers / (layers + 24 * 64 + 5 * 64 + 4 * 32),  # embedding, norms, norms of q and k
        "kept": {"embedding": 1, "bias or norm": 9},
    }
    assert engine.take_events() == []
    assert make(folder, kv_cache_dtype="fp8").take_events() == []


def test_models_that_cannot_be_quantized_so_are_refused():
    def engine(name: str, attention: str, **settings: str) -> TransformersEngine:
        return make_engine(make_model(name, attention), **settings)

    with pytest.raises(pydantic.ValidationError, match="'int8_w8a8' or 'fp8'"):
        engine("qwen3", "sdpa", quantization="int4")
    with pytest.raises(pydantic.ValidationError, match="Input should be 'fp8'"):
        engine("qwen3", "sdpa", kv_cache_dtype="int8")
    with pytest.raises(EngineError, match="no linear layer"):
        engine("gpt2", "sdpa", quantization="fp8")
    with pytest.raises(EngineError, match=r"attention of its own \(eager\).*kv_cache_dtype"):
        engine("bloom", "eager", kv_cache_dtype="fp8")
    for name in ("deepseek_v3", "diffllama"):  # make keys and values of what they cache
        with pytest.raises(EngineError, match=r"caches other keys and values than .*kv_cache_dtype"):
            engine(name, "sdpa", kv_cache_dtype="fp8")


@pytest.mark.parametrize(
    ("name", "attention"),
    [("qwen2", "sdpa"), ("mistral", "eager"), ("gemma3_text", "sdpa"), ("gpt_neox", "eager"), ("lfm2", "sdpa")],
)
def test_an_fp8_cache_is_what_every_pass_sees(name, attention):
    """Decoding step by step rounds keys and values as one pass over the whole sequence does.

    The models have windows, padding, biases, layers of another kind, and both kinds of cache.
    """
    model = make_model(name, attention)
    engine, plain_engine = make_engine(model, kv_cache_dtype="fp8"), make_engine(make_model(name, attention))

    rollouts = engine.generate([tiny_request(f"{i}", 2 + 7 * i, seed=9 + i, max_new_tokens=25) for i in range(3)])
    scores, plain_scores = engine.score(rollouts, 1.0), plain_engine.score(rollouts, 1.0)

    for rollout, score, plain_score in zip(rollouts, scores, plain_scores, strict=True):
        assert (rollout.rollout_log_probs - score).abs().mean() < 2e-3
        assert (rollout.rollout_log_probs - plain_score).abs().mean() > 4e-3


def test_capabilities_sent_to_another_process_stay_the_same(folder):
    engine = make(folder, torch.bfloat16, quantization="int8_w8a8")
    description = unpack(pack(_describe(engine)))
    assert _capabilities(description["capabilities"]) == engine.capabilities
