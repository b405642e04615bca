"""A linear layer whose weight is quantised. Layer 3: torch only.

Shapes: `N` features out, `K` features in.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from jackpot.precision.gemm import gemm_exact
from jackpot.precision.quantiser import Quantised, dequantise, quantise
from jackpot.precision.schemes import Scheme


class QuantisedLinear(nn.Module):
    """Takes the place of an `nn.Linear`, without gradient. The bias stays as it was and is added last.

    With quantised activations a token's result does not depend on the tokens beside it (`gemm_exact`). Without, it is
    torch's product with the weight in the dtype of the activations.
    """

    codes: Tensor  # [N, K]
    scales: Tensor  # of `Quantised`

    def __init__(self, weight: Tensor, bias: Tensor | None, scheme: Scheme) -> None:
        """
        Args:
            weight: [N, K].
            bias: [N] or None; shared with whoever holds it.
        """
        super().__init__()
        self.scheme, self.bias = scheme, bias
        self.out_features, self.in_features = weight.shape
        quantised = quantise(weight.detach(), scheme.weights)
        self.register_buffer("codes", quantised.codes)
        self.register_buffer("scales", quantised.scales)

    @torch.no_grad()
    def take(self, weight: Tensor) -> None:
        """Quantise another weight [N, K] and hold that."""
        quantised = quantise(weight, self.scheme.weights)
        self.codes.copy_(quantised.codes)
        self.scales.copy_(quantised.scales)

    @property
    def quantised(self) -> Quantised:
        """The weight as it is held."""
        return Quantised(self.codes, self.scales, self.scheme.weights)

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., K] -> [..., N], in the dtype of the inputs."""
        if self.scheme.activations is None:
            return linear(inputs, dequantise(self.quantised, inputs.dtype), self.bias)
        rows = quantise(inputs.reshape(-1, self.in_features), self.scheme.activations)
        outputs = gemm_exact(rows, self.quantised).to(inputs.dtype).reshape(*inputs.shape[:-1], self.out_features)
        return outputs if self.bias is None else outputs + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, weights={self.scheme.weights}"
