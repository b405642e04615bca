"""The number formats that a model's layers compute with, and the layers where engine and training differ."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from jackpot.config.engines import EngineConfig, cache_format
from jackpot.models.quantization.convert import quantized_names
from jackpot.models.quantization.quantizer import E4M3, SCHEMES, Grid

# Keys of `layer_formats` beside the names of matrices.
BETWEEN = "norms and what flows between layers"
CACHE, HEAD = "keys and values", "output layer"
_KEPT = ", not quantized: "  # stands between the format of a matrix and the reason why it is not quantized


@dataclass(frozen=True, kw_only=True, slots=True)
class SideFormats:
    """The settings of an engine or of training, here called a side, that decide the side's number formats."""

    dtype: str  # dtype of weights and activations
    quantization: str | None = None  # key of `SCHEMES`
    kv_cache_dtype: str | None = None
    head_dtype: str | None = None
    autocast: str | None = None  # dtype of products, where that is not the `dtype` of weights and activations

    @classmethod
    def of(cls, engine: EngineConfig, device: str, autocast: str | None = None) -> "SideFormats":
        """Return the formats of an engine on a device of the type `device`, such as cuda, with the given `autocast`."""
        settings = {name: getattr(engine, name) for name in ("dtype", "quantization", "head_dtype")}
        return cls(**settings, kv_cache_dtype=cache_format(engine, device), autocast=autocast)


class LayerDifference(NamedTuple):
    """Layers that two sides of a comparison, such as engine and training, compute with different number formats."""

    layers: str  # a name with * in place of the layers' numbers, and how many layers there are
    first: str  # the number format of the first side
    second: str  # the number format of the second side


def layer_formats(model: nn.Module, side: SideFormats) -> dict[str, str]:
    """Return the number format of each matrix of a model by name, as `side`, an engine or training, computes.

    Three keys are no names of matrices: BETWEEN for norms and what flows between layers, CACHE for keys and values,
    HEAD for the output layer. The model may be on the meta device. The format of a matrix that a quantized side
    does not quantize is followed by the reason.
    """
    products = side.autocast or side.dtype  # the dtype of products that are not quantized
    reasons = quantized_names(model).kept
    scheme = SCHEMES[side.quantization] if side.quantization else None
    formats = {BETWEEN: side.dtype, CACHE: side.kv_cache_dtype or products, HEAD: side.head_dtype or products}

    for name, parameter in model.named_parameters():
        reason = reasons.get(name)
        if parameter.ndim < 2 or reason == "output layer":
            continue  # no matrix, or the output layer, whose key is HEAD

        if scheme and reason is None:
            activations = scheme.activations and _grid_text(scheme.activations)  # None: they are not quantized
            formats[name] = f"weights {_grid_text(scheme.weights)}, activations {activations or products}"
        else:
            own_format = side.dtype if reason == "embedding" else products
            formats[name] = f"{own_format}{_KEPT}{reason}" if scheme else own_format

    return formats


def layer_differences(first: Mapping[str, str], second: Mapping[str, str]) -> tuple[LayerDifference, ...]:
    """Return the layers whose formats differ in the `layer_formats` of two sides, such as an engine and training.

    Layers whose names differ in a number alone become one entry. Formats that differ only in the reason for not
    quantizing are equal.
    """
    # Each difference once, with * in place of the layers' numbers, and how many layers have it. Formats are compared up
    # to _KEPT, behind which the reason for not quantizing stands.
    counts = Counter(
        (re.sub(r"\.\d+(?=\.)", ".*", name).removesuffix(".weight"), first[name], second[name])
        for name in first
        if name in second and first[name].partition(_KEPT)[0] != second[name].partition(_KEPT)[0]
    )
    return tuple(
        LayerDifference(
            layers=f"{name} ({count})" if count > 1 else name, first=format_of_first, second=format_of_second
        )
        for (name, format_of_first, format_of_second), count in counts.items()
    )


def _grid_text(grid: Grid) -> str:
    """Describe the codes and the blocks of a grid: `fp8 by 1 x 128`."""
    return f"{'fp8' if grid.codes == E4M3 else 'int8'} by {grid.rows or 'all'} x {grid.columns or 'all'}"
