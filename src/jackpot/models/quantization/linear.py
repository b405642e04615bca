"""A linear layer whose weight is quantized. Torch only.

Shapes: `N` features out, `K` features in.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from jackpot.models.quantization.quantizer import E4M3, Grid, Quantized, Scheme, dequantize, encode, quantize


def gemm_exact(a: Quantized, b: Quantized) -> Tensor:
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


class QuantizedLinear(nn.Module):
    """Takes the place of an `nn.Linear`, without gradient. The bias stays as it was and is added last.

    With quantized activations a token's result does not depend on the tokens beside it (`gemm_exact`). Without, it is
    torch's product with the weight in the dtype of the activations.
    """

    codes: Tensor  # [N, K]
    scales: Tensor  # of `Quantized`

    def __init__(self, weight: Tensor, bias: Tensor | None, scheme: Scheme) -> None:
        """
        Args:
            weight: [N, K].
            bias: [N] or None; shared with whoever holds it.
        """
        super().__init__()
        self.scheme, self.bias = scheme, bias
        self.out_features, self.in_features = weight.shape
        quantized = quantize(weight.detach(), scheme.weights)
        self.register_buffer("codes", quantized.codes)
        self.register_buffer("scales", quantized.scales)

    @torch.no_grad()
    def take(self, weight: Tensor) -> None:
        """Quantize another weight [N, K] and hold that."""
        quantized = quantize(weight, self.scheme.weights)
        self.codes.copy_(quantized.codes)
        self.scales.copy_(quantized.scales)

    @property
    def quantized(self) -> Quantized:
        """The weight as it is held."""
        return Quantized(self.codes, self.scales, self.scheme.weights)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., K] -> [..., N], in the dtype of the inputs."""
        if self.scheme.activations is None:
            return linear(inputs, dequantize(self.quantized, inputs.dtype), self.bias)
        rows = quantize(inputs.reshape(-1, self.in_features), self.scheme.activations)
        outputs = gemm_exact(rows, self.quantized).to(inputs.dtype).reshape(*inputs.shape[:-1], self.out_features)
        return outputs if self.bias is None else outputs + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, weights={self.scheme.weights}"


def round_to_fp8(states: Tensor) -> Tensor:
    """Keys or values of any shape with the scale 1, beyond 448 cut off: what vLLM's `kv_cache_dtype="fp8"` stores where
    a checkpoint brings no scales of its own."""
    return encode(states.float(), 1.0, E4M3).to(states.dtype)


def round_by_token(states: Tensor) -> Tensor:
    """Keys or values [..., D] with a power of two as the scale of each token and head."""
    rows = states.reshape(-1, states.shape[-1])
    grid = Grid(codes=E4M3, rows=1, scales="power_of_two")
    return dequantize(quantize(rows, grid), states.dtype).reshape(states.shape)
