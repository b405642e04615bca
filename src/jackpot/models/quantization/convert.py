"""The conversion of a model to linear layers with quantized weights. Torch only."""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from jackpot.models.quantization.linear import QuantizedLinear
from jackpot.models.quantization.quantizer import SCHEMES, Scheme, quantize

_ROUTER = re.compile(r"(^|\.)(router|gate|shared_expert_gate)(\.|$)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """The names of converted and of kept parameters, in the order of the model."""

    converted: tuple[str, ...]
    kept: dict[str, str]  # by name, the reason why a parameter is not quantized


def quantized_names(model: nn.Module) -> Conversion:
    """Return what `quantize_linears` would convert, without changing the model.

    The linear layers inside the model are converted. Embeddings and the output layer are kept, as their rounding
    reaches every token at once; so are norms, biases, and the routers of experts, which choose by small differences.
    Two more kinds of weights are kept: a weight that belongs to no linear layer, such as one tensor of all experts, and
    a weight that the layer around it multiplies in its own code, as a Mamba layer does.
    """
    modules = dict(model.named_modules())
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    find_head = getattr(model, "get_output_embeddings", None)  # a method of transformers' models
    head = find_head() if find_head else None

    reasons: dict[str, str | None] = {}  # by parameter, the first reason to keep it; None: it is converted
    for name, parameter in model.named_parameters():
        path, _, last = name.rpartition(".")
        module, (parent, _, child) = modules[path], path.rpartition(".")
        # The first condition that holds gives the reason.
        reasons[name] = (
            (parameter.ndim < 2 and "bias or norm")
            or (isinstance(module, nn.Embedding) and "embedding")
            or (not (isinstance(module, nn.Linear) and last == "weight") and "not of a linear layer")
            or (module is head and "output layer")
            or (_ROUTER.search(path) and "router")
            or (uses[id(parameter)] > 1 and "shared by several layers")
            or (_reads_weight(type(modules[parent]), child) and "read by its parent")
            or None  # in place of False, where no condition holds
        )

    converted = tuple(name for name, reason in reasons.items() if reason is None)
    return Conversion(converted=converted, kept={name: reason for name, reason in reasons.items() if reason})


@cache
def _reads_weight(parent: type[nn.Module], child: str) -> bool:
    """Tell whether the code of a module reads the weight of a child directly, and does not call the child."""
    try:
        return re.search(rf"\bself\.{re.escape(child)}\.weight\b", inspect.getsource(parent)) is not None
    except (OSError, TypeError):  # there is no source
        return False


def quantize_linears(model: nn.Module, scheme: Scheme) -> Conversion:
    """Replace the linear layers that `quantized_names` finds by `QuantizedLinear`s, in place; return what it found.

    Raises:
        ValueError: the model has no linear layer to quantize.
    """
    return replace_linears(model, lambda layer: QuantizedLinear(layer.weight, layer.bias, scheme))


def replace_linears(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> Conversion:
    """Replace each linear layer that `quantized_names` finds by the result of `make`, in place; return what it found.

    Raises:
        ValueError: the model has no linear layer to quantize.
    """
    conversion = quantized_names(model)
    if not conversion.converted:
        classes = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(f"no linear layer to quantize in {type(model).__name__}, made of {', '.join(classes)}")

    for name in conversion.converted:
        path = name.removesuffix(".weight")
        parent, _, last = path.rpartition(".")
        layer = model.get_submodule(path)
        assert isinstance(layer, nn.Linear)  # `quantized_names` names no other layers
        setattr(model.get_submodule(parent), last, make(layer))
    return conversion


class CodedWeights(NamedTuple):
    """The names of the weights that an engine takes as codes and scales, as `quantize_named` yields them."""

    names: tuple[str, ...]
    quantization: str  # key of `SCHEMES`

    @property
    def scheme(self) -> Scheme:
        """Return the scheme by which the weights are quantized."""
        return SCHEMES[self.quantization]

    def are_in(self, tensors: Iterable[tuple[str, Tensor]]) -> bool:
        """Tell whether any of the tensors holds codes, in which case the engine takes all tensors without a cast."""
        return any(tensor.dtype == self.scheme.weights.codes for _, tensor in tensors)

    def shapes(self, weight_shapes: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
        """Return the shapes of the scales of all coded weights, by the scales' names.

        Args:
            weight_shapes: shapes of the weights by name.
        """
        suffix, grid = scales_suffix(self.scheme), self.scheme.weights
        return {name + suffix: grid.blocks(weight_shapes[name]) for name in self.names}


def scales_suffix(scheme: Scheme) -> str:
    """Return the suffix by which the name of a weight becomes the name of the weight's scales."""
    return "_scale_inv" if scheme.weights.codes.is_floating_point else "_scale"


def quantize_named(
    named_tensors: Iterable[tuple[str, Tensor]], names: Iterable[str], scheme: Scheme
) -> Iterator[tuple[str, Tensor]]:
    """Yield weights for an engine that computes with codes: those in `names` as two tensors each, the others unchanged.

    A coded weight becomes `NAME` with the codes and `NAME_scale_inv` (FP8) or `NAME_scale` (INT8) with the scales, as
    in files of Qwen3-FP8 and of compressed-tensors.
    """
    coded = set(names)
    for name, tensor in named_tensors:
        if name not in coded:
            yield name, tensor
            continue
        quantized = quantize(tensor.detach(), scheme.weights)
        yield name, quantized.codes
        yield name + scales_suffix(scheme), quantized.scales


def weight_bytes(model: nn.Module, scheme: Scheme | None, dtype: torch.dtype) -> int:
    """Return the bytes of a model's parameters: quantized ones in codes and scales, the others in `dtype`.

    The model may be on the meta device.
    """
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    if scheme is None:
        return dtype.itemsize * sum(shape.numel() for shape in shapes.values())

    coded, grid = set(quantized_names(model).converted), scheme.weights
    return sum(
        # The codes, and 4 bytes for the scale of each block.
        shape.numel() * grid.codes.itemsize + 4 * grid.blocks(shape).numel()
        if name in coded
        else shape.numel() * dtype.itemsize
        for name, shape in shapes.items()
    )
