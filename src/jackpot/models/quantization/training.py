"""Linear layers that are trained through the codes that an engine computes with: Jet-RL's unified flow, in FP8 or INT8.

Shapes: `M` tokens, `N` features out, `K` features in.

Status: experimental.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from jackpot.core.errors import ModelError
from jackpot.models.load import in_float32
from jackpot.models.quantization.attention import attend_as_engine, reads_what_it_caches
from jackpot.models.quantization.convert import replace_linears
from jackpot.models.quantization.product import product
from jackpot.models.quantization.quantizer import (
    FP8_TOKEN_BLOCKS,
    Grid,
    Quantized,
    Scheme,
    dequantize,
    quantize,
    transposed,
)

Backward = Literal["dequantized", "fp8"]
Forward = Callable[..., Any]


class CodedProduct(torch.autograd.Function):
    """The product X W^T of codes, [M, N] in the dtype of X; only codes and scales are kept for backward.

    The setting `backward` chooses the gradients d X and d W. With x and w the numbers that the codes stand for, and g
    the gradient of the output, it may be
    "dequantized": d X = g w, d W = g^T x, as products in the dtype of g; or
    "fp8", for FP8 codes alone: d X = q(g) w, d W = q(g^T) q(x^T), where q quantizes in blocks of 1 x 128 along the sum,
    which is over features out for d X and over tokens for d W.
    """

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, rows: Quantized, grid: Grid, backward: Backward) -> Tensor:
        """Return the product X W^T, [M, N].

        Args:
            inputs: X, [M, K], in the dtype of the output.
            weight: W, [N, K], the master weight.
            rows: `inputs`, quantized.
            grid: grid by which the weight is quantized.
            backward: which gradients `backward` computes, as the class says.
        """
        coded = quantize(weight.to(inputs.dtype), grid)
        ctx.save_for_backward(rows.codes, rows.scales, coded.codes, coded.scales)
        ctx.rows_grid, ctx.weight_grid = rows.grid, grid
        ctx.backward_mode, ctx.weight_dtype = backward, weight.dtype
        return product(rows, coded).to(inputs.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of X and W, None if not needed, from `grad`, the gradient of the product, [M, N]."""
        row_codes, row_scales, weight_codes, weight_scales = ctx.saved_tensors
        rows = Quantized(row_codes, row_scales, ctx.rows_grid)
        weight = Quantized(weight_codes, weight_scales, ctx.weight_grid)
        grad_inputs = grad_weight = None

        if ctx.backward_mode == "fp8":
            if ctx.needs_input_grad[0]:
                grad_inputs = product(quantize(grad, FP8_TOKEN_BLOCKS), transposed(weight)).to(grad.dtype)
            if ctx.needs_input_grad[1]:
                tokens_last = dequantize(rows, torch.float32).T  # [K, M]: the sum of d W is over tokens
                grad_weight = product(quantize(grad.T, FP8_TOKEN_BLOCKS), quantize(tokens_last, FP8_TOKEN_BLOCKS))
        else:
            if ctx.needs_input_grad[0]:
                grad_inputs = grad @ dequantize(weight, grad.dtype)
            if ctx.needs_input_grad[1]:
                grad_weight = grad.T @ dequantize(rows, grad.dtype)

        grad_weight = None if grad_weight is None else grad_weight.to(ctx.weight_dtype)
        return grad_inputs, grad_weight, None, None, None  # no gradients for rows, grid and backward


class CodedLinear(nn.Linear):
    """A linear layer whose weight is trained through codes, in place of an `nn.Linear` with the same parameters.

    Forward multiplies the same codes by the same `product` as `QuantizedLinear`, so a layer computes in training what
    it computes in the engine. Weights stay float32, and get a gradient as if rounding were the identity. The bias is
    not quantized and is added last. Under autocast inputs and weight are first cast to its dtype, as those of an
    `nn.Linear` are.

    Weights are quantized in every forward pass, and no codes are kept from one pass to the next. So no optimizer step,
    loaded checkpoint, or swap of weights can leave codes of other weights behind. (A cache could not notice a fused
    AdamW, which does not change `weight._version`.) Quantizing costs a few operations on each weight, where the product
    costs one for each token.

    Args:
        layer: layer whose parameters become this layer's; they are not copied.
        grid: grid by which the weight is quantized.
        backward: how gradients are computed (`CodedProduct`).
        rows: memory of the last quantized input, shared by all layers of the model: one object for all of them.
    """

    def __init__(self, layer: nn.Linear, grid: Grid, backward: Backward, rows: "LastRows") -> None:
        """Take over the parameters of `layer`; quantize its weight by `grid` and its inputs by `rows`.

        `backward` chooses the formula of the gradients (`CodedProduct`).
        """
        nn.Module.__init__(self)  # not nn.Linear's, which would make new parameters
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self._grid, self._backward, self._rows = grid, backward, rows

    def forward(self, inputs: Tensor) -> Tensor:
        """Map [..., K] to [..., N], in the dtype of the inputs or of autocast."""
        return self.multiply(inputs, self.weight)

    def multiply(self, inputs: Tensor, weight: Tensor) -> Tensor:
        """Map inputs as `forward` does, by another weight, [N, K], such as a weight into which an adapter is merged."""
        device = inputs.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else inputs.dtype

        rows = self._rows.of(inputs, dtype)  # the inputs in codes, [M, K]
        flat = inputs.to(dtype).reshape(-1, self.in_features)
        outputs = CodedProduct.apply(flat, weight, rows, self._grid, self._backward)
        outputs = outputs.reshape(*inputs.shape[:-1], self.out_features)
        return outputs if self.bias is None else outputs + self.bias.to(dtype)


class LastRows:
    """A memory of the last quantized input, so that layers which read the same input in turn quantize it once.

    So queries, keys and values of attention keep one copy of their input's codes for backward, not three. Inputs are
    the same if they are the same tensor, unchanged since.
    """

    def __init__(self, grid: Grid) -> None:
        """Begin without an input; inputs are quantized by `grid`."""
        self._grid = grid
        # The last input, its version when it was quantized, the dtype that it was cast to, and its codes.
        self._last: tuple[ref[Tensor], int, torch.dtype, Quantized] | None = None

    def of(self, inputs: Tensor, dtype: torch.dtype) -> Quantized:
        """Return the codes of inputs [..., K], cast to `dtype` first, as a matrix [M, K].

        The codes are kept until others come, and returned again if the same inputs are passed next.
        """
        if self._last is not None:
            last_inputs, last_version, last_dtype, last_codes = self._last  # `last_inputs` is a weak reference
            if last_inputs() is inputs and last_version == inputs._version and last_dtype == dtype:
                return last_codes
        with torch.no_grad():
            codes = quantize(inputs.to(dtype).reshape(-1, inputs.shape[-1]), self._grid)
        self._last = ref(inputs), inputs._version, dtype, codes
        return codes


def train_in_codes(
    model: PreTrainedModel,
    scheme: Scheme,
    backward: Backward,
    fp8_cache: bool,
    exact: bool,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Let a model compute as a quantized engine does, in place.

    The linear layers that `quantize_linears` would quantize compute with codes, attention as after `attend_as_engine`,
    and the rest of the backbone with numbers of `dtype`.

    Args:
        scheme: the engine's scheme, which quantizes activations too.
        backward: the formula of the gradients (`CodedProduct`).
        fp8_cache, exact: as in `attend_as_engine`.
        dtype: dtype of the engine's weights and activations.

    Raises:
        ModelError: the model has no linear layer to quantize, its attention cannot be replaced or, with an FP8 cache,
            does not read what it caches, or it keeps a recurrent state and `dtype` is not float32.
    """
    if dtype != torch.float32 and getattr(model, "_is_stateful", False):
        raise ModelError(
            f"{type(model).__name__} keeps a recurrent state, which an engine in bf16 rounds token by token and "
            f"training by chunks, so that they differ; set engine.dtype=fp32, or precision to fp32 or bf16"
        )

    assert scheme.activations is not None  # the settings allow no other scheme in training
    attend_as_engine(model, fp8_cache, exact)

    # Zeros that take no memory stand for weights that are not float32: only addresses of keys and values are compared.
    if fp8_cache:
        with in_float32(model, lambda data: torch.zeros((), device=data.device).expand(data.shape)):
            is_cached = reads_what_it_caches(model)
        if not is_cached:
            raise ModelError(
                f"{type(model).__name__} caches other keys and values than its attention reads, so training cannot "
                f"round what an engine's cache rounds; leave engine.kv_cache_dtype out"
            )

    shared_rows = LastRows(scheme.activations)  # one for all layers, so that layers with one input quantize it once
    try:
        replace_linears(model, lambda layer: CodedLinear(layer, scheme.weights, backward, shared_rows))
    except ValueError as error:
        raise ModelError(f"{error}; take precision fp32 or bf16") from error

    if dtype != torch.float32:
        _compute_in(model, dtype)


def _compute_in(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Let a backbone compute in `dtype` as a model with weights of that dtype does, in place; weights stay float32.

    Autocast would keep float32 between layers, and in norms. Here, while a module runs, its weights are rounded, and
    those of the modules inside it, as its code may read them directly. So activations between layers have the dtype
    too. The output layer is no part of the backbone and does not change.
    """
    body = model.base_model
    for module in body.modules():
        if isinstance(module, nn.Embedding):
            # A subclass may also change the rows that it looks up, such as scale them.
            run = _rounded_outputs if type(module) is nn.Embedding else _with_rounded_lookup
            module.forward = partial(run, module, module.forward, dtype)
        elif weighted := [inner for inner in _read_by(module) if inner._parameters]:  # modules with weights to round
            module.forward = partial(_with_rounded_weights, weighted, module.forward, dtype)
    body.forward = partial(_without_autocast, body.forward)


def _read_by(module: nn.Module) -> list[nn.Module]:
    """Return the modules whose weights are rounded while `module` runs, as it may read them: itself, and all inside it.

    A module that contains layers reads its own weights alone: where weights are sharded over ranks, only one layer at a
    time has its weights whole.
    """
    inside = list(module.modules())
    if any(isinstance(inner, GradientCheckpointingLayer) for inner in inside[1:]):
        inside = [module]
    return [inner for inner in inside if not isinstance(inner, CodedLinear | nn.Embedding)]


def _rounded_outputs(_: nn.Module, forward: Forward, dtype: torch.dtype, *args: Any) -> Tensor:
    """Look rows up in an embedding's float32 table and round the rows; the table's gradient adds up in float32."""
    return forward(*args).to(dtype)


class _LookupIn(TorchFunctionMode):
    """A mode in which an embedding with rounded weights looks rows up in a float32 table instead, and rounds the rows.

    So the gradient of a row adds up in float32. It is for embeddings that also change the rows, such as scale them.
    """

    def __init__(self, table: Tensor, dtype: torch.dtype) -> None:
        """Keep the embedding's float32 table, and the dtype that its rows are rounded to."""
        super().__init__()
        self._table, self._dtype = table, dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call torch's function `func`; where it looks up rows, take them from the float32 table and round them."""
        if func is not torch.nn.functional.embedding:
            return func(*args, **(kwargs or {}))
        return func(args[0], self._table, *args[2:], **(kwargs or {})).to(self._dtype)


def _with_rounded_lookup(module: nn.Embedding, forward: Forward, dtype: torch.dtype, *args: Any, **options: Any) -> Any:
    """Run an embedding with rounded weights, but look its rows up in the float32 table."""
    with _LookupIn(module.weight, dtype):
        return _with_rounded_weights([module], forward, dtype, *args, **options)


def _with_rounded_weights(
    modules: Sequence[nn.Module], forward: Forward, dtype: torch.dtype, *args: Any, **options: Any
) -> Any:
    """Run a forward while rounded copies replace the weights of some modules, and put the weights back after it.
    Gradients reach the weights."""
    originals = [dict(module._parameters) for module in modules]
    for module in modules:
        parameters: dict[str, Any] = module._parameters  # Any, as here tensors replace parameters
        parameters |= {name: weight.to(dtype) for name, weight in parameters.items() if weight is not None}
    try:
        return forward(*args, **options)
    finally:
        for module, weights in zip(modules, originals, strict=True):
            module._parameters.update(weights)


def _without_autocast(forward: Forward, input_ids: Tensor, **options: Any) -> Any:
    """Run a backbone's forward pass without autocast."""
    with torch.autocast(input_ids.device.type, enabled=False):
        return forward(input_ids=input_ids, **options)
