"""Multiplies two quantized matrices, A B^T. Torch only.

`product` is the one product of engines and training: exact and independent of the batch on a CPU (`gemm_exact`), by
torch's block-wise `scaled_mm` on a Hopper GPU.

Status: experimental. `scaled_mm` has run on one H200, where quantizing takes longer than it saves (docs/gpu.md).

Shapes: A is [M, K], B is [N, K].
"""

from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.functional import pad

from jackpot.models.quantization.quantizer import BLOCK, E4M3, Quantized, padded

ProductName = Literal["exact", "scaled_mm"]


def product(a: Quantized, b: Quantized) -> Tensor:
    """Multiply two quantized matrices, A B^T: [M, N] float32, as `product_name` says."""
    if isinstance(a.codes, FakeTensor):  # of a plan, which counts what is kept
        return a.scales.new_empty(len(a.codes), len(b.codes))
    is_exact = a.grid.codes != b.grid.codes or product_name(a.codes.device, a.grid.codes) == "exact"
    return gemm_exact(a, b) if is_exact else gemm_scaled_mm(a, b)  # the first refuses different codes


def product_name(device: torch.device, codes: torch.dtype = E4M3) -> ProductName:
    """Return the name of the product of codes on a device."""
    return "scaled_mm" if codes == E4M3 and device.type == "cuda" and _has_scaled_mm(device.index) else "exact"


@cache
def _has_scaled_mm(index: int | None) -> bool:
    """Tell whether a GPU multiplies FP8 codes by blocks: Hopper, with cuBLAS 12.9 and a torch that calls it."""
    recent = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2])) >= (12, 9)
    return recent and hasattr(torch.nn.functional, "scaled_mm") and torch.cuda.get_device_capability(index) == (9, 0)


def gemm_exact(a: Quantized, b: Quantized) -> Tensor:
    """Multiply two quantized matrices, A B^T: [M, N] float32. The product of codes is exact in each part along K.

    Args:
        a: [M, K], with a scale for every row and part.
        b: [N, K], with the same codes and the same parts along K.

    Raises:
        ValueError: the matrices have different codes, K or parts, or `a` shares scales between rows.
    """
    (_, size), (_, other) = a.codes.shape, b.codes.shape
    part, b_part = a.grid.block(a.codes.shape)[1], b.grid.block(b.codes.shape)[1]

    if size != other or part != b_part or a.grid.codes != b.grid.codes or a.grid.rows != 1:
        raise ValueError(
            f"a product needs equal codes, K and parts along K, and scales of single rows on the left; got [M, {size}] "
            f"in parts of {part} ({a.grid.codes}, {a.grid.rows} rows) and [N, {other}] in parts of {b_part} "
            f"({b.grid.codes})"
        )

    rows = b.grid.block(b.codes.shape)[0]
    b_scales = b.scales.repeat_interleave(rows, dim=0)[: len(b.codes)]  # [N, parts]
    total = torch.zeros(len(a.codes), len(b.codes), device=a.codes.device)

    for index, start in enumerate(range(0, size, part)):
        columns = slice(start, start + part)
        products = (a.codes[:, columns].double() @ b.codes[:, columns].double().T).float()  # exact, rounded once
        total += a.scales[:, index, None] * (b_scales[:, index] * products)
    return total


def gemm_scaled_mm(a: Quantized, b: Quantized) -> Tensor:
    """Multiply as `gemm_exact` does, by the tensor cores of a Hopper GPU; sums are rounded as cuBLAS rounds them:
    an H200 was off by 1.3e-4, |error| / |exact|.
    """
    outputs = torch.nn.functional.scaled_mm(**scaled_operands(a, b), output_dtype=torch.float32)
    return outputs[: len(a.codes), : len(b.codes)]


def scaled_operands(a: Quantized, b: Quantized) -> dict[str, Any]:
    """Return the arguments of torch's `scaled_mm` for A B^T, padded with zeros to the sizes that cuBLAS takes.

    Rows of A become a multiple of 4, rows of B of 16, columns of both of 128. Scales [rows, parts] of single rows lie
    in memory part after part, [1, rows]. Those of blocks of B are [parts, row blocks], with `parts` filled up to a
    multiple of 4: cuBLAS reads them at that distance, and without the filling the product would be wrong in silence.
    """
    kinds = torch.nn.functional.ScalingType
    a_codes, b_codes = padded(a.codes, 4, BLOCK).contiguous(), padded(b.codes, 16, BLOCK).contiguous()
    by_blocks = b.grid.rows == BLOCK
    b_scales = padded(b.scales, 1, 4).contiguous() if by_blocks else _by_part(b.scales, len(b_codes))
    return {
        "mat_a": a_codes,
        "mat_b": b_codes.T,
        "scale_a": _by_part(a.scales, len(a_codes)),
        "scale_recipe_a": kinds.BlockWise1x128,
        "scale_b": b_scales.T if by_blocks else b_scales,
        "scale_recipe_b": kinds.BlockWise128x128 if by_blocks else kinds.BlockWise1x128,
    }


def _by_part(scales: Tensor, rows: int) -> Tensor:
    """Return scales [R, parts] as [rows, parts] in column-major order, filled up with zeros."""
    return pad(scales, (0, 0, 0, rows - len(scales))).T.contiguous().T
