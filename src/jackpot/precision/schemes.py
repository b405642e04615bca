"""What weights and activations of linear layers are quantised to, by the names of `engine.quantization`. Layer 3."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from jackpot.precision.quantiser import E4M3, Grid, ScaleFormat

BLOCK = 128  # of DeepSeek-V3 (arXiv 2412.19437, 3.3.2), and of the files that are named FP8


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """How a linear layer computes. Both matrices are [rows, features in]."""

    weights: Grid
    activations: Grid | None  # of every token anew; None: as they come, and weights are multiplied out first


INT8_CHANNELS = Grid(codes=torch.int8, rows=1, scales="float32")  # a scale for each output feature
INT8_TOKENS = Grid(codes=torch.int8, rows=1, scales="float32")  # a scale for each token
FP8_BLOCKS = Grid(codes=E4M3, rows=BLOCK, columns=BLOCK, scales="power_of_two")
FP8_TOKEN_BLOCKS = Grid(codes=E4M3, rows=1, columns=BLOCK, scales="power_of_two")

SCHEMES: Mapping[str, Scheme] = {
    "int8_w8a16": Scheme(weights=INT8_CHANNELS, activations=None),
    "int8_w8a8": Scheme(weights=INT8_CHANNELS, activations=INT8_TOKENS),
    "fp8": Scheme(weights=FP8_BLOCKS, activations=FP8_TOKEN_BLOCKS),
}


def with_scales(scheme: Scheme, scales: ScaleFormat) -> Scheme:
    """The same with scales of another format."""
    activations = scheme.activations and replace(scheme.activations, scales=scales)
    return Scheme(weights=replace(scheme.weights, scales=scales), activations=activations)
