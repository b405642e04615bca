"""One precision on the same kernels is exactly one distribution, in batches of any size; anything else is not.

In bfloat16 and on trained models. research/parity.py measures how far apart the others are.
"""

from collections.abc import Callable
from contextlib import closing

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from jackpot.config.engines import TransformersEngineConfig
from jackpot.config.sampling import Sampling
from jackpot.config.tasks import ArithmeticConfig
from jackpot.core.types import Version
from jackpot.launch.engines import make_engine
from jackpot.models.load import load_model, load_tokenizer
from jackpot.models.quantization.convert import quantize_linears
from jackpot.models.quantization.linear import QuantizedLinear
from jackpot.models.quantization.quantizer import SCHEMES, Scheme, dequantize, quantize
from jackpot.models.scoring import forward_rollouts, token_log_probs
from jackpot.rollout.engines.base import Request
from jackpot.rollout.engines.transformers.attention import set_attention
from jackpot.rollout.tasks.registry import make_task
from research.parity import with_scales

pytestmark = pytest.mark.seconds  # runs, and whole models

PATH = "starter:rollout_model"
FP8 = SCHEMES["fp8"]
FLOAT_SCALES = with_scales(FP8, "float32")
IDS = torch.randint(2, 32, (11, 24), generator=torch.Generator().manual_seed(0))


def side(scheme: Scheme | None = None, fp8_cache: bool = False, attn_implementation: str = "eager") -> PreTrainedModel:
    """Return the model in bfloat16 as the learner or the engine would have it."""
    model = load_model(PATH, torch.bfloat16)
    set_attention(model, attn_implementation, fp8_cache)
    if scheme is not None:
        quantize_linears(model, scheme)
    return model


@torch.no_grad()
def logits(model: PreTrainedModel, batch: int = 11) -> Tensor:
    """Return the logits of all 11 sequences, computed in batches of this size."""
    return torch.cat([model(ids, use_cache=False).logits for ids in IDS.split(batch)])


@pytest.mark.parametrize(
    ("scheme", "fp8_cache"),
    [(None, False), (FP8, False), (FLOAT_SCALES, False), (SCHEMES["int8_w8a8"], False), (None, True), (FP8, True)],
)
def test_the_same_precision_is_the_same_bit_for_bit(scheme, fp8_cache):
    sampler, learner = (side(scheme, fp8_cache) for _ in range(2))
    full_logits = logits(sampler)

    assert torch.equal(logits(learner), full_logits)

    if not torch.equal(logits(side(), 1), logits(side())):
        pytest.skip("torch's own product in bfloat16, of attention and output layer, depends on the batch here")

    for batch in (5, 1):
        assert torch.equal(logits(learner, batch), full_logits)


def test_an_engine_scores_what_a_converted_copy_computes():
    settings = TransformersEngineConfig(
        dtype="bf16", attn_implementation="eager", quantization="fp8", kv_cache_dtype="fp8"
    )
    learner = side(FP8, fp8_cache=True)
    task = make_task(ArithmeticConfig(), load_tokenizer(PATH))
    requests = [
        Request(uid=f"{index}", prompt=task.prompt("test", index), seed=index, sampling=Sampling(max_new_tokens=10))
        for index in range(4)
    ]

    with closing(make_engine(settings, PATH, torch.device("cpu"), Version(0, 0))) as engine:
        rollouts = engine.generate(requests)
        # each alone in its batch
        engine_scores = [engine.score([rollout], 1.0)[0] for rollout in rollouts]

    for rollout, engine_score in zip(rollouts, engine_scores, strict=True):
        with torch.no_grad():
            hidden, ids, _ = forward_rollouts(learner, [rollout])
            log_probs = token_log_probs(learner, hidden[0], ids[0], 1.0, top_k=0, top_p=1.0)
        assert torch.equal(log_probs, engine_score)


def float32_product(layer: QuantizedLinear, inputs: Tensor) -> Tensor:
    """Return the product of the same codes, added up by BLAS in float32."""
    rows = quantize(inputs.reshape(-1, layer.in_features), layer.scheme.activations)
    outputs = dequantize(rows, torch.float32) @ dequantize(layer.quantized, torch.float32).T
    return outputs.to(inputs.dtype).reshape(*inputs.shape[:-1], layer.out_features)


def with_other_product() -> PreTrainedModel:
    """Return the FP8 model with float32 scales whose layers multiply with `float32_product`."""
    model = side(FLOAT_SCALES)
    for layer in model.modules():
        if isinstance(layer, QuantizedLinear):
            layer.forward = float32_product.__get__(layer)
    return model


def with_one_code_changed() -> PreTrainedModel:
    """Return the FP8 model with another exponent in one code of one layer."""
    model = side(FP8)
    codes = model.model.layers[0].mlp.down_proj.codes
    codes.view(torch.uint8)[3, 4] ^= 8  # its exponent, by one
    return model


CONTROLS: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[], PreTrainedModel]]] = {
    "c1 another attention": (side, lambda: side(attn_implementation="sdpa")),
    "a1 FP8, float32 scales": (side, lambda: side(FLOAT_SCALES)),
    "a2 FP8": (side, lambda: side(FP8)),
    "b2 FP8, another attention": (
        lambda: side(FP8),
        lambda: side(FP8, attn_implementation="sdpa"),
    ),
    "b3 FP8, another product": (lambda: side(FLOAT_SCALES), with_other_product),
    "b5 FP8, other scales": (lambda: side(FP8), lambda: side(FLOAT_SCALES)),
    "one code": (lambda: side(FP8), with_one_code_changed),
    "w1 weights only": (side, lambda: side(Scheme(weights=FP8.weights, activations=None))),
    "d1 INT8 weights": (side, lambda: side(SCHEMES["int8_w8a16"])),
    "d2 INT8": (side, lambda: side(SCHEMES["int8_w8a8"])),
    "e2 FP8 cache": (side, lambda: side(fp8_cache=True)),
    "f1 FP8 and its cache": (side, lambda: side(FP8, fp8_cache=True)),
    "f2 FP8 cache in the rollout alone": (lambda: side(FP8), lambda: side(FP8, fp8_cache=True)),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_anything_else_is_another_distribution(control):
    learner, sampler = (make() for make in CONTROLS[control])
    sampler_log_probs, learner_log_probs = (logits(model).double().log_softmax(-1) for model in (sampler, learner))
    kl = (sampler_log_probs.exp() * (sampler_log_probs - learner_log_probs)).sum(-1).mean()
    assert kl > 1e-9
    assert (sampler_log_probs.exp() - learner_log_probs.exp()).abs().max() > 1e-6
