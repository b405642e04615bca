"""The element-wise parts of a language model in fewer passes over memory, for training on a CPU.

Between its matrix products a layer normalizes, rotates and gates; here each of these is a single function, which `fuse`
gives to the modules of a loaded model.
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial, wraps
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from jackpot.models.load import in_float32
from jackpot.objectives.kernels.autograd import split_range

Forward = Callable[..., Any]

CHUNK = 2**18  # numbers of a tensor that are read at a time: 1 MiB in float32
PRODUCT_ROWS = 2048  # most rows that are gated and multiplied at a time; products of fewer rows are slower
_WIDE = torch.float32  # dtype of intermediate results and sums
TOLERANCES = {_WIDE: 1e-5, torch.bfloat16: 0.02}
"""The most by which outputs and gradients may differ from what a module computed before, as a share of the largest
number of a tensor, by the dtype of its inputs."""

_GATED = {"gate_proj", "up_proj", "down_proj"}  # the linear layers of a gated MLP
_ROTATE = "apply_rotary_pos_emb"  # transformers' function, of the same name in the modules of most models


def _without_autocast(function: Forward) -> Forward:
    """Return the function without autocast, so that the arguments decide the dtypes."""

    @wraps(function)
    def run(*args: Any) -> Any:
        """Call the function without autocast."""
        with torch.autocast("cpu", enabled=False):
            return function(*args)

    return run


class RMSNorm(torch.autograd.Function):
    """The norm w x / sqrt(mean x^2 + eps) over the last dimension, in float32.

    As in transformers, x / sqrt(mean x^2 + eps) is rounded to the dtype of x before it is multiplied by w.
    """

    @staticmethod
    @_without_autocast
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return w x / sqrt(mean x^2 + eps), with w = `weight`."""
        rows = _rows(x)
        width = rows.shape[1]
        out = torch.empty_like(rows, dtype=torch.promote_types(x.dtype, weight.dtype))
        scale = rows.new_empty((len(rows), 1), dtype=_WIDE)  # 1 / sqrt(mean x^2 + eps)

        for run in split_range(len(rows), max(1, CHUNK // width)):
            chunk = rows[run].to(_WIDE)
            norm = torch.linalg.vector_norm(chunk, dim=1, keepdim=True)
            torch.rsqrt(norm.square_().div_(width).add_(eps), out=scale[run])
            # Where nothing is rounded in between, the normed x is computed in the memory of the result.
            normed = torch.mul(chunk, scale[run], out=out[run] if x.dtype == out.dtype == _WIDE else None)
            torch.mul(normed.to(x.dtype), weight, out=out[run])

        ctx.save_for_backward(x, weight, scale)
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    @_without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradient of w, `weight`: the sum of g n over all rows; and that of x: r (g w - n mean(g w n)).

        Here g is the output's gradient, `scale` is r = 1 / sqrt(mean x^2 + eps), and n = x r.
        """
        x, weight, scale = ctx.saved_tensors
        rows, grads = _rows(x), _rows(grad)
        wide = weight.to(_WIDE)
        grad_x, grad_weight = torch.empty_like(rows), torch.zeros_like(wide)

        for run in split_range(len(rows), max(1, CHUNK // rows.shape[1])):
            normed, wide_grads = rows[run] * scale[run], grads[run].to(_WIDE)  # n and g
            products = wide_grads * normed  # g n
            grad_weight += products.sum(0)

            negative_means = torch.mv(products, wide).div_(-rows.shape[1])[:, None]  # -mean(g w n) of each row
            # Where nothing is rounded at the end, the gradient is computed in the memory of the result.
            scaled = torch.mul(wide_grads, wide, out=grad_x[run] if grad_x.dtype == _WIDE else None)
            scaled.addcmul_(normed, negative_means).mul_(scale[run])
            if grad_x.dtype != _WIDE:
                grad_x[run].copy_(scaled)

        return grad_x.view(x.shape), grad_weight.to(weight.dtype), None  # no gradient for eps


class GatedProduct(torch.autograd.Function):
    """The product (silu(gate) * up) W^T, [..., H], in the dtype of gate and up [..., I]; W is [H, I].

    Backward computes silu(gate) * up again; the gradient of W is summed in float32.
    """

    @staticmethod
    @_without_autocast
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        """Return (silu(gate) * up) W^T, [..., H], with W = `weight`, [H, I]; gate and up are [..., I]."""
        gates, ups = _rows(gate), _rows(up)
        transposed = weight.to(gate.dtype).t()
        out = gates.new_empty((len(gates), len(weight)))
        for run in split_range(len(gates), PRODUCT_ROWS):
            torch.mm(silu(gates[run]).mul_(ups[run]), transposed, out=out[run])
        ctx.save_for_backward(gate, up, weight)
        return out.view(*gate.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    @_without_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of gate, up and W from `grad`, the gradient of the product, [..., H]."""
        gate, up, weight = ctx.saved_tensors
        gates, ups = _rows(gate), _rows(up)
        grads, matrix = _rows(grad), weight.to(gate.dtype)
        grad_gate, grad_up = torch.empty_like(gates), torch.empty_like(ups)
        grad_weight = torch.zeros_like(weight, dtype=_WIDE) if ctx.needs_input_grad[2] else None

        # `products` is the gradient of silu(gate) * up. Times one of the two factors it is the gradient of the other.
        for run in split_range(len(gates), PRODUCT_ROWS):
            active = silu(gates[run])
            if grad_weight is not None:
                _add_product(grad_weight, grads[run].t(), active * ups[run])
            products = torch.mm(grads[run], matrix)
            torch.mul(products, active, out=grad_up[run])
            torch.ops.aten.silu_backward(products.mul_(ups[run]), gates[run], grad_input=grad_gate[run])

        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_gate.view(gate.shape), grad_up.view(up.shape), grad_weight


class Rotation(torch.autograd.Function):
    """The rotary embedding x cos + (-x_2, x_1) sin, with x_1 and x_2 the halves of the last dimension of x.

    Shapes: x [B, heads, S, D], cos and sin [B or 1, 1, S, D].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return x cos + (-x_2, x_1) sin, with x_1 and x_2 the halves of the last dimension of x."""
        ctx.save_for_backward(cos, sin)
        half = x.shape[-1] // 2
        return _rotated(x, cos, -sin[..., :half], sin[..., half:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Rotate the gradient back: the transpose of a rotation has the opposite angle."""
        cos, sin = ctx.saved_tensors
        half = grad.shape[-1] // 2
        return _rotated(grad, cos, sin[..., half:], -sin[..., :half]), None, None


def _rotated(x: Tensor, cos: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Rotate x [B, heads, S, D] by the rotary embedding: return x cos + (x_2 * first, x_1 * second), laid out as x.

    Here x_1 and x_2 are the halves of x along D, and `first` and `second` are halves of the sine, one of them negated:
    `first` to rotate forward, `second` to rotate a gradient back.
    """
    out, half = torch.empty_like(x), x.shape[-1] // 2
    # A run is so many positions that x has at most CHUNK numbers at them, but at least one position.
    for run in split_range(x.shape[2], max(1, CHUNK * x.shape[2] // x.numel())):
        source, target = x[:, :, run], out[:, :, run]
        torch.mul(source, cos[:, :, run], out=target)
        target[..., :half].addcmul_(source[..., half:], first[:, :, run])
        target[..., half:].addcmul_(source[..., :half], second[:, :, run])
    return out


def _rows(tensor: Tensor) -> Tensor:
    """Reshape [..., D] to a matrix [N, D]."""
    return tensor.reshape(-1, tensor.shape[-1])


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the matrix product a b to `total`, which may have a wider dtype."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def fuse(model: PreTrainedModel) -> int:
    """Replace the forward of a model's known modules by functions of fewer passes, in place; return their number.

    In transformers every arithmetic step is an operator that reads and writes all tokens. Each function here is one
    `torch.autograd.Function` with its gradient in closed form, without a second derivative. It goes over the tokens in
    runs that stay in the processor's cache, and keeps little for backward: an RMSNorm its input, a gated MLP the two
    matrix products before the gate.

    The modules keep their classes, parameters and names, and their former forward for what the functions cannot
    compute, such as a layer with an adapter. A known module has the attributes of a kind that is fused here, and its
    function has the same output and gradients on a few numbers, up to rounding; on the meta device, where there are no
    numbers, the attributes alone decide. On a GPU nothing changes.
    """
    if model.device.type not in ("cpu", "meta"):
        return 0
    count = 0
    for module in model.modules():
        if "forward" in vars(module):  # something else has replaced the forward of its class
            continue

        forward = _norm(module) or _mlp(module) or _attention(module)
        if forward is not None:
            module.forward = forward
            count += 1
    return count


def _norm(module: nn.Module) -> Forward | None:
    """Return a faster forward of an RMSNorm; None for other modules, and where its outputs or gradients differ."""
    names = [name for name, _ in module.named_parameters()]
    is_known = names == ["weight"] and isinstance(getattr(module, "variance_epsilon", None), float)
    if not (is_known and _takes_one_argument(module)):
        return None

    forward = partial(_run_norm, module, module.forward)
    inputs = _random_inputs(4, len(module.get_parameter("weight")))
    # `TOLERANCES` has every dtype of inputs that `RMSNorm` takes.
    agrees = all(_agree(module.forward, forward, [inputs.to(dtype)], module) for dtype in TOLERANCES)
    return forward if agrees else None


def _run_norm(module: nn.Module, own_forward: Forward, x: Tensor) -> Tensor:
    """Run a norm by `RMSNorm`, or by the module's own forward where a dtype is unknown to `RMSNorm`."""
    if module.weight.dtype != _WIDE or x.dtype not in TOLERANCES:
        return own_forward(x)
    return RMSNorm.apply(x, module.weight, module.variance_epsilon)


def _mlp(module: nn.Module) -> Forward | None:
    """Return a faster forward of a gated MLP; None for other modules, and where its outputs or gradients differ."""
    linears = {name: child for name, child in module.named_children() if type(child) is nn.Linear}
    is_known = isinstance(getattr(module, "act_fn", None), nn.SiLU | SiLUActivation) and linears.keys() == _GATED
    if not (is_known and _takes_one_argument(module)) or len(list(module.parameters())) != 3:  # no biases
        return None

    forward = partial(_run_mlp, module, module.forward)
    inputs = _random_inputs(4, linears["gate_proj"].in_features)
    return forward if _agree(module.forward, forward, [inputs], module) else None


def _run_mlp(module: nn.Module, own_forward: Forward, x: Tensor) -> Tensor:
    """Run a gated MLP by `GatedProduct`, or as the module does where a layer has an adapter or another dtype."""
    last = module.get_submodule("down_proj")
    if type(last) is not nn.Linear or last.weight.dtype != _WIDE:  # it has an adapter or another dtype
        return own_forward(x)
    gate, up = module.get_submodule("gate_proj")(x), module.get_submodule("up_proj")(x)
    if gate.dtype != up.dtype:  # `GatedProduct` takes one dtype for both
        return last(module.get_submodule("act_fn")(gate) * up)
    return GatedProduct.apply(gate, up, last.weight)


def _takes_one_argument(module: nn.Module) -> bool:
    """Tell whether a module's forward has one argument alone; some norms also take a gate."""
    return len(inspect.signature(module.forward).parameters) == 1


def _attention(module: nn.Module) -> Forward | None:
    """Return the forward of an attention module with `_rotate` in place of the rotation that it calls.

    Return None for a module that calls no rotation, or another one than `_rotate` computes.
    """
    function = type(module).forward
    own_rotation = getattr(function, "__globals__", {}).get(_ROTATE)
    if own_rotation is None or _ROTATE not in function.__code__.co_names or not _rotates_alike(own_rotation):
        return None

    # A copy of the forward for which the rotation's global name means `_rotate`. The Python module in which the forward
    # is defined does not change, as other models share it.
    names = function.__globals__ | {_ROTATE: partial(_rotate, own_rotation)}
    changed = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    changed.__kwdefaults__ = function.__kwdefaults__
    return MethodType(changed, module)


@cache
def _rotates_alike(own_rotation: Forward) -> bool:
    """Tell whether a model's own rotation computes what `_rotate` does."""
    if list(inspect.signature(own_rotation).parameters) != ["q", "k", "cos", "sin", "unsqueeze_dim"]:
        return False
    queries, keys = _random_inputs(2, 3, 4, 6), _random_inputs(2, 1, 4, 6)  # [B, heads, S, D], 3 heads and 1
    # cos and sin; the same shape gives the same random numbers, so 1 is added to make the two differ.
    angles = [_random_inputs(2, 4, 6), _random_inputs(2, 4, 6) + 1.0]
    try:
        return _agree(
            lambda q, k: own_rotation(q, k, *angles), lambda q, k: _rotate(own_rotation, q, k, *angles), [queries, keys]
        )
    except RuntimeError:  # the model's rotation takes angles of another shape
        return False


def _rotate(
    own_rotation: Forward, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by `Rotation`, or by the model's own function for other dtypes, sizes or options."""
    is_known = all(tensor.dtype == _WIDE and tensor.shape[-1] == cos.shape[-1] for tensor in (q, k, cos))
    if options or not is_known:
        return own_rotation(q, k, cos, sin, **options)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [B, S, D] -> [B, 1, S, D], for all heads
    return Rotation.apply(q, cos, sin), Rotation.apply(k, cos, sin)


def _random_inputs(*shape: int) -> Tensor:
    """Return random numbers [shape], every second row 1000 times smaller, so that a norm's epsilon matters there."""
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    inputs[::2] *= 1e-3
    return inputs


@torch.enable_grad()
def _agree(own_forward: Forward, fused: Forward, inputs: Sequence[Tensor], module: nn.Module | None = None) -> bool:
    """Tell whether two functions have the same outputs, and gradients of inputs and of a module's weights, up to
    `TOLERANCES`; the answer is True for weights on the meta device, which have no numbers."""
    weights = [weight for weight in module.parameters() if weight.requires_grad] if module else []
    if any(weight.is_meta for weight in weights):  # there are no numbers to compare
        return True

    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    results = []  # of each function: its outputs, and the gradients of inputs and weights for random output gradients

    with in_float32(module) if module else nullcontext():
        for run in (own_forward, fused):
            outputs = run(*leaves)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            # The gradients of the outputs: the same in both passes, as `_random_inputs` has a fixed seed.
            factors = [_random_inputs(*output.shape).to(output.dtype) for output in outputs]
            results.append([*outputs, *torch.autograd.grad(outputs, [*leaves, *weights], factors)])

    tolerance = TOLERANCES[inputs[0].dtype]
    return all(
        (expected.dtype, expected.shape) == (actual.dtype, actual.shape)
        and bool((expected - actual).detach().abs().max() <= tolerance * expected.detach().abs().max())
        for expected, actual in zip(*results, strict=True)
    )
