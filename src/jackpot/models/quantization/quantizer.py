"""The one quantizer: floating-point numbers become codes and scales. Torch only.

A matrix [R, C] is cut into blocks of `rows` x `columns`, the last ones as small as they are. With L the largest code,
each block has

    scale = max |x| / L                       (float32; with power_of_two the next power of two that is not below)
    code  = round(x / scale)                  to the nearest code, ties to even, never beyond L
    x     ~ code * scale

A division by a power of two does not round, so with `power_of_two` every formula in use (x / s, x * (1/s), x * (L/max))
gives the same codes; with `float32` they differ in about one code of two thousand (measured, docs/precision.md).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

ScaleFormat = Literal["power_of_two", "float32"]

E4M3 = torch.float8_e4m3fn
LARGEST = {E4M3: 448.0, torch.int8: 127.0}  # codes of both signs; -128 is not used, so that a block is symmetric
_SMALLEST = 1e-10  # stands in for the largest number of a block of zeros, whose codes are then 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """What a matrix is quantized to, and which part of it shares a scale."""

    codes: torch.dtype  # a key of LARGEST
    rows: int | None = None  # of a block; None: all
    columns: int | None = None  # of a block; None: all
    scales: ScaleFormat

    def block(self, shape: torch.Size) -> tuple[int, int]:
        """Rows and columns of a block in a matrix of this shape, [R, C]."""
        return self.rows or max(1, shape[0]), self.columns or max(1, shape[1])


class Quantized(NamedTuple):
    """A matrix in codes."""

    codes: Tensor  # [R, C] of grid.codes
    scales: Tensor  # [ceil(R / rows), ceil(C / columns)] float32, what codes are multiplied by
    grid: Grid


def quantize(values: Tensor, grid: Grid) -> Quantized:
    """Codes and scales of a matrix [R, C], float32 or bfloat16. A NaN makes its whole block NaN in FP8.

    Round-off: a block with an infinite number has no other numbers left, as in every implementation.
    """
    blocks = _blocks(values.float(), grid)  # [rows of blocks, rows, columns of blocks, columns]
    scales = block_scales(blocks.abs().amax(dim=(1, 3)), grid)
    codes = encode(blocks, scales[:, None, :, None], grid.codes)
    return Quantized(_matrix(codes, values.shape), scales, grid)


def dequantize(quantized: Quantized, dtype: torch.dtype) -> Tensor:
    """The numbers [R, C] that the codes stand for, rounded once to `dtype`."""
    codes, scales, grid = quantized
    blocks = _blocks(codes.float(), grid)
    return _matrix(blocks * scales[:, None, :, None], codes.shape).to(dtype)


def encode(values: Tensor, scales: Tensor | float, codes: torch.dtype) -> Tensor:
    """Codes of float32 numbers under given scales, which broadcast."""
    largest = LARGEST[codes]
    scaled = values / scales
    return (scaled if codes.is_floating_point else scaled.round()).clamp(-largest, largest).to(codes)


def block_scales(largest: Tensor, grid: Grid) -> Tensor:
    """The scale of blocks whose largest absolute number is given, float32."""
    scales = largest.clamp(min=_SMALLEST) / LARGEST[grid.codes]
    return next_power_of_two(scales) if grid.scales == "power_of_two" else scales


def next_power_of_two(numbers: Tensor) -> Tensor:
    """The smallest power of two that is not below a positive normal float32 number; infinity and NaN stay.

    Read from the bits, since a logarithm rounds: adding all of the mantissa carries into the exponent unless it was 0.
    """
    mantissa = 2**23 - 1
    bits = (numbers.view(torch.int32) + mantissa) & ~mantissa
    return torch.where(numbers.isfinite(), bits.view(torch.float32), numbers)


def _blocks(matrix: Tensor, grid: Grid) -> Tensor:
    """[R, C] as [rows of blocks, rows, columns of blocks, columns], with zeros behind the last row and column."""
    rows, columns = grid.block(matrix.shape)
    below, behind = -matrix.shape[0] % rows, -matrix.shape[1] % columns
    padded = pad(matrix, (0, behind, 0, below)) if below or behind else matrix
    return padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)


def _matrix(blocks: Tensor, shape: torch.Size) -> Tensor:
    """The way back from `_blocks`."""
    whole = blocks.reshape(blocks.shape[0] * blocks.shape[1], blocks.shape[2] * blocks.shape[3])
    return whole[: shape[0], : shape[1]].contiguous()


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
