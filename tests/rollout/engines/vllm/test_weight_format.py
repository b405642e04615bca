"""`WeightFormat`: which codes, scales and settings vLLM gets of quantized weights, tested without vLLM."""

import pytest
import torch
from torch import nn

from helpers.engines.quantized_reference import round_blocks
from helpers.engines.reference import save_tiny_model, tiny_model
from jackpot.config.engines import VLLMEngineConfig
from jackpot.core.errors import ConfigError, EngineError
from jackpot.core.types import Version
from jackpot.launch.engines import make_engine
from jackpot.rollout.engines.vllm.weight_format import WeightFormat

LAYERS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
LAYERS += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
NAMES = {f"model.layers.{index}.{layer}.weight" for index in range(2) for layer in LAYERS}


class Experts(nn.Module):
    """Has a linear layer, a router, and experts in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.gate = nn.Linear(8, 8), nn.Linear(8, 4)
        self.experts = nn.Parameter(torch.randn(4, 8, 8))


class ReadsWeight(nn.Module):
    """Calls one linear layer, and multiplies the weight of the other one itself, as a Mamba layer does."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.up_proj(states) @ self.down_proj.weight


def rounded(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the weight as its codes hold it: int8 by rows, FP8 by blocks of 128 x 128."""
    rows, columns = (1, weight.shape[1]) if kind == "int8" else (128, 128)
    return torch.from_numpy(round_blocks(weight.detach().numpy(), rows, columns, kind)).float()


@pytest.mark.parametrize(
    ("quantization", "suffix", "code_dtype"),
    [("int8_w8a8", "_scale", torch.int8), ("fp8", "_scale_inv", torch.float8_e4m3fn)],
)
def test_codes_and_scales_are_those_of_a_checkpoint(quantization, suffix, code_dtype):
    model = tiny_model(0, hidden_size=160, intermediate_size=192)
    weights = dict(model.named_parameters())

    sent_tensors = dict(WeightFormat.of_model(model, quantization).convert(weights.items()))

    assert set(sent_tensors) == {*weights, *(f"{name}{suffix}" for name in NAMES)}

    block_size = 1 if code_dtype == torch.int8 else 128
    for name in weights.keys() - NAMES:
        assert torch.equal(sent_tensors[name], weights[name])

    for name in NAMES:
        scales = sent_tensors[f"{name}{suffix}"]
        assert sent_tensors[name].dtype == code_dtype
        assert scales.dtype == torch.float32
        spread_scales = scales.repeat_interleave(block_size, 0)[: len(sent_tensors[name])]
        if code_dtype != torch.int8:
            spread_scales = spread_scales.repeat_interleave(block_size, 1)[:, : sent_tensors[name].shape[1]]
        kind = "int8" if code_dtype == torch.int8 else "fp8"
        torch.testing.assert_close(
            sent_tensors[name].float() * spread_scales, rounded(weights[name], kind), rtol=1e-6, atol=0
        )


def test_int8_weights_alone_are_sent_multiplied_out():
    model = tiny_model(0)
    weights = dict(model.named_parameters())
    weight_format = WeightFormat.of_model(model, "int8_w8a16")

    sent_tensors = dict(weight_format.convert(weights.items()))

    assert weight_format.quantization_config is None
    assert sent_tensors.keys() == weights.keys()
    for name, weight in weights.items():
        expected = rounded(weight, "int8") if name in NAMES else weight
        torch.testing.assert_close(sent_tensors[name], expected, rtol=1e-6, atol=0)


def test_without_quantization_the_weights_pass_unchanged():
    model = tiny_model(0)
    weight_format = WeightFormat.of_model(model, None)

    sent_tensors = list(weight_format.convert(model.named_parameters()))

    assert all(tensor is weight for (_, tensor), weight in zip(sent_tensors, model.parameters(), strict=True))
    assert weight_format.quantization_config is None
    assert weight_format.events == ()


def test_the_output_layer_is_named_as_kept():
    for is_tied in (True, False):
        model = tiny_model(0, tie_word_embeddings=is_tied)
        assert WeightFormat.of_model(model, "int8_w8a8").quantization_config["ignore"] == ["lm_head"]
        assert WeightFormat.of_model(model, "fp8").quantization_config["modules_to_not_convert"] == ["lm_head"]


def test_routers_are_named_as_kept():
    experts = Experts()
    del experts.experts

    assert WeightFormat.of_model(experts, "fp8").quantization_config["modules_to_not_convert"] == ["lm_head", "gate"]


def test_a_weight_that_its_model_reads_itself_is_named_as_kept():
    assert WeightFormat.of_model(ReadsWeight(), "int8_w8a8").quantization_config["ignore"] == ["lm_head", "down_proj"]


def test_models_that_vllm_would_quantize_otherwise_are_refused():
    with pytest.raises(EngineError, match="no linear layer"):
        WeightFormat.of_model(nn.Embedding(3, 4), "int8_w8a16")

    for quantization in ("int8_w8a8", "fp8"):
        with pytest.raises(EngineError, match=r"more of Experts than its linear layers: experts"):
            WeightFormat.of_model(Experts(), quantization)

    assert WeightFormat.of_model(Experts(), "int8_w8a16").quantized_names == {"up_proj.weight"}


def test_the_quantization_is_reported():
    [event] = WeightFormat.of_model(tiny_model(0), "int8_w8a8").events

    # two layers: queries and output 64 x 64, keys and values 64 x 32, the MLP 64 x 96
    quantized_count = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)
    kept_count = 24 * 64 + 5 * 64 + 4 * 32  # embedding, norms of the layers, norms of heads
    assert event["to"] == "int8_w8a8"
    assert event["kept"] == {"embedding": 1, "bias or norm": 9}
    assert event["share"] == quantized_count / (quantized_count + kept_count)


def test_fp8_blocks_on_a_cpu_are_refused_with_what_can_be_had(tmp_path):
    folder = save_tiny_model(tmp_path, seed=0)
    with pytest.raises(ConfigError, match=r"on GPUs.*int8_w8a8.*engine=transformers"):
        make_engine(VLLMEngineConfig(quantization="fp8"), str(folder), torch.device("cpu"), Version(0, 0))
