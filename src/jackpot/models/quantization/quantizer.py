"""The quantization of matrices of floating-point numbers to codes and scales. Torch only.

Status: experimental.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

ScaleFormat = Literal["power_of_two", "float32"]

E4M3 = torch.float8_e4m3fn
LARGEST = {E4M3: 448.0, torch.int8: 127.0}  # largest |code|; -128 is not used, so that codes are symmetric
_VARIANTS = 64  # most kernels that are compiled: one for each grid, dtype, strides, with gradient or not
_SMALLEST = 1e-10  # the least max |x| that a block's scale is computed from, so that a block of zeros has codes of 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """How a matrix is quantized: the dtype of its codes, the size of the blocks that share a scale, and the scales."""

    codes: torch.dtype  # a key of LARGEST
    rows: int | None = None  # rows of a block; None: all rows
    columns: int | None = None  # columns of a block; None: all columns
    scales: ScaleFormat  # which numbers may be scales

    def block(self, shape: torch.Size) -> tuple[int, int]:
        """Return how many rows and how many columns a block has in a matrix of this shape, [R, C]."""
        return self.rows or max(1, shape[0]), self.columns or max(1, shape[1])  # at least 1, even in an empty matrix

    def blocks(self, shape: torch.Size) -> torch.Size:
        """Return how many blocks a matrix of this shape has in each direction, which is the shape of its scales."""
        # -(-a // b) is a / b rounded up, as the last block may be smaller.
        return torch.Size(-(-size // side) for size, side in zip(shape, self.block(shape), strict=True))


class Quantized(NamedTuple):
    """A quantized matrix."""

    codes: Tensor  # [R, C], of the dtype grid.codes
    scales: Tensor  # [ceil(R / grid.rows), ceil(C / grid.columns)] float32, the factor of each block's codes
    grid: Grid


def quantize(values: Tensor, grid: Grid) -> Quantized:
    """Quantize a matrix [R, C], float32 or bfloat16.

    The matrix is cut into blocks of `grid.rows` x `grid.columns`; the last ones may be smaller. With L the largest
    code, each block has

        scale = max |x| / L                       (float32; with power_of_two the next power of two that is not below)
        code  = round(x / scale)                  to the nearest code, ties to even, never beyond L
        x     ~ code * scale

    A division by a power of two does not round, so with `power_of_two` every formula in use (x / s, x * (1/s),
    x * (L/max)) gives the same codes; with `float32` the formulas differ in one code of about two thousand
    (docs/precision.md).

    A NaN or an infinite number makes all numbers of its block NaN when they are dequantized, as in every
    implementation. A GPU computes scales that are powers of two, and their codes, in one kernel, after a test that the
    kernel gives the same bits.
    """
    # Scales that are no powers of two are quotients by the largest code, which compiled code may round differently.
    # Where the compiled function does not serve, `_codes_and_scales` computes by torch's operators.
    is_exact = grid.scales == "power_of_two"
    formula = (_compiled(grid, values.device) if is_exact and values.is_cuda else None) or _codes_and_scales
    return Quantized(*formula(values, grid), grid)


def _codes_and_scales(values: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Return the codes [R, C] and the scales of a matrix, as in `Quantized`."""
    blocks = _blocks(values.float(), grid)  # [blocks down, rows of a block, blocks across, columns of a block]
    scales = block_scales(blocks.abs().amax(dim=(1, 3)), grid)
    codes = encode(blocks, scales[:, None, :, None], grid.codes)
    return _matrix(codes, values.shape), scales


@cache
def _compiled(grid: Grid, device: torch.device) -> Callable[[Tensor, Grid], tuple[Tensor, Tensor]] | None:
    """Return `_codes_and_scales` compiled to one kernel; None, with a warning, where that fails or gives other bits.

    Not compiled, the function runs a dozen kernels, which take longer than an FP8 product saves (H200, docs/gpu.md).

    Status: never run on its target (a GPU), where only a benchmark has compiled the same formula.
    """
    # Numbers of both signs in 3 x 5 blocks; the largest of a row grows from 1/4 to 4.
    sizes = torch.linspace(-2.0, 2.0, 3 * BLOCK, device=device).exp2()[:, None]
    matrix = sizes * torch.linspace(-1.0, 1.0, 5 * BLOCK, device=device)

    try:
        compiled = torch.compile(_codes_and_scales, dynamic=True, options={"eager_numerics.division_rounding": True})
        # Beyond this limit torch would compile no more kernels, and run the operators one by one.
        compiled = torch._dynamo.config.patch(recompile_limit=_VARIANTS)(compiled)
        # The last of the matrices has blocks that are not full, and rows that are not contiguous.
        for values in (matrix, matrix.bfloat16(), matrix[: BLOCK - 1].T):
            pairs = zip(compiled(values, grid), _codes_and_scales(values, grid), strict=True)
            if not all(torch.equal(actual.view(torch.uint8), exact.view(torch.uint8)) for actual, exact in pairs):
                raise RuntimeError("the compiled codes are not those of torch's operators")
    except Exception as error:
        warnings.warn(f"a dozen kernels quantize in place of one, which is slow: {error}", stacklevel=2)
        return None
    return compiled


def dequantize(quantized: Quantized, dtype: torch.dtype) -> Tensor:
    """Return the numbers [R, C] that the codes stand for, rounded once to `dtype`."""
    codes, scales, grid = quantized
    blocks = _blocks(codes.float(), grid)
    return _matrix(blocks * scales[:, None, :, None], codes.shape).to(dtype)


def transposed(quantized: Quantized) -> Quantized:
    """Return the transpose of a quantized matrix: the same codes and scales, with rows and columns exchanged."""
    codes, scales, grid = quantized
    return Quantized(codes.T.contiguous(), scales.T.contiguous(), replace(grid, rows=grid.columns, columns=grid.rows))


def encode(values: Tensor, scales: Tensor | float, codes: torch.dtype) -> Tensor:
    """Divide float32 numbers by scales, which broadcast, and round the quotients to codes."""
    largest = LARGEST[codes]
    scaled = values / scales
    return (scaled if codes.is_floating_point else scaled.round()).clamp(-largest, largest).to(codes)


def block_scales(largest: Tensor, grid: Grid) -> Tensor:
    """Return the scale of each block, float32, from the block's largest absolute number."""
    largest, largest_code = largest.clamp(min=_SMALLEST), LARGEST[grid.codes]
    if grid.scales == "float32":
        return largest / largest_code
    # A scale is max |x| / L. The largest code L is 2 * fraction * 2^(exponent - 1), where only 2 * fraction is no power
    # of two and is left to `next_power_of_two`.
    fraction, exponent = math.frexp(largest_code)
    return next_power_of_two(largest * 2.0 ** (1 - exponent), 2.0 * fraction)


def next_power_of_two(values: Tensor, divisor: float = 1.0) -> Tensor:
    """Return the smallest power of two that is at least value / divisor, for each value; infinity and NaN stay.

    The power is read from the bits, since logarithms and, in compiled code, divisions round. `carry` is the largest
    mantissa minus the divisor's: adding it carries into the exponent exactly where the value's mantissa is larger than
    the divisor's.

    Args:
        values: positive normal float32.
        divisor: from 1 to below 2.
    """
    mantissa = 2**23 - 1  # the largest mantissa of a float32, and the mask of its bits
    carry = mantissa - int((divisor - 1.0) * 2**23)
    bits = (values.view(torch.int32) + carry) & ~mantissa
    return torch.where(values.isfinite(), bits.view(torch.float32), values)


def _blocks(matrix: Tensor, grid: Grid) -> Tensor:
    """Cut a matrix into blocks, padded by zeros: [blocks down, rows of a block, blocks across, columns of a block]."""
    rows, columns = grid.block(matrix.shape)
    full = padded(matrix, rows, columns)
    return full.reshape(full.shape[0] // rows, rows, full.shape[1] // columns, columns)


def padded(matrix: Tensor, rows: int, columns: int) -> Tensor:
    """Fill a matrix up with zeros to multiples of `rows` and `columns`."""
    below, behind = -matrix.shape[0] % rows, -matrix.shape[1] % columns  # rows and columns to add
    if not (below or behind):
        return matrix
    if matrix.dtype == E4M3:  # torch does not pad FP8; its zero is the byte 0
        return pad(matrix.view(torch.uint8), (0, behind, 0, below)).view(E4M3)
    return pad(matrix, (0, behind, 0, below))


def _matrix(blocks: Tensor, shape: torch.Size) -> Tensor:
    """Join blocks in the shape that `_blocks` returns to a matrix of `shape`, and drop the padding."""
    matrix = blocks.reshape(blocks.shape[0] * blocks.shape[1], blocks.shape[2] * blocks.shape[3])
    return matrix[: shape[0], : shape[1]].contiguous()


BLOCK = 128  # rows and columns of a block in DeepSeek-V3 (arXiv 2412.19437, 3.3.2) and in FP8 model files


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """How a linear layer quantizes its weight and its inputs, two matrices with a column for each input feature."""

    weights: Grid
    activations: Grid | None  # None: activations are not quantized, and weights are dequantized before the product


INT8_ROWS = Grid(codes=torch.int8, rows=1, scales="float32")  # a scale for each output feature or token
FP8_BLOCKS = Grid(codes=E4M3, rows=BLOCK, columns=BLOCK, scales="power_of_two")
FP8_TOKEN_BLOCKS = Grid(codes=E4M3, rows=1, columns=BLOCK, scales="power_of_two")

SCHEMES: Mapping[str, Scheme] = {
    "int8_w8a16": Scheme(weights=INT8_ROWS, activations=None),
    "int8_w8a8": Scheme(weights=INT8_ROWS, activations=INT8_ROWS),
    "fp8": Scheme(weights=FP8_BLOCKS, activations=FP8_TOKEN_BLOCKS),
}
