"""Which weights of a model are quantized, and what stays."""

import pytest
import torch
from torch import nn

from helpers.engines.reference import tiny_model
from jackpot.models.quantization.convert import quantize_linears, quantize_named, quantized_names, weight_bytes
from jackpot.models.quantization.linear import QuantizedLinear
from jackpot.models.quantization.quantizer import SCHEMES, Quantized, dequantize

PROJECTIONS = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]


class Odd(nn.Module):
    """Routers, experts in one tensor, an embedding used as a layer, and two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.head, self.gate = nn.Linear(8, 12, bias=False), nn.Linear(8, 4, bias=False)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.experts = nn.Parameter(torch.randn(4, 8, 8))
        self.gate_proj = nn.Linear(8, 8)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


@pytest.mark.parametrize("tied", [True, False])
def test_the_linear_layers_inside_are_converted_and_nothing_else(tied):
    model = tiny_model(seed=0, tie_word_embeddings=tied)
    found = quantize_linears(model, SCHEMES["fp8"])
    expected = [f"model.layers.{layer}.{name}.weight" for layer in (0, 1) for name in PROJECTIONS]

    assert list(found.converted) == expected

    kinds = {"model.embed_tokens.weight": "embedding"} | ({} if tied else {"lm_head.weight": "output layer"})
    assert {name: why for name, why in found.kept.items() if why != "bias or norm"} == kinds

    layers = {name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    assert {f"{name}.weight" for name in layers} == set(expected)
    assert set(dict(model.named_parameters())) == found.kept.keys()


def test_routers_experts_and_shared_weights_stay_and_are_named():
    found = quantized_names(Odd())

    assert found.converted == ("gate_proj.weight",)
    assert found.kept == {
        "experts": "not of a linear layer",
        "embed.weight": "embedding",
        "head.weight": "output layer",
        "gate.weight": "router",
        "first.weight": "shared by several layers",
        "first.bias": "bias or norm",
        "second.bias": "bias or norm",
        "gate_proj.bias": "bias or norm",
    }


class Reads(nn.Module):
    """Multiplies one weight itself and calls the other layer, whose bias it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.own_more = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.own_more(states @ self.own.weight) - self.own_more.bias


def test_a_weight_that_its_layers_parent_reads_stays():
    found = quantized_names(nn.Sequential(Reads()))
    assert found.converted == ("0.own_more.weight",)
    assert found.kept["0.own.weight"] == "read by its parent"


def test_a_model_with_nothing_to_quantize_is_refused():
    with pytest.raises(ValueError, match="no linear layer to quantize in Embedding"):
        quantize_linears(nn.Embedding(3, 4), SCHEMES["fp8"])


@pytest.mark.parametrize(("name", "suffix"), [("fp8", "_scale_inv"), ("int8_w8a8", "_scale")])
def test_weights_on_their_way_are_those_that_a_model_holds(name, suffix):
    scheme, model = SCHEMES[name], tiny_model(seed=0)
    plain = {key: tensor.detach().clone() for key, tensor in model.named_parameters()}
    sent = dict(quantize_named(model.named_parameters(), quantized_names(model).converted, scheme))
    conversion = quantize_linears(model, scheme)

    for key in conversion.converted:
        layer = model.get_submodule(key.removesuffix(".weight"))
        assert sent[key].dtype == scheme.weights.codes
        held = Quantized(sent.pop(key), sent.pop(f"{key}{suffix}"), scheme.weights)
        assert torch.equal(dequantize(held, torch.float32), dequantize(layer.quantized, torch.float32))
        assert (dequantize(held, torch.float32) - plain[key]).abs().max() < 0.07 * plain[key].abs().max()

    assert sent.keys() == conversion.kept.keys()
    assert all(torch.equal(sent[key], plain[key]) for key in sent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [None, *SCHEMES])
def test_bytes_are_those_that_a_model_takes(name, dtype):
    model = tiny_model(seed=0, hidden_size=96, intermediate_size=200).to(dtype)
    expected = weight_bytes(model, SCHEMES[name] if name else None, dtype)
    if name:
        quantize_linears(model, SCHEMES[name])
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]

    held = sum(tensor.nbytes for layer in layers for tensor in (layer.codes, layer.scales))

    assert held + sum(parameter.nbytes for parameter in model.parameters()) == expected
