"""Which weights of a model are quantized (those of the linear layers inside), which stay and why, and their bytes."""

import pytest
import torch
from torch import nn

from helpers.engines.reference import tiny_model
from jackpot.models.quantization.convert import quantize_linears, quantize_named, quantized_names, weight_bytes
from jackpot.models.quantization.linear import QuantizedLinear
from jackpot.models.quantization.quantizer import SCHEMES, Quantized, dequantize

PROJECTIONS = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]


class ModelOfExceptions(nn.Module):
    """Routers, experts in one tensor, an embedding used as a layer, and two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.gate = nn.Linear(8, 4, bias=False)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.experts = nn.Parameter(torch.randn(4, 8, 8))
        self.gate_proj = nn.Linear(8, 8)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


@pytest.mark.parametrize("tied", [True, False])
def test_the_linear_layers_inside_are_converted_and_nothing_else(tied):
    model = tiny_model(seed=0, tie_word_embeddings=tied)
    conversion = quantize_linears(model, SCHEMES["fp8"])
    expected_names = [f"model.layers.{layer}.{name}.weight" for layer in (0, 1) for name in PROJECTIONS]

    assert list(conversion.converted) == expected_names

    kept_reasons = {"model.embed_tokens.weight": "embedding"} | ({} if tied else {"lm_head.weight": "output layer"})
    assert {name: reason for name, reason in conversion.kept.items() if reason != "bias or norm"} == kept_reasons

    layer_names = {name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    assert {f"{name}.weight" for name in layer_names} == set(expected_names)
    assert set(dict(model.named_parameters())) == conversion.kept.keys()


def test_routers_experts_and_shared_weights_stay_and_are_named():
    conversion = quantized_names(ModelOfExceptions())

    assert conversion.converted == ("gate_proj.weight",)
    assert conversion.kept == {
        "experts": "not of a linear layer",
        "embed.weight": "embedding",
        "head.weight": "output layer",
        "gate.weight": "router",
        "first.weight": "shared by several layers",
        "first.bias": "bias or norm",
        "second.bias": "bias or norm",
        "gate_proj.bias": "bias or norm",
    }


class WeightReader(nn.Module):
    """Multiplies one layer's weight itself and calls the other layer, whose bias it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.multiplied = nn.Linear(8, 8)
        self.called = nn.Linear(8, 8)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.called(states @ self.multiplied.weight) - self.called.bias


def test_a_weight_that_its_layers_parent_reads_stays():
    conversion = quantized_names(nn.Sequential(WeightReader()))

    assert conversion.converted == ("0.called.weight",)
    assert conversion.kept["0.multiplied.weight"] == "read by its parent"


def test_a_model_with_nothing_to_quantize_is_refused():
    with pytest.raises(ValueError, match="no linear layer to quantize in Embedding"):
        quantize_linears(nn.Embedding(3, 4), SCHEMES["fp8"])


@pytest.mark.parametrize(("scheme_name", "suffix"), [("fp8", "_scale_inv"), ("int8_w8a8", "_scale")])
def test_weights_on_their_way_are_those_that_a_model_holds(scheme_name, suffix):
    scheme = SCHEMES[scheme_name]
    model = tiny_model(seed=0)
    plain_weights = {key: tensor.detach().clone() for key, tensor in model.named_parameters()}
    sent_tensors = dict(quantize_named(model.named_parameters(), quantized_names(model).converted, scheme))
    conversion = quantize_linears(model, scheme)

    for key in conversion.converted:
        layer = model.get_submodule(key.removesuffix(".weight"))
        assert sent_tensors[key].dtype == scheme.weights.codes
        sent_weight = Quantized(sent_tensors.pop(key), sent_tensors.pop(f"{key}{suffix}"), scheme.weights)
        sent_numbers = dequantize(sent_weight, torch.float32)
        assert torch.equal(sent_numbers, dequantize(layer.quantized, torch.float32))
        largest_weight = plain_weights[key].abs().max()
        assert (sent_numbers - plain_weights[key]).abs().max() < 0.07 * largest_weight

    assert sent_tensors.keys() == conversion.kept.keys()
    assert all(torch.equal(sent_tensors[key], plain_weights[key]) for key in sent_tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme_name", [None, *SCHEMES])
def test_bytes_are_those_that_a_model_takes(scheme_name, dtype):
    model = tiny_model(seed=0, hidden_size=96, intermediate_size=200).to(dtype)
    expected_bytes = weight_bytes(model, SCHEMES[scheme_name] if scheme_name else None, dtype)
    if scheme_name:
        quantize_linears(model, SCHEMES[scheme_name])
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]

    quantized_bytes = sum(tensor.nbytes for layer in layers for tensor in (layer.codes, layer.scales))

    assert quantized_bytes + sum(parameter.nbytes for parameter in model.parameters()) == expected_bytes
