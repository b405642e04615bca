"""Names the number formats that the layers of a model compute with, and layers where two sides differ. Torch only."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from jackpot.config.engines import EngineConfig, cache_format
from jackpot.models.quantization.convert import quantized_names
from jackpot.models.quantization.quantizer import E4M3, SCHEMES, Grid

BETWEEN, CACHE, HEAD = "norms and what flows between layers", "keys and values", "output layer"
_KEPT = ", not quantized: "


@dataclass(frozen=True, kw_only=True, slots=True)
class SideFormats:
    """The settings of a side, an engine or training, that decide its number formats."""

    dtype: str  # of weights and activations
    quantization: str | None = None  # key of `SCHEMES`
    kv_cache_dtype: str | None = None
    head_dtype: str | None = None
    autocast: str | None = None  # of products, where weights and what flows between layers have `dtype`

    @classmethod
    def of(cls, engine: EngineConfig, device: str, autocast: str | None = None) -> "SideFormats":
        """Return the formats of an engine on a kind of device."""
        settings = {name: getattr(engine, name) for name in ("dtype", "quantization", "head_dtype")}
        return cls(**settings, kv_cache_dtype=cache_format(engine, device), autocast=autocast)


class LayerDifference(NamedTuple):
    """Layers that two sides compute differently."""

    layers: str  # with * for their numbers, and how many they are
    first: str
    second: str


def layer_formats(model: nn.Module, side: SideFormats) -> dict[str, str]:
    """Return the number format of each matrix of a model by its name, of the cache, and of the rest; the model may be
    on the meta device. A matrix that a quantized side keeps as it is has the reason behind its format."""
    products = side.autocast or side.dtype
    kept = quantized_names(model).kept
    scheme = SCHEMES[side.quantization] if side.quantization else None
    formats = {BETWEEN: side.dtype, CACHE: side.kv_cache_dtype or products, HEAD: side.head_dtype or products}

    for name, parameter in model.named_parameters():
        why = kept.get(name)
        if parameter.ndim < 2 or why == "output layer":
            continue

        if scheme and why is None:
            activations = scheme.activations and _grid(scheme.activations)
            formats[name] = f"weights {_grid(scheme.weights)}, activations {activations or products}"
        else:
            kept_format = side.dtype if why == "embedding" else products
            formats[name] = f"{kept_format}{_KEPT}{why}" if scheme else kept_format

    return formats


def layer_differences(first: Mapping[str, str], second: Mapping[str, str]) -> tuple[LayerDifference, ...]:
    """Return the layers of two sides' `layer_formats` that have different formats, those with one name together."""
    counts = Counter(
        (re.sub(r"\.\d+(?=\.)", ".*", name).removesuffix(".weight"), first[name], second[name])
        for name in first
        if name in second and first[name].partition(_KEPT)[0] != second[name].partition(_KEPT)[0]
    )
    return tuple(
        LayerDifference(f"{name} ({count})" if count > 1 else name, format_of_first, format_of_second)
        for (name, format_of_first, format_of_second), count in counts.items()
    )


def _grid(grid: Grid) -> str:
    kind = "fp8" if grid.codes == E4M3 else "int8"
    return f"{kind} by {grid.rows or 'all'} x {grid.columns or 'all'}"
