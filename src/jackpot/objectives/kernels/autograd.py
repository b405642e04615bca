"""The pass behind `linear_head`: tiles of positions by tokens, logits formed again in backward. Torch only.

Both directions go over the vocabulary in the outer loop and over blocks of positions in the inner one, so that a tile
of the weight is cast once and its gradient is written once. `head_forward` reads a tile, `head_backward` differentiates
it. What needs both normalisers, the exact Z, takes a second sweep over the vocabulary where that is more than one tile,
and is left out unless asked for.

Shapes as in `linear_head`, `C` the positions
and `T` the tokens of one tile. Everything here trusts its caller to have checked the arguments.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jackpot.objectives.kernels.backward import Slopes, differentiate
from jackpot.objectives.kernels.forward import Block
from jackpot.objectives.kernels.tiles import Head, Scratch, Side, Totals, operand_dtype
from jackpot.objectives.kernels.topk import BLOCK

MAX_TILE_LOGITS = 2**24
"""A default tile has at most this many logits, C * T: 64 MiB in float32. In forward two such tensors are alive for
one head and five for two; rounded operands and soft caps take more."""

MAX_TILE_POSITIONS = 4096
"""A default tile has at most this many positions where the vocabulary is cut: the more, the less often a tile of the
weight and of its gradient is read and written."""

MAX_ROW_POSITIONS = 1024
"""The same where a tile holds the whole vocabulary: more would only outgrow the cache (measured on CPU)."""


def default_tile(n: int, vocabulary: int) -> tuple[int, int]:
    """The most positions and tokens of a tile: rows of the whole vocabulary where they fit, else a part of it."""
    rows = max(1, min(n, MAX_ROW_POSITIONS))
    if rows * vocabulary <= MAX_TILE_LOGITS:
        return rows, vocabulary
    rows = max(1, min(n, MAX_TILE_POSITIONS))
    return rows, max(1, min(vocabulary, MAX_TILE_LOGITS // rows))


def cut(count: int, most: int, grain: int = 1) -> tuple[slice, ...]:
    """As few parts of at most `most` as there can be, about equal and, if that keeps to it, of a multiple of `grain`.

    Of 0 a single empty one.
    """
    size = math.ceil(count / max(1, math.ceil(count / most))) or 1
    size = min(most, math.ceil(size / grain) * grain)
    return tuple(slice(start, min(start + size, count)) for start in range(0, count or 1, size))


def read_heads(
    heads: Sequence[Head],
    ids: Tensor,
    gather_ids: Tensor | None,
    temperature: float,
    lam: float | None,
    num_top: int,
    tile: tuple[int, int] | None,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Of one head or of the policy and the rollout model: what carries a gradient, and what carries none.

    With a gradient, [N]: log_probs and entropy of each head; then forward_kl and reverse_kl of two.
    Without: top_ids and top_log_probs [N, K] and gathered [N, G] of each; then of two fill_ins [N, K] and, with `lam`,
    exact_z [N].
    """
    vocabulary = heads[0].weight.shape[0]
    tensors = [tensor for head in heads for tensor in (head.hidden, head.weight, head.bias)]
    is_double = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    dtype = torch.float64 if is_double else torch.float32
    positions, tokens = default_tile(len(ids), vocabulary) if tile is None else tile
    plan = _Plan(
        temperature=temperature,
        lam=lam,
        num_top=min(num_top, vocabulary),
        blocks=cut(len(ids), positions),
        tiles=cut(vocabulary, tokens, BLOCK),
        soft_caps=tuple(head.soft_cap for head in heads),
        operands=tuple(operand_dtype(head, dtype) for head in heads),
        dtype=dtype,
    )
    if gather_ids is None:
        gather_ids = ids.new_empty((len(ids), 0))
    outputs = _TiledHeads.apply(plan, ids, gather_ids, *tensors)
    return outputs[: plan.num_values], outputs[plan.num_values :]


class _Plan(NamedTuple):
    """What is the same for all tiles and is no tensor."""

    temperature: float
    lam: float | None  # None: no exact Z
    num_top: int
    blocks: tuple[slice, ...]  # of positions
    tiles: tuple[slice, ...]  # of tokens
    soft_caps: tuple[float | None, ...]  # of each head
    operands: tuple[torch.dtype, ...]  # dtypes of each head's products
    dtype: torch.dtype  # of the logits and all that follows

    @property
    def is_pair(self) -> bool:
        return len(self.soft_caps) == 2

    @property
    def num_values(self) -> int:
        """How many outputs carry a gradient: log-probs and entropy of each head, and two divergences of a pair."""
        return 6 if self.is_pair else 2

    def sides(self, tensors: Sequence[Tensor | None]) -> list[Side]:
        """From the hidden states, weight and bias of each head in turn; they share the memory for a tile."""
        scratch = Scratch(tensors[0].device)
        return [
            Side(str(i), of_head, soft_cap, self.temperature, operand, self.dtype, scratch)
            for i, (of_head, soft_cap, operand) in enumerate(
                zip(_triples(tensors), self.soft_caps, self.operands, strict=True)
            )
        ]

    def sweep(self, sides: Sequence[Side], blocks: Sequence[Block], visit: Callable[[Block, slice], None]) -> None:
        for columns in self.tiles:
            for side in sides:
                side.load(columns)
            for block in blocks:
                visit(block, columns)


class _TiledHeads(torch.autograd.Function):
    """Reads each tile's logits in forward, forms them again in backward; keeps the operands and [N] numbers."""

    @staticmethod
    def forward(ctx, plan: _Plan, ids: Tensor, gather_ids: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        wanted = torch.cat((ids[:, None], gather_ids), dim=1)
        with torch.autocast(ids.device.type, enabled=False):  # the plan has chosen the operands' dtype
            sides = plan.sides(tensors)
            banned = [side.banned() for side in sides] if plan.is_pair else []
            blocks = [Block(sides, banned, rows, wanted[rows], plan.num_top, plan.lam) for rows in plan.blocks]
            plan.sweep(sides, blocks, Block.read)
            if plan.lam is not None and len(plan.tiles) > 1:
                plan.sweep(sides, blocks, Block.read_kept)
        outputs = _joined(block.outputs() for block in blocks)
        normalisers = _joined([sums.log_normaliser for sums in block.sums] for block in blocks)
        values, constants = outputs[: plan.num_values], outputs[plan.num_values :]
        ctx.mark_non_differentiable(*constants)
        ctx.set_materialize_grads(False)  # an output that nobody uses costs nothing in backward
        ctx.save_for_backward(ids, *normalisers, *values[1::2], *tensors)  # each entropy, and the reverse KL of two
        ctx.plan = plan
        return outputs

    @staticmethod
    def backward(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph=True through linear_head, which has no second derivative: leave it out")
        plan, (ids, *saved) = ctx.plan, ctx.saved_tensors
        normalisers, saved = saved[: len(plan.soft_caps)], saved[len(plan.soft_caps) :]
        centres, tensors = saved[: plan.num_values // 2], saved[plan.num_values // 2 :]
        with torch.autocast(ids.device.type, enabled=False):
            to = [None if grad is None else grad / plan.temperature for grad in grads[: plan.num_values]]
            slopes = [Slopes.of_values(*to[:2], centres[0])]
            if plan.is_pair:
                slopes.append(Slopes.of_values(*to[2:4], centres[1], *to[4:], centres[2]))
            sides = plan.sides(tensors)
            totals = [
                Totals(side, tensors[3 * i : 3 * i + 3], [need and flows is not None for need in needed])
                for i, (side, flows, needed) in enumerate(
                    zip(sides, slopes, _triples(ctx.needs_input_grad[3:]), strict=True)
                )
            ]
            differentiate(plan.blocks, plan.tiles, ids, sides, normalisers, slopes, totals)
            return None, None, None, *(gradient for total in totals for gradient in total.gradients())


def _triples(of_heads: Sequence[Any]) -> list[Sequence[Any]]:
    """What belongs to hidden, weight and bias of each head in turn, head by head."""
    return [of_heads[start : start + 3] for start in range(0, len(of_heads), 3)]


def _joined(of_blocks: Iterable[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """Each output of all blocks in one tensor."""
    return tuple(torch.cat(parts) for parts in zip(*of_blocks, strict=True))
