"""The pass behind `linear_head`: chunks of positions, logits formed again in backward. Layer 1: pure, torch only.

With p a head's own probabilities, the gradient of what training differentiates is, with respect to the logits,

    d log p(id) = onehot(id) - p                d entropy = -p (log p + entropy)

and for the rollout model, q, against the policy, p, which the divergences hold constant (SG)

    d forward KL = q - p                        d reverse KL = q (log q - log p - reverse KL)

From there it goes through temperature, soft cap, weight and hidden states. Shapes as in `linear_head`, and `C` the
positions of one chunk. Everything here trusts its caller to have checked the arguments.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

MAX_CHUNK_ELEMENTS = 2**26
"""A default chunk has at most this many logits, C * V: 256 MiB in float32, 441 positions at V = 151,936. About three
such buffers are alive for one head, six for two."""

MAX_CHUNK_POSITIONS = 1024
"""A default chunk has at most this many positions. Every chunk adds to the whole [V, H] gradient of the weight, so few
positions are slow where V is large; where it is small, more than these only outgrow the cache (measured on CPU)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """One model's last layer on N positions. Gradient flows into all three tensors. A bias of -inf bans a token,
    though not with a soft cap, which takes it to -soft_cap."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V]
    soft_cap: float | None = None  # logits = cap * tanh(logits / cap) before the temperature


def read_heads(
    heads: Sequence[Head],
    ids: Tensor,
    gather_ids: Tensor | None,
    temperature: float,
    lam: float | None,
    num_top: int,
    chunk_size: int | None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Of one head (`lam` None) or of the policy and the rollout model: what carries a gradient, and what carries none.

    With a gradient, [N]: log_probs and entropy of each head; then forward_kl and reverse_kl of two.
    Without: top_ids and top_log_probs [N, K] and gathered [N, G] of each; then exact_z [N] and fill_ins [N, K] of two.
    """
    vocabulary = heads[0].weight.shape[0]
    tensors = [tensor for head in heads for tensor in (head.hidden, head.weight, head.bias)]
    is_double = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    dtype = torch.float64 if is_double else torch.float32
    default_size = min(max(1, MAX_CHUNK_ELEMENTS // vocabulary), MAX_CHUNK_POSITIONS)
    plan = _Plan(
        temperature=temperature,
        lam=lam,
        num_top=min(num_top, vocabulary),
        chunk_size=default_size if chunk_size is None else chunk_size,
        soft_caps=tuple(head.soft_cap for head in heads),
        operand_dtypes=tuple(_operand_dtype(head, dtype) for head in heads),
        dtype=dtype,
    )
    if gather_ids is None:
        gather_ids = ids.new_empty((len(ids), 0))
    outputs = _ChunkedHeads.apply(plan, ids, gather_ids, *tensors)
    return outputs[: plan.num_values], outputs[plan.num_values :]


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


class _ChunkedHeads(torch.autograd.Function):
    """Reads each chunk's logits in forward, forms them again in backward; keeps the operands and [N] numbers."""

    @staticmethod
    def forward(ctx, plan: _Plan, ids: Tensor, gather_ids: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        sides = plan.sides(tensors)
        parts = [_read_chunk(plan, sides, rows, ids[rows], gather_ids[rows]) for rows in plan.chunks(len(ids))]
        outputs = tuple(torch.cat(part) for part in zip(*parts, strict=True))
        values, constants = outputs[: plan.num_values], outputs[plan.num_values :]
        ctx.mark_non_differentiable(*constants)
        ctx.set_materialize_grads(False)  # an output that nobody uses costs nothing in backward
        ctx.save_for_backward(ids, *values[1::2], *tensors)  # each entropy, and the reverse KL of two heads
        ctx.plan = plan
        return outputs

    @staticmethod
    def backward(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph=True through linear_head, which has no second derivative: leave it out")
        plan, (ids, *saved) = ctx.plan, ctx.saved_tensors
        centres, tensors = saved[: plan.num_values // 2], saved[plan.num_values // 2 :]
        upstream = grads[: plan.num_values]
        needed = ctx.needs_input_grad[3:]
        totals = _zero_totals(tensors[:3], needed[:3], upstream[:2], plan.dtype)
        totals += _zero_totals(tensors[3:], needed[3:], upstream[2:], plan.dtype)
        with torch.autocast(ids.device.type, enabled=False):  # forward chose the operands' dtype
            sides = plan.sides(tensors)
            for rows in plan.chunks(len(ids)):
                here = [None if grad is None else grad[rows] for grad in upstream]
                _differentiate_chunk(sides, rows, ids[rows], [centre[rows] for centre in centres], here, totals)
        cast = [None if total is None else total.to(of.dtype) for total, of in zip(totals, tensors, strict=True)]
        return None, None, None, *cast


def _zero_totals(
    tensors: Sequence[Tensor | None], needed: Sequence[bool], upstream: Sequence[Tensor | None], dtype: torch.dtype
) -> list[Tensor | None]:
    """Where one head's gradients add up: weight and bias in `dtype`. None where nobody asks or nothing flows back."""
    flows = _any(upstream)
    return [
        torch.zeros_like(tensor, dtype=dtype if field else tensor.dtype) if need and flows else None
        for field, (tensor, need) in enumerate(zip(tensors, needed, strict=True))
    ]


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


def _read_chunk(
    plan: _Plan, sides: Sequence[_Side], rows: slice, ids: Tensor, gather_ids: Tensor
) -> tuple[Tensor, ...]:
    """What `read_heads` returns, of one chunk. The only place that has a pair of distributions to compare."""
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
    centres: Sequence[Tensor],
    upstream: Sequence[Tensor | None],
    totals: Sequence[Tensor | None],
) -> None:
    """Adds one chunk's gradient to `totals`, three of each head.

    `centres` [C]: the entropy of each head, and the reverse KL of two. `upstream` [C]: as `read_heads` orders them.
    """
    trains_policy, trains_rollout_model = _any(totals[:3]), _any(totals[3:])
    policy = sides[0].chunk(rows) if trains_policy or _any(upstream[4:]) else None
    if trains_rollout_model:
        rollout_model = sides[1].chunk(rows)
        grad = _own_gradient(rollout_model, ids, *upstream[2:4], centres[1])
        if policy is not None:
            _add_divergences_(grad, policy, rollout_model, *upstream[4:], centres[2])
        sides[1].pull_back(rows, grad, rollout_model.slope, totals[3:])
    if trains_policy:
        grad = _own_gradient(policy, ids, *upstream[:2], centres[0])
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
