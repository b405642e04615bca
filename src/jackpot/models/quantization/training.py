"""Linear layers that are trained through the codes that an engine computes with: Jet-RL's one FP8 flow.

Forward multiplies the same codes by the same `product` as `QuantizedLinear`, so a layer computes in training what it
computes in the engine. Weights stay as they are, float32, and get a gradient as if rounding were the identity.

Weights are quantized in every forward pass and no codes are kept between two of them: no optimizer step, loaded
checkpoint, or swap of weights can leave codes of other weights behind. (A fused AdamW does not move
`weight._version`, so a cache could not notice it.) Quantizing costs a few operations on each weight, where the product
costs one for each token.

Shapes: `M` tokens, `N` features out, `K` features in.
"""

from typing import Any, Literal
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from jackpot.core.errors import ModelError
from jackpot.models.quantization.attention import attend_as_engine
from jackpot.models.quantization.convert import replace_linears
from jackpot.models.quantization.product import product
from jackpot.models.quantization.quantizer import (
    FP8_BLOCKS,
    FP8_TOKEN_BLOCKS,
    Grid,
    Quantized,
    dequantize,
    quantize,
    transposed,
)

Backward = Literal["dequantized", "fp8"]


class Fp8Product(torch.autograd.Function):
    """Computes X W^T of codes, [M, N] in the dtype of X; only codes and scales are kept for backward.

    With x and w the numbers that the codes stand for, and g the gradient of the output:
    dequantized: d X = g w, d W = g^T x, as products in the dtype of g;
    fp8: d X = q(g) w, d W = q(g^T) q(x^T), with q quantizing by 1 x 128 along the sum: features out, and tokens.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, codes: Tensor, scales: Tensor, backward: Backward) -> Tensor:
        """
        Args:
            inputs: [M, K], in the dtype of the output.
            weight: [N, K], the master weight.
            codes, scales: of `inputs`.
        """
        held = quantize(weight.to(inputs.dtype), FP8_BLOCKS)
        ctx.save_for_backward(codes, scales, held.codes, held.scales)
        ctx.backward_mode, ctx.weight_dtype = backward, weight.dtype
        return product(Quantized(codes, scales, FP8_TOKEN_BLOCKS), held).to(inputs.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        codes, scales, held_codes, held_scales = ctx.saved_tensors
        rows, held = Quantized(codes, scales, FP8_TOKEN_BLOCKS), Quantized(held_codes, held_scales, FP8_BLOCKS)
        to_inputs = to_weight = None
        if ctx.backward_mode == "fp8":
            if ctx.needs_input_grad[0]:
                to_inputs = product(quantize(grad, FP8_TOKEN_BLOCKS), transposed(held)).to(grad.dtype)
            if ctx.needs_input_grad[1]:
                tokens_last = dequantize(rows, torch.float32).T
                to_weight = product(quantize(grad.T, FP8_TOKEN_BLOCKS), quantize(tokens_last, FP8_TOKEN_BLOCKS))
        else:
            if ctx.needs_input_grad[0]:
                to_inputs = grad @ dequantize(held, grad.dtype)
            if ctx.needs_input_grad[1]:
                to_weight = grad.T @ dequantize(rows, grad.dtype)
        return to_inputs, None if to_weight is None else to_weight.to(ctx.weight_dtype), None, None, None


class Fp8Linear(nn.Linear):
    """Replaces an `nn.Linear` whose weight is trained through FP8 codes, under the same names.

    The bias is not quantized and is added last. Under autocast inputs and weight are first cast to its dtype, as those
    of an `nn.Linear` are.
    """

    def __init__(self, layer: nn.Linear, backward: Backward, rows: "LastRows") -> None:
        """
        Args:
            layer: whose parameters become this layer's; not copied.
            rows: of the whole model.
        """
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self._backward, self._rows = backward, rows

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [..., K] to [..., N], in the dtype of the inputs or of autocast."""
        return self.multiply(inputs, self.weight)

    def multiply(self, inputs: Tensor, weight: Tensor) -> Tensor:
        """Do as `forward` with another weight, [N, K], such as one that an adapter is merged into."""
        kind = inputs.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else inputs.dtype
        rows = self._rows.of(inputs, dtype)
        flat = inputs.to(dtype).reshape(-1, self.in_features)
        outputs = Fp8Product.apply(flat, weight, rows.codes, rows.scales, self._backward)
        outputs = outputs.reshape(*inputs.shape[:-1], self.out_features)
        return outputs if self.bias is None else outputs + self.bias.to(dtype)


class LastRows:
    """Quantizes the inputs of linear layers, and once what several of them read one after the other.

    So queries, keys and values of attention keep one copy of their input's codes for backward, not three. Inputs are
    the same where they are the same tensor, not changed since.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._last: tuple[ref[Tensor], int, torch.dtype, Quantized] | None = None

    def of(self, inputs: Tensor, dtype: torch.dtype) -> Quantized:
        """Return the codes of inputs [..., K], cast to `dtype` first, as a matrix [M, K]."""
        if self._last is not None:
            tensor, version, cast, rows = self._last
            if tensor() is inputs and version == inputs._version and cast == dtype:
                return rows
        with torch.no_grad():
            rows = quantize(inputs.to(dtype).reshape(-1, inputs.shape[-1]), self._grid)
        self._last = ref(inputs), inputs._version, dtype, rows
        return rows


def train_in_fp8(model: PreTrainedModel, backward: Backward, fp8_cache: bool, exact: bool) -> None:
    """Let a model compute as an FP8 engine does, in place: those linear layers that `quantize_linears` would quantize
    with FP8 codes, and attention as `attend_as_engine` says, which has the last two arguments.

    Raises:
        ModelError: the model has no linear layer to quantize, or its attention cannot be replaced.
    """
    attend_as_engine(model, fp8_cache, exact)
    rows = LastRows(FP8_TOKEN_BLOCKS)
    try:
        replace_linears(model, lambda layer: Fp8Linear(layer, backward, rows))
    except ValueError as error:
        raise ModelError(f"{error}; take precision fp32 or bf16") from error
