"""The format in which vLLM gets quantized weights, tested without vLLM."""

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
NAMES = {f"model.layers.{number}.{layer}.weight" for number in range(2) for layer in LAYERS}


class Experts(nn.Module):
    """Has a linear layer, a router, and experts in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.gate = nn.Linear(8, 8), nn.Linear(8, 4)
        self.experts = nn.Parameter(torch.randn(4, 8, 8))


class Reads(nn.Module):
    """Calls one linear layer, and multiplies the weight of the other one itself, as a Mamba layer does."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.up_proj(states) @ self.down_proj.weight


def rounded(weight: torch.Tensor, kind: str) -> torch.Tensor:
    rows, columns = (1, weight.shape[1]) if kind == "int8" else (128, 128)
    return torch.from_numpy(round_blocks(weight.detach().numpy(), rows, columns, kind)).float()


@pytest.mark.parametrize(
    ("quantization", "suffix", "codes"),
    [("int8_w8a8", "_scale", torch.int8), ("fp8", "_scale_inv", torch.float8_e4m3fn)],
)
def test_codes_and_scales_are_those_of_a_checkpoint(quantization, suffix, codes):
    model = tiny_model(0, hidden_size=160, intermediate_size=192)
    weights = dict(model.named_parameters())
    sent = dict(WeightFormat.of_model(model, quantization).convert(weights.items()))
    assert set(sent) == {*weights, *(f"{name}{suffix}" for name in NAMES)}
    block = 1 if codes == torch.int8 else 128
    for name in weights.keys() - NAMES:
        assert torch.equal(sent[name], weights[name])
    for name in NAMES:
        scales = sent[f"{name}{suffix}"]
        assert sent[name].dtype == codes and scales.dtype == torch.float32
        spread = scales.repeat_interleave(block, 0)[: len(sent[name])]
        if codes != torch.int8:
            spread = spread.repeat_interleave(block, 1)[:, : sent[name].shape[1]]
        kind = "int8" if codes == torch.int8 else "fp8"
        torch.testing.assert_close(sent[name].float() * spread, rounded(weights[name], kind), rtol=1e-6, atol=0)


def test_int8_weights_alone_are_sent_multiplied_out():
    model = tiny_model(0)
    weights, form = dict(model.named_parameters()), WeightFormat.of_model(model, "int8_w8a16")
    sent = dict(form.convert(weights.items()))
    assert form.quantization_config is None and sent.keys() == weights.keys()
    for name, weight in weights.items():
        expected = rounded(weight, "int8") if name in NAMES else weight
        torch.testing.assert_close(sent[name], expected, rtol=1e-6, atol=0)


def test_without_quantization_the_weights_pass():
    model = tiny_model(0)
    form = WeightFormat.of_model(model, None)
    sent = list(form.convert(model.named_parameters()))
    assert all(tensor is weight for (_, tensor), weight in zip(sent, model.parameters(), strict=True))
    assert form.quantization_config is None and form.events == ()


def test_the_output_layer_and_routers_are_named_as_kept():
    for tied in (True, False):
        model = tiny_model(0, tie_word_embeddings=tied)
        assert WeightFormat.of_model(model, "int8_w8a8").quantization_config["ignore"] == ["lm_head"]
        assert WeightFormat.of_model(model, "fp8").quantization_config["modules_to_not_convert"] == ["lm_head"]
    routed = Experts()
    del routed.experts
    assert WeightFormat.of_model(routed, "fp8").quantization_config["modules_to_not_convert"] == ["lm_head", "gate"]
    assert WeightFormat.of_model(Reads(), "int8_w8a8").quantization_config["ignore"] == ["lm_head", "down_proj"]


def test_models_that_vllm_would_quantize_otherwise_are_refused():
    with pytest.raises(EngineError, match="no linear layer"):
        WeightFormat.of_model(nn.Embedding(3, 4), "int8_w8a16")
    for quantization in ("int8_w8a8", "fp8"):
        with pytest.raises(EngineError, match=r"more of Experts than its linear layers: experts"):
            WeightFormat.of_model(Experts(), quantization)
    assert WeightFormat.of_model(Experts(), "int8_w8a16").quantized_names == {"up_proj.weight"}


def test_the_quantization_is_reported():
    [event] = WeightFormat.of_model(tiny_model(0), "int8_w8a8").events
    layers = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96)
    assert event["to"] == "int8_w8a8" and event["kept"] == {"embedding": 1, "bias or norm": 9}
    assert event["share"] == layers / (layers + 24 * 64 + 5 * 64 + 4 * 32)


def test_fp8_blocks_on_a_cpu_are_refused_with_what_can_be_had(tmp_path):
    folder = save_tiny_model(tmp_path, seed=0)
    with pytest.raises(ConfigError, match=r"on GPUs.*int8_w8a8.*engine=transformers"):
        make_engine(VLLMEngineConfig(quantization="fp8"), str(folder), torch.device("cpu"), Version(0, 0))
