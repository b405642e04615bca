"""A model's last layer and everything read from it, without the logits of all tokens. Layer 1: pure, torch only.

With W [V, H], b [V], a token's hidden state h [H], the temperature tau and the soft cap c (Gemma's; None: identity):

    raw = W h + b        logits = c tanh(raw / c) / tau        log p = log_softmax(logits)

The positions go through in chunks, so that of all [N, V] only [chunk, V] exists at a time, and backward forms a chunk's
logits again instead of keeping them. Both models' logits of a chunk are formed once, and everything is read from them.
What training differentiates has its gradient in closed form; with p the head's own probabilities

    d log p(id) = onehot(id) - p                d entropy = -p (log p + entropy)

and for the rollout model, q, against the policy, p, which the divergences hold constant (SG)

    d forward KL = q - p                        d reverse KL = q (log q - log p - reverse KL)

each with respect to logits, then through tau, c, W and h. A second derivative is refused by autograd.

Precision: logits, softmax, sums and the gradient's sum over chunks are float32, float64 if any operand is. The products
multiply what they are given: bfloat16 and float16 are upcast on a device without a product that takes them and returns
float32 (all but CUDA). Under autocast the operands are cast to its dtype, and on those devices the logits are rounded
to it. CUDA has not been run.

Shapes: `N` positions, `H` hidden size (each model its own), `V` vocabulary, `K` top-k, `G` ids to look up, `C`
positions of one chunk. Log-probabilities, entropies and divergences are in nats.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import register_dataclass

MAX_CHUNK_ELEMENTS = 2**26
"""The default chunk has at most this many logits, `C * V`: 256 MiB in float32, 441 positions at V = 151,936.

About three such buffers are alive for one head and six for two. Every chunk also adds to the whole [V, H] gradient of
the weight, so chunks of few tokens are slow where V is large."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """One model's last layer on N positions. Gradient flows into all three tensors. A bias of -inf bans a token,
    though not with a soft cap, which takes it to -soft_cap."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    soft_cap: float | None = None  # logits = cap * tanh(logits / cap) before the temperature


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """What one head says of N positions; float32, or float64 if any operand is."""

    log_probs: Tensor  # [N] of the given ids; differentiable
    entropy: Tensor  # [N] -sum_x p(x) log p(x); differentiable
    top_ids: Tensor  # [N, K] int64, most probable first; no gradient
    top_log_probs: Tensor  # [N, K]; no gradient
    gathered: Tensor  # [N, G] log-probs at gather_ids; no gradient


@dataclass(frozen=True, slots=True)
class JointOutput:
    """What two heads say of the same N positions, and of each other."""

    policy: HeadOutput
    rollout_model: HeadOutput
    forward_kl: Tensor  # [N] KL(SG(policy) || rollout_model); gradient into the rollout model only
    reverse_kl: Tensor  # [N] KL(rollout_model || SG(policy)); gradient into the rollout model only
    exact_z: Tensor  # [N] sum_x min(p_rollout_model(x), p_policy(x) / lam); no gradient
    fill_ins: Tensor  # [N, K] the rollout model's log-probs at policy.top_ids; no gradient


register_dataclass(HeadOutput)  # FSDP finds the tensors of a module's output as those of a pytree
register_dataclass(JointOutput)


def linear_head(
    head: Head,
    ids: Tensor,
    *,
    temperature: float,
    num_top: int = 0,
    gather_ids: Tensor | None = None,
    chunk_size: int | None = None,
) -> HeadOutput:
    """Log-probs of `ids`, entropy, top-k and log-probs of `gather_ids` under one head (equations: module docstring).

    Args:
        head: float tensors on one device.
        ids: [N] int64 in [0, V). Padding too: give it any id and mask what comes out.
        temperature: divides the logits, above 0.
        num_top: K; more than V gives V columns. Ties come in any order.
        gather_ids: [N, G] int64 in [0, V).
        chunk_size: the most positions that have logits at a time; None takes `MAX_CHUNK_ELEMENTS // V`.

    A probability that underflows to 0 counts as 0 in the entropy: 0 log 0 = 0. Checking the ids waits for the device.

    Raises:
        ValueError: shapes, dtypes, devices, ids or numbers other than these, or a weight that FSDP has sharded.
    """
    _check(("head", head), ids=ids, gather_ids=gather_ids, num_top=num_top, chunk_size=chunk_size)
    _check_positive("temperature", temperature)
    values, constants = _run([head], ids, gather_ids, temperature, None, num_top, chunk_size)
    return HeadOutput(*values, *constants)


def joint_linear_head(
    policy: Head,
    rollout_model: Head,
    ids: Tensor,
    *,
    temperature: float,
    lam: float,
    num_top: int = 0,
    gather_ids: Tensor | None = None,
    chunk_size: int | None = None,
) -> JointOutput:
    """`linear_head` of both models at the same ids, the two divergences, and Z of eq. 4 over the whole vocabulary.

    Arguments as in `linear_head`; `lam`, above 0, is that of OBRS. The models may differ in H, not in N or V.

    Both divergences and Z use p_policy as a constant: no gradient reaches the policy's hidden states, or its weight but
    for a weight that both heads share. forward_kl is inf where the policy has mass and the rollout model none, with the
    finite gradient q - p; reverse_kl is inf where the rollout model has mass and the policy none, with a gradient only
    where autograd sends one other than 0. Near 0 rounding may leave either slightly negative.

    Raises:
        ValueError: as `linear_head`; also `lam` not above 0, or heads of different N, V or device.
    """
    heads = (("policy", policy), ("rollout_model", rollout_model))
    _check(*heads, ids=ids, gather_ids=gather_ids, num_top=num_top, chunk_size=chunk_size)
    _check_positive("temperature", temperature)
    _check_positive("lam", lam)
    values, constants = _run([policy, rollout_model], ids, gather_ids, temperature, lam, num_top, chunk_size)
    outputs = [HeadOutput(*values[2 * i : 2 * i + 2], *constants[3 * i : 3 * i + 3]) for i in (0, 1)]
    return JointOutput(*outputs, *values[4:], *constants[6:])


class LinearHead(nn.Module):
    """The output layers of one or two models as one module, so that FSDP gathers both weights around one forward.

    The `nn.Linear`s are kept by reference: their parameters stay the models' own. Wrap this module with FSDP, not the
    two layers, whose own forward never runs here.
    """

    def __init__(
        self,
        policy: nn.Linear,
        rollout_model: nn.Linear | None = None,
        *,
        policy_soft_cap: float | None = None,
        rollout_model_soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        self.policy = policy
        self.rollout_model = rollout_model
        self.policy_soft_cap = policy_soft_cap
        self.rollout_model_soft_cap = rollout_model_soft_cap

    def forward(
        self,
        policy_hidden: Tensor,
        rollout_model_hidden: Tensor | None,
        ids: Tensor,
        *,
        temperature: float,
        lam: float | None = None,
        num_top: int = 0,
        gather_ids: Tensor | None = None,
        chunk_size: int | None = None,
    ) -> HeadOutput | JointOutput:
        """`joint_linear_head` of both models; `linear_head` of the policy where `rollout_model_hidden` is None.

        Raises:
            ValueError: as they do; `rollout_model_hidden` without a rollout model, or without `lam`.
        """
        options = dict(temperature=temperature, num_top=num_top, gather_ids=gather_ids, chunk_size=chunk_size)
        policy = _head_of(self.policy, policy_hidden, self.policy_soft_cap)
        if rollout_model_hidden is None:
            return linear_head(policy, ids, **options)
        if self.rollout_model is None:
            raise ValueError("rollout_model_hidden given to a LinearHead of the policy alone: give it None")
        if lam is None:
            raise ValueError("lam is None: with rollout_model_hidden give the lam of OBRS, a number above 0")
        rollout_model = _head_of(self.rollout_model, rollout_model_hidden, self.rollout_model_soft_cap)
        return joint_linear_head(policy, rollout_model, ids, lam=lam, **options)


def _head_of(layer: nn.Linear, hidden: Tensor, soft_cap: float | None) -> Head:
    return Head(hidden=hidden, weight=layer.weight, bias=layer.bias, soft_cap=soft_cap)


class _Plan(NamedTuple):
    """What is the same for all chunks and is no tensor."""

    temperature: float
    lam: float | None  # None for one head
    num_top: int
    chunk_size: int
    soft_caps: tuple[float | None, ...]  # of each head
    operand_dtypes: tuple[torch.dtype, ...]  # of each head's products
    dtype: torch.dtype  # of the logits and all that follows

    @property
    def num_values(self) -> int:
        """How many outputs carry a gradient: log-probs and entropy of each head, and two divergences of a pair."""
        return 2 if self.lam is None else 6

    def chunks(self, n: int) -> list[slice]:
        """As few chunks as the size allows, about equal; for n = 0 a single empty one."""
        size = math.ceil(n / max(1, math.ceil(n / self.chunk_size))) or 1
        return [slice(start, min(start + size, n)) for start in range(0, n or 1, size)]

    def sides(self, tensors: Sequence[Tensor | None]) -> list["_Side"]:
        """From the hidden states, weight and bias of each head in turn; cast once for all chunks."""
        triples = (tensors[start : start + 3] for start in range(0, len(tensors), 3))
        return [
            _Side(hidden.to(operand), weight.to(operand), bias, soft_cap, self.temperature, self.dtype)
            for (hidden, weight, bias), operand, soft_cap in zip(
                triples, self.operand_dtypes, self.soft_caps, strict=True
            )
        ]


def _run(
    heads: Sequence[Head],
    ids: Tensor,
    gather_ids: Tensor | None,
    temperature: float,
    lam: float | None,
    num_top: int,
    chunk_size: int | None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The outputs that carry a gradient and those that do not, in the order of `_read_chunk`."""
    vocabulary = heads[0].weight.shape[0]
    tensors = [tensor for head in heads for tensor in (head.hidden, head.weight, head.bias)]
    is_double = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    dtype = torch.float64 if is_double else torch.float32
    plan = _Plan(
        temperature=temperature,
        lam=lam,
        num_top=min(num_top, vocabulary),
        chunk_size=chunk_size or max(1, MAX_CHUNK_ELEMENTS // vocabulary),
        soft_caps=tuple(head.soft_cap for head in heads),
        operand_dtypes=tuple(_operand_dtype(head, dtype) for head in heads),
        dtype=dtype,
    )
    if gather_ids is None:
        gather_ids = ids.new_empty((len(ids), 0))
    outputs = _ChunkedHeads.apply(plan, ids, gather_ids, *tensors)
    return outputs[: plan.num_values], outputs[plan.num_values :]


class _ChunkedHeads(torch.autograd.Function):
    """Reads each chunk's logits in forward, forms them again in backward; keeps the operands and [N] numbers."""

    @staticmethod
    def forward(ctx, plan: _Plan, ids: Tensor, gather_ids: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        with torch.autocast(ids.device.type, enabled=False):
            sides = plan.sides(tensors)
            parts = [_read_chunk(plan, sides, rows, ids[rows], gather_ids[rows]) for rows in plan.chunks(len(ids))]
        outputs = tuple(torch.cat(part) for part in zip(*parts, strict=True))
        ctx.mark_non_differentiable(*outputs[plan.num_values :])
        ctx.set_materialize_grads(False)  # an output that nobody uses costs nothing in backward
        ctx.save_for_backward(ids, *outputs[: plan.num_values], *tensors)
        ctx.plan = plan
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        plan, (ids, *saved) = ctx.plan, ctx.saved_tensors
        values, tensors = saved[: plan.num_values], saved[plan.num_values :]
        reached = [_any(grads[:2])] * 3 + [_any(grads[2 : plan.num_values])] * 3
        totals = [
            torch.zeros_like(tensor, dtype=tensor.dtype if index % 3 == 0 else plan.dtype)
            if needed and reached[index]
            else None
            for index, (tensor, needed) in enumerate(zip(tensors, ctx.needs_input_grad[3:], strict=True))
        ]
        with torch.autocast(ids.device.type, enabled=False):
            sides = plan.sides(tensors)
            for rows in plan.chunks(len(ids)):
                upstream = [None if grad is None else grad[rows] for grad in grads[: plan.num_values]]
                _differentiate_chunk(sides, rows, ids[rows], [value[rows] for value in values], upstream, totals)
        return (
            None,
            None,
            None,
            *(None if total is None else total.to(tensor.dtype) for total, tensor in zip(totals, tensors, strict=True)),
        )


class _Chunk(NamedTuple):
    """A head's distributions at C positions."""

    log_probs: Tensor  # [C, V]
    probs: Tensor  # [C, V]
    slope: Tensor | None  # [C, V] d capped / d raw of the soft cap


class _Side(NamedTuple):
    """One head, ready to multiply."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H], of the same dtype
    bias: Tensor | None  # [V]
    soft_cap: float | None
    temperature: float
    dtype: torch.dtype  # of the logits

    def chunk(self, rows: slice) -> _Chunk:
        logits, slope = _product(self.hidden[rows], self.weight.t(), self.dtype), None
        if self.bias is not None:
            logits += self.bias
        if self.soft_cap is not None:
            logits.div_(self.soft_cap).tanh_()
            slope = 1.0 - logits.square()
            logits *= self.soft_cap
        if self.temperature != 1.0:
            logits /= self.temperature
        log_probs = torch.log_softmax(logits, dim=-1)
        return _Chunk(log_probs, torch.exp(log_probs, out=logits), slope)

    def pull_back(self, rows: slice, grad: Tensor, slope: Tensor | None, totals: Sequence[Tensor | None]) -> None:
        """Adds the chunk's share, given that of its logits [C, V] (overwritten), to hidden, weight and bias."""
        hidden_total, weight_total, bias_total = totals
        if self.temperature != 1.0:
            grad /= self.temperature
        if slope is not None:
            grad *= slope
        if bias_total is not None:
            bias_total += grad.sum(0)
        grad = grad.to(self.weight.dtype)
        if hidden_total is not None:
            hidden_total[rows] = _product(grad, self.weight, self.dtype)
        if weight_total is None:
            return
        if grad.dtype == weight_total.dtype:
            weight_total.addmm_(grad.t(), self.hidden[rows])
        else:
            weight_total += _product(grad.t(), self.hidden[rows], self.dtype)


def _read_chunk(plan: _Plan, sides: Sequence[_Side], rows: slice, ids: Tensor, gather_ids: Tensor) -> tuple:
    """With a gradient: log_probs, entropy of each head, then forward_kl, reverse_kl of two heads. Without one: top_ids,
    top_log_probs, gathered of each head, then exact_z, fill_ins of two heads. All [C] or [C, K or G]."""
    values, constants = [], []
    chunks = [side.chunk(rows) for side in sides]
    for log_probs, probs, _ in chunks:
        top_log_probs, top_ids = log_probs.topk(plan.num_top, dim=-1)
        values += [log_probs.gather(-1, ids[:, None]).squeeze(-1), -_expectation(probs, log_probs)]
        constants += [top_ids, top_log_probs, log_probs.gather(-1, gather_ids)]
    if plan.lam is not None:
        (log_p, p, _), (log_q, q, _) = chunks
        values += [_expectation(p, log_p - log_q), _expectation(q, log_q - log_p)]
        constants += [torch.minimum(q, p / plan.lam).sum(-1), log_q.gather(-1, constants[0])]
    return *values, *constants


def _differentiate_chunk(
    sides: Sequence[_Side],
    rows: slice,
    ids: Tensor,
    values: Sequence[Tensor],
    upstream: Sequence[Tensor | None],
    totals: Sequence[Tensor | None],
) -> None:
    """Adds one chunk's gradient to `totals`, three for each head; `values` and `upstream` are those of
    `_read_chunk`."""
    trains_policy, trains_rollout_model = _any(totals[:3]), _any(totals[3:])
    policy = sides[0].chunk(rows) if trains_policy or _any(upstream[4:]) else None
    if trains_rollout_model:
        rollout_model = sides[1].chunk(rows)
        grad = _own_gradient(rollout_model, ids, *upstream[2:4], values[3])
        if policy is not None:
            _add_divergences_(grad, policy, rollout_model, *upstream[4:], values[5])
        sides[1].pull_back(rows, grad, rollout_model.slope, totals[3:])
    if trains_policy:
        grad = _own_gradient(policy, ids, *upstream[:2], values[1])
        sides[0].pull_back(rows, grad, policy.slope, totals[:3])


def _own_gradient(
    chunk: _Chunk, ids: Tensor, to_log_probs: Tensor | None, to_entropy: Tensor | None, entropy: Tensor
) -> Tensor:
    """to_log_probs (onehot(ids) - p) - to_entropy p (log p + entropy): [C, V], from upstream gradients [C]."""
    log_probs, probs, _ = chunk
    if to_log_probs is None:
        grad = torch.zeros_like(probs)
    else:
        grad = probs * -to_log_probs[:, None]
        grad.scatter_add_(-1, ids[:, None], to_log_probs[:, None])
    if to_entropy is not None:
        grad -= _weigh_(log_probs + entropy[:, None], probs, to_entropy)
    return grad


def _add_divergences_(
    grad: Tensor,
    policy: _Chunk,
    rollout_model: _Chunk,
    to_forward: Tensor | None,
    to_reverse: Tensor | None,
    reverse_kl: Tensor,
) -> None:
    """grad += to_forward (q - p) + to_reverse q (log q - log p - reverse_kl), in place: [C, V]."""
    if to_forward is not None:
        grad.addcmul_(rollout_model.probs, to_forward[:, None])
        grad.addcmul_(policy.probs, to_forward[:, None], value=-1.0)
    if to_reverse is not None:
        gap = (rollout_model.log_probs - policy.log_probs).sub_(reverse_kl[:, None])
        grad += _weigh_(gap, rollout_model.probs, to_reverse)


def _weigh_(score: Tensor, probs: Tensor, upstream: Tensor) -> Tensor:
    """upstream p score [C, V] in the place of score; 0 where upstream or p is 0, even if the score is infinite."""
    is_zero = (probs == 0.0).logical_or_((upstream == 0.0)[:, None])
    return score.mul_(probs).mul_(upstream[:, None]).masked_fill_(is_zero, 0.0)


def _expectation(probs: Tensor, values: Tensor) -> Tensor:
    """sum_x p(x) v(x) [C], where p(x) = 0 contributes 0 even if v(x) is infinite. Overwrites nothing."""
    return (probs * values).masked_fill_(probs == 0.0, 0.0).sum(-1)


def _any(tensors: Sequence[Tensor | None]) -> bool:
    return any(tensor is not None for tensor in tensors)


def _has_mixed_product(device: torch.device) -> bool:
    """True where a product of half-precision matrices can be returned in float32. ROCm is not asked to."""
    return device.type == "cuda" and torch.version.cuda is not None


def _operand_dtype(head: Head, dtype: torch.dtype) -> torch.dtype:
    """What a head's hidden states and weight are cast to before they are multiplied (module docstring)."""
    device = head.hidden.device
    if dtype == torch.float64:
        return dtype
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return torch.promote_types(head.hidden.dtype, head.weight.dtype) if _has_mixed_product(device) else dtype


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right in `dtype`: rounded to the operands' dtype on the way only where the device leaves no choice."""
    if left.dtype != dtype and _has_mixed_product(left.device):
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)


def _check(
    *heads: tuple[str, Head], ids: Tensor, gather_ids: Tensor | None, num_top: int, chunk_size: int | None
) -> None:
    """Raises the ValueErrors that `linear_head` promises, and for two heads those of `joint_linear_head`."""
    for name, head in heads:
        _check_head(name, head)
    (name, head), (other_name, other) = heads[0], heads[-1]
    if head.weight.shape[0] != other.weight.shape[0]:
        sizes = f"{head.weight.shape[0]} and {other.weight.shape[0]} tokens"
        raise ValueError(f"{name} and {other_name} have vocabularies of {sizes}: both models must share one vocabulary")
    if len(head.hidden) != len(other.hidden):
        counts = f"{len(head.hidden)} and {len(other.hidden)} positions"
        raise ValueError(f"{name}.hidden and {other_name}.hidden have {counts}: both must be of the same tokens")
    if head.hidden.device != other.hidden.device:
        devices = f"{head.hidden.device} and {other.hidden.device}"
        raise ValueError(f"{name} and {other_name} are on {devices}: move both to one device")
    _check_ids("ids", ids, "[N]", 1, head)
    if gather_ids is not None:
        _check_ids("gather_ids", gather_ids, "[N, G]", 2, head)
    if num_top < 0:
        raise ValueError(f"num_top is {num_top}: 0 for no top-k, else how many tokens to return")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}: at least 1, or None for {MAX_CHUNK_ELEMENTS} logits at a time")


def _check_head(name: str, head: Head) -> None:
    hidden, weight, bias = head.hidden, head.weight, head.bias
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or not weight.shape[0]:
        shapes = f"{list(hidden.shape)} and {list(weight.shape)}"
        raise ValueError(f"{name}.hidden and {name}.weight are {shapes}: they must be [N, H] and [V, H] with V > 0")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{name}.bias is {list(bias.shape)}: it must be [V] = {list(weight.shape[:1])}")
    for field, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            allowed = "float64, float32, bfloat16 or float16"
            raise ValueError(f"{name}.{field} is {tensor.dtype}: it must be {allowed}")
        if tensor.device != hidden.device:
            raise ValueError(
                f"{name}.{field} is on {tensor.device}, {name}.hidden on {hidden.device}: move one of them"
            )
        if hasattr(tensor, "full_tensor"):
            raise ValueError(
                f"{name}.{field} is sharded: wrap LinearHead with fully_shard, which gathers it, and call that"
            )
    if head.soft_cap is not None:
        _check_positive(f"{name}.soft_cap", head.soft_cap)


def _check_ids(name: str, ids: Tensor, form: str, dim: int, head: Head) -> None:
    n, vocabulary = len(head.hidden), head.weight.shape[0]
    if ids.dim() != dim or len(ids) != n:
        raise ValueError(
            f"{name} is {list(ids.shape)}: it must be {form} with N = {n}, the positions of the hidden states"
        )
    if ids.dtype != torch.int64:
        raise ValueError(f"{name} is {ids.dtype}: it must be torch.int64 (`.long()`)")
    if ids.device != head.hidden.device:
        raise ValueError(f"{name} is on {ids.device}, the hidden states on {head.hidden.device}: move one of them")
    if not ids.numel():
        return
    low, high = (bound.item() for bound in torch.aminmax(ids))
    if low < 0 or high >= vocabulary:
        advice = f"all must be in [0, {vocabulary}); give padding any such id and mask the result"
        raise ValueError(f"{name} holds ids from {low} to {high}: {advice}")


def _check_positive(name: str, value: float) -> None:
    if not 0.0 < value < math.inf:
        raise ValueError(f"{name} is {value}: it must be a finite number above 0")
