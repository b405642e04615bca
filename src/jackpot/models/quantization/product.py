"""The product of two quantized matrices, A B^T, which engines and training share. Torch only.

`product` is exact and independent of the batch on a CPU (`gemm_exact`); a Hopper GPU computes FP8 by torch's block-wise
`scaled_mm`.

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
    """Multiply two quantized matrices, A B^T: [M, N] float32, by the function that `product_name` names."""
    if isinstance(a.codes, FakeTensor):  # `jackpot plan` counts memory: it needs shapes only
        return a.scales.new_empty(len(a.codes), len(b.codes))
    is_exact = a.grid.codes != b.grid.codes or product_name(a.codes.device, a.grid.codes) == "exact"
    return gemm_exact(a, b) if is_exact else gemm_scaled_mm(a, b)  # `gemm_exact` refuses different codes


def product_name(device: torch.device, codes: torch.dtype = E4M3) -> ProductName:
    """Return the name of the function that multiplies codes on a device."""
    return "scaled_mm" if codes == E4M3 and device.type == "cuda" and _has_scaled_mm(device.index) else "exact"


@cache
def _has_scaled_mm(index: int | None) -> bool:
    """Tell whether a GPU multiplies FP8 codes with a scale per block: a Hopper, with CUDA 12.9 and `scaled_mm`."""
    recent = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2])) >= (12, 9)  # major, minor
    return recent and hasattr(torch.nn.functional, "scaled_mm") and torch.cuda.get_device_capability(index) == (9, 0)


def gemm_exact(a: Quantized, b: Quantized) -> Tensor:
    """Multiply two quantized matrices, A B^T: [M, N] float32. The product of codes is exact in each block along K.

    Args:
        a: [M, K], with a scale for every row and block along K.
        b: [N, K], with the same codes and the same blocks along K.

    Raises:
        ValueError: the matrices have different codes, K or blocks along K, or `a` shares scales between rows.
    """
    size, b_size = a.codes.shape[1], b.codes.shape[1]
    width, b_width = a.grid.block(a.codes.shape)[1], b.grid.block(b.codes.shape)[1]

    if size != b_size or width != b_width or a.grid.codes != b.grid.codes or a.grid.rows != 1:
        raise ValueError(
            f"a product needs equal codes, K and parts along K, and scales of single rows on the left; got [M, {size}] "
            f"in parts of {width} ({a.grid.codes}, {a.grid.rows} rows) and [N, {b_size}] in parts of {b_width} "
            f"({b.grid.codes})"
        )

    rows = b.grid.block(b.codes.shape)[0]  # rows of B that share a scale
    b_scales = b.scales.repeat_interleave(rows, dim=0)[: len(b.codes)]  # [N, blocks along K]
    total = torch.zeros(len(a.codes), len(b.codes), device=a.codes.device)

    for index, start in enumerate(range(0, size, width)):
        columns = slice(start, start + width)
        products = (a.codes[:, columns].double() @ b.codes[:, columns].double().T).float()  # exact until `float`
        total += a.scales[:, index, None] * (b_scales[:, index] * products)
    return total


def gemm_scaled_mm(a: Quantized, b: Quantized) -> Tensor:
    """Multiply as `gemm_exact` does, by the tensor cores of a Hopper GPU, which round sums.

    An H200 was off by 1.3e-4, |error| / |exact|.
    """
    outputs = torch.nn.functional.scaled_mm(**scaled_operands(a, b), output_dtype=torch.float32)
    return outputs[: len(a.codes), : len(b.codes)]


def scaled_operands(a: Quantized, b: Quantized) -> dict[str, Any]:
    """Return the arguments of torch's `scaled_mm` for A B^T, padded with zeros to the sizes that cuBLAS takes.

    The codes of A get a multiple of 4 rows, those of B a multiple of 16 rows, and both a multiple of 128 columns.
    Scales of single rows, [rows, blocks along K], are laid out in column-major order. Scales of B's 128 x 128 blocks
    are passed as [blocks along K, row blocks], with zeros up to a multiple of 4 blocks along K. cuBLAS takes this
    multiple as the stride from one row block to the next, so without the zeros the product would silently be wrong.
    """
    recipes = torch.nn.functional.ScalingType
    a_codes = padded(a.codes, rows=4, columns=BLOCK).contiguous()
    b_codes = padded(b.codes, rows=16, columns=BLOCK).contiguous()
    by_blocks = b.grid.rows == BLOCK  # else each row of B has scales of its own
    b_scales = padded(b.scales, rows=1, columns=4).contiguous() if by_blocks else _by_column(b.scales, len(b_codes))
    return {
        "mat_a": a_codes,
        "mat_b": b_codes.T,
        "scale_a": _by_column(a.scales, len(a_codes)),
        "scale_recipe_a": recipes.BlockWise1x128,
        "scale_b": b_scales.T if by_blocks else b_scales,
        "scale_recipe_b": recipes.BlockWise128x128 if by_blocks else recipes.BlockWise1x128,
    }


def _by_column(scales: Tensor, rows: int) -> Tensor:
    """Fill scales [R, columns] up with zeros to [rows, columns], and lay them out in column-major order."""
    return pad(scales, (0, 0, 0, rows - len(scales))).T.contiguous().T
