"""A linear layer with a quantized weight, and the rounding of FP8 caches. Torch only.

Shapes: `N` features out, `K` features in.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from jackpot.models.quantization.product import product
from jackpot.models.quantization.quantizer import E4M3, Quantized, Scheme, dequantize, encode, quantize


class QuantizedLinear(nn.Module):
    """A linear layer with a quantized weight, without gradient. The bias is not quantized and is added last.

    With quantized activations and an exact `product`, a token's result does not depend on the rest of the batch.
    Without quantized activations the layer multiplies by the dequantized weight, in the dtype of the activations.

    Args:
        weight: [N, K].
        bias: [N] or None; not copied.
    """

    codes: Tensor  # [N, K]
    scales: Tensor  # [blocks along N, blocks along K] float32, the factors of the codes

    def __init__(self, weight: Tensor, bias: Tensor | None, scheme: Scheme) -> None:
        super().__init__()
        self.scheme, self.bias = scheme, bias
        self.out_features, self.in_features = weight.shape
        quantized = quantize(weight.detach(), scheme.weights)
        self.register_buffer("codes", quantized.codes)
        self.register_buffer("scales", quantized.scales)

    @torch.no_grad()
    def take(self, weight: Tensor) -> None:
        """Quantize another weight, [N, K], and take its codes and scales in place of the layer's."""
        quantized = quantize(weight, self.scheme.weights)
        self.codes.copy_(quantized.codes)
        self.scales.copy_(quantized.scales)

    @property
    def quantized(self) -> Quantized:
        """Return the quantized weight."""
        return Quantized(self.codes, self.scales, self.scheme.weights)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [..., K] to [..., N], in the dtype of the inputs."""
        if self.scheme.activations is None:
            return linear(inputs, dequantize(self.quantized, inputs.dtype), self.bias)
        rows = quantize(inputs.reshape(-1, self.in_features), self.scheme.activations)
        outputs = product(rows, self.quantized).to(inputs.dtype).reshape(*inputs.shape[:-1], self.out_features)
        return outputs if self.bias is None else outputs + self.bias


def round_to_fp8(states: Tensor) -> Tensor:
    """Round keys or values of any shape to FP8 with the scale 1, clamped to +-448, as vLLM's `kv_cache_dtype="fp8"`
    does for a checkpoint without scales."""
    return encode(states.float(), 1.0, E4M3).to(states.dtype)
