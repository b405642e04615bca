"""The product of quantised matrices, in which a number depends on its own row and column alone. Layer 3: torch only.

Shapes: `M` tokens, `N` output features, `K` input features. Both matrices are cut along K into the same parts of equal
scale (128 in FP8, all of K in INT8). Inside a part codes are multiplied and added in float64, without any rounding: a
product of FP8 codes is a multiple of 2**-18 below 2**18, with room for 2**17 of them, one of INT8 codes is below 2**14.
What rounds is one conversion to float32 and two scales a part, and the sum over parts in the order of K. So batch size,
threads and BLAS do not matter, which no ordinary float32 product promises. (torch's own INT8 product would do as well,
but on CPUs without VNNI it saturates: 32,640 in place of 4,129,024.)

It has not run on a GPU. There torch's own product of quantised matrices would be faster and adds in another order.
"""

import torch
from torch import Tensor

from jackpot.precision.quantiser import Quantised


def gemm_exact(a: Quantised, b: Quantised) -> Tensor:
    """A B^T: [M, N] float32.

    Args:
        a: [M, K], scales of single rows.
        b: [N, K], the same codes and the same parts along K.

    Raises:
        ValueError: matrices that do not fit.
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
    for number, start in enumerate(range(0, size, part)):
        columns = slice(start, start + part)
        product = _exact(a.codes[:, columns], b.codes[:, columns])
        total += a.scales[:, number, None] * (b_scales[:, number] * product)
    return total


def _exact(a: Tensor, b: Tensor) -> Tensor:
    """A B^T of codes, exact in float64, rounded once: [M, N] float32."""
    return (a.double() @ b.double().T).float()
