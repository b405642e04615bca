"""The autograd function behind `linear_head`: forward and backward over tiles of logits. Torch only.

As in FlashAttention, the matrix [N, V] need not exist. Forward keeps running sums over its tiles and saves the
logsumexp of each position; backward forms each tile of logits again and differentiates it in closed form:

    for tile of T tokens in the vocabulary:          cast the tile of the weight once
        for block of C positions:
            forward    logits [C, T] -> merge m, s, entropy, KL, top K, wanted ids       (forward.py)
            backward   logits [C, T] -> d logits -> d hidden, d weight, d bias           (backward.py)

Where the logits of all positions fit into `HeadOptions.logits_memory`, forward keeps them, and backward reads them
instead of computing them again. `reader.py` has the formulas of a tile.

The vocabulary is the outer loop, so that a tile of the weight is cast once and its gradient is written once. The exact
Z needs the logsumexp of both heads: where the vocabulary is more than one tile it takes a second sweep, and is left out
unless `lam` is given.

Shapes as in `linear_head`, with `C` the positions and `T` the tokens of one tile. `linear_head` has checked the
arguments; nothing here checks them again.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jackpot.objectives.constants import HEAD_LOGITS_MEMORY
from jackpot.objectives.kernels.backward import OutputGradient, backward_tiles, coefficients_of
from jackpot.objectives.kernels.forward import PositionBlock
from jackpot.objectives.kernels.reader import EAGER, GradCoefficients, TileReader
from jackpot.objectives.kernels.tiles import (
    Head,
    HeadGrads,
    HeadOperands,
    HeadTensors,
    KeptTiles,
    Workspace,
    operand_dtype,
    sum_dtype,
)
from jackpot.objectives.kernels.topk import BLOCK


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """Options of how a head's outputs are computed; they change the outputs by rounding only."""

    reader: TileReader = EAGER
    logits_memory: int = HEAD_LOGITS_MEMORY * 2**20
    """Most bytes of logits that forward keeps for backward, of one head or both together; 0: backward forms all logits
    again."""


DEFAULT_OPTIONS = HeadOptions()

MAX_TILE_LOGITS = {"cpu": 2**24, "cuda": 2**26}
"""Most logits C * T of a default tile: 64 MiB in float32, and 256 MiB on a GPU, where each tile launches many kernels
(90 on an H200). A tensor of this size is alive for each head; operands and gradients that are rounded, or logits that
are kept, take one more each."""

MAX_TILE_POSITIONS = 4096
"""Most positions C of a default tile where the vocabulary is split: the more, the less often a tile of the weight and
of its gradient is read and written."""

MAX_ROW_POSITIONS = 1024
"""Most positions C of a default tile that has the whole vocabulary: more outgrow the cache (measured on CPU)."""


def default_tile(n: int, vocabulary: int, device_type: str) -> tuple[int, int]:
    """Choose how many positions and how many tokens of the vocabulary a tile has at most.

    A tile has the whole vocabulary where its logits are then at most MAX_TILE_LOGITS, else a part of the vocabulary.

    Args:
        n: positions in all.
        vocabulary: tokens in all.
    """
    max_logits = MAX_TILE_LOGITS["cuda" if device_type == "cuda" else "cpu"]
    positions = max(1, min(n, MAX_ROW_POSITIONS))  # positions of a tile of the whole vocabulary
    if positions * vocabulary <= max_logits:
        return positions, vocabulary

    # A tile with a part of the vocabulary may have more positions, so that the weight is read less often.
    positions = max(1, min(n, MAX_TILE_POSITIONS))
    return positions, max(1, min(vocabulary, max_logits // positions))


def split_range(count: int, most: int, grain: int = 1) -> tuple[slice, ...]:
    """Split range(count) into the fewest near-equal slices of at most `most` items; a count of 0 gives one empty slice.

    The length of all slices but the last is a multiple of `grain`, or `most` where the multiple would be larger.
    """
    size = math.ceil(count / max(1, math.ceil(count / most))) or 1
    size = min(most, math.ceil(size / grain) * grain)
    return tuple(slice(start, min(start + size, count)) for start in range(0, count or 1, size))


def tiled_heads(
    heads: Sequence[Head],
    ids: Tensor,
    gather_ids: Tensor | None,
    temperature: float,
    lam: float | None,
    num_top: int,
    tile: tuple[int, int] | None,
    moments: bool,
    options: HeadOptions,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Compute the outputs of one head, or of the policy's and the rollout model's head.

    Arguments are those of `linear_head`; `moments` (not `only_log_probs`) asks for entropy and KLs too.

    Returns:
        The outputs with a gradient, [N] each: log_probs and entropy of each head; for two heads also forward_kl and
        reverse_kl. If `moments` is False, log_probs only.
        The outputs without a gradient: top_ids and top_log_probs [N, K] and gathered [N, G], the log-probs at
        `gather_ids`, of each head; for two heads also fill_ins [N, K], the rollout model's log-probs at the policy's
        top_ids, and, with `lam`, exact_z [N].
    """
    vocabulary = heads[0].weight.shape[0]
    dtype = sum_dtype(heads)
    positions, tokens = default_tile(len(ids), vocabulary, ids.device.type) if tile is None else tile
    plan = _TilePlan(
        reader=options.reader,
        moments=moments,
        keeps=keeps_logits(heads, options),
        temperature=temperature,
        lam=lam,
        num_top=min(num_top, vocabulary),
        blocks=split_range(len(ids), positions),
        tiles=split_range(vocabulary, tokens, BLOCK),
        soft_caps=tuple(head.soft_cap for head in heads),
        operand_dtypes=tuple(operand_dtype(head, dtype) for head in heads),
        dtype=dtype,
    )

    if gather_ids is None:
        gather_ids = ids.new_empty((len(ids), 0))
    tensors = (tensor for head in heads for tensor in head.tensors)
    outputs: tuple[Tensor, ...] = _TiledHeads.apply(plan, ids, gather_ids, *tensors)
    return outputs[: plan.num_values], outputs[plan.num_values :]  # those with a gradient, those without


def keeps_logits(heads: Sequence[Head], options: HeadOptions) -> tuple[bool, ...]:
    """Return for each head whether forward keeps the head's logits for backward.

    Kept are all logits that backward may read, or none if together they exceed `logits_memory` bytes.
    """
    trains = [
        torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in head.tensors)
        for head in heads
    ]
    are_read = (any(trains), *trains[1:])  # the second head's gradient reads the first head too
    # Bytes of the logits, a number for each position and token, of the heads that backward reads.
    memory = sum(len(head.hidden) * len(head.weight) * sum_dtype(heads).itemsize for head in compress(heads, are_read))
    return tuple(is_read and memory <= options.logits_memory for is_read in are_read)


class _TilePlan(NamedTuple):
    """The arguments of a pass that are the same for all tiles and are no tensors."""

    reader: TileReader
    moments: bool  # whether entropy and divergences are computed
    keeps: tuple[bool, ...]  # for each head, whether forward keeps its logits
    temperature: float
    lam: float | None  # OBRS's lam, for the exact Z; None: no Z
    num_top: int  # K of the top K
    blocks: tuple[slice, ...]  # slices of the N positions
    tiles: tuple[slice, ...]  # slices of the V tokens of the vocabulary
    soft_caps: tuple[float | None, ...]  # one entry for each head: its soft cap, or None for no cap
    operand_dtypes: tuple[torch.dtype, ...]  # dtype to which hidden states and weight of each head are cast
    dtype: torch.dtype  # dtype of the logits and of all sums

    @property
    def is_pair(self) -> bool:
        """Tell whether there are two heads."""
        return len(self.soft_caps) == 2

    @property
    def num_values(self) -> int:
        """Count the outputs with a gradient: log-probs and entropy of each head, and the two divergences of a pair."""
        if not self.moments:
            return len(self.soft_caps)  # log-probs alone
        return 6 if self.is_pair else 2

    def heads(self, tensors: Sequence[HeadTensors], kept_tiles: Sequence[KeptTiles | None]) -> list[HeadOperands]:
        """Build the `HeadOperands` of each head from the head's tensors; all heads share one workspace."""
        workspace = Workspace(tensors[0].hidden.device)
        arguments = zip(tensors, self.soft_caps, self.operand_dtypes, kept_tiles, strict=True)
        return [
            HeadOperands(
                name=str(i),  # keeps the head's memory in the workspace apart from the other head's
                tensors=head_tensors,
                soft_cap=soft_cap,
                temperature=self.temperature,
                operand_dtype=operand_dtype,
                dtype=self.dtype,
                workspace=workspace,
                kept_tiles=head_tiles,
            )
            for i, (head_tensors, soft_cap, operand_dtype, head_tiles) in enumerate(arguments)
        ]

    def kept_tiles(self, tiles: Iterator[Tensor]) -> list[KeptTiles | None]:
        """Return the tiles of logits that forward kept, of each head; None for a head that keeps none.

        `tiles` are those of the first head, then of the second, in the order in which forward formed them.
        """
        keys = [(rows.start, columns.start) for columns in self.tiles for rows in self.blocks]
        # Each zip ends with `keys`, which it asks first, so it takes no tile of the next head.
        return [dict(zip(keys, tiles, strict=False)) if keeps else None for keeps in self.keeps]

    def coefficients(
        self, grads: Sequence[Tensor | None], saved_values: Sequence[Tensor]
    ) -> list[GradCoefficients | None]:
        """Return the coefficients of the gradient of each head's logits; None for a head without gradient.

        Args:
            grads: gradients of the outputs in the order of `tiled_heads`: log-probs and entropy of each head, forward
                and reverse KL; None for 0.
            saved_values: the values of the entropies and the reverse KL, which their gradients contain.
        """
        # The logits were divided by the temperature, so gradients of the undivided logits contain 1 / temperature.
        gradients = [None if grad is None else grad / self.temperature for grad in grads]
        if not self.moments:  # the only outputs are log-probs, one tensor for each head
            return [coefficients_of(to_log_probs=gradient) for gradient in gradients]

        # Every second output, with its value: the entropy of each head, and the reverse KL of a pair.
        with_values = [
            None if gradient is None else OutputGradient(gradient, value)
            for gradient, value in zip(gradients[1::2], saved_values, strict=True)
        ]
        if not self.is_pair:
            return [coefficients_of(to_log_probs=gradients[0], entropy=with_values[0])]

        # The other outputs: the log-probs of each head, and the forward KL.
        to_policy, to_rollout_model, to_forward = gradients[::2]
        policy_entropy, rollout_entropy, reverse_kl = with_values
        return [
            coefficients_of(to_log_probs=to_policy, entropy=policy_entropy),
            coefficients_of(
                to_log_probs=to_rollout_model, entropy=rollout_entropy, to_forward=to_forward, reverse_kl=reverse_kl
            ),
        ]

    def sweep(
        self,
        heads: Sequence[HeadOperands],
        blocks: Sequence[PositionBlock],
        visit: Callable[[PositionBlock, slice], None],
    ) -> None:
        """Set the heads to each tile of the vocabulary in turn, and then call `visit(block, tile)` for every block.

        A tile is a slice of tokens, a block some of the N positions: `visit` reads from the heads the logits of both.
        """
        for tile in self.tiles:
            for head in heads:
                head.select(tile)  # `head.tile(rows)` now returns logits of these tokens
            for block in blocks:
                visit(block, tile)


class _TiledHeads(torch.autograd.Function):
    """The autograd function of `tiled_heads`; it saves the heads' tensors, logsumexps, entropies and kept logits."""

    @staticmethod
    def forward(
        ctx: Any, plan: _TilePlan, ids: Tensor, gather_ids: Tensor, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Compute the outputs of `tiled_heads`, those with a gradient first.

        Args:
            tensors: hidden, weight and bias of each head in turn; None for no bias.
        """
        wanted = torch.cat((ids[:, None], gather_ids), dim=1)  # [N, 1 + G], the ids whose log-probs are returned
        with torch.autocast(ids.device.type, enabled=False):  # the plan has chosen the operands' dtype
            # The first sweep forms all logits, and adds those of a head that keeps logits to the head's `kept_tiles`.
            kept_tiles: list[KeptTiles | None] = [{} if keeps else None for keeps in plan.keeps]
            heads = plan.heads(_by_head(tensors), kept_tiles)
            blocks = [
                PositionBlock(
                    heads=heads,
                    reader=plan.reader,
                    rows=rows,
                    wanted=wanted[rows],
                    num_top=plan.num_top,
                    lam=plan.lam,
                    moments=plan.moments,
                )
                for rows in plan.blocks
            ]
            plan.sweep(heads, blocks, PositionBlock.update)

            # With several tiles, the exact Z takes a second sweep, as it needs the final logsumexps.
            lam = plan.lam
            if lam is not None and len(plan.tiles) > 1:
                plan.sweep(heads, blocks, lambda block, columns: block.add_z(lam))

        # The outputs of each block: those with a gradient (values), and those without (constants).
        outputs = [block.outputs() for block in blocks]
        values = _joined([block_values for block_values, _ in outputs])
        constants = _joined([block_constants for _, block_constants in outputs])
        logsumexps = _joined([block.logsumexps for block in blocks])
        ctx.mark_non_differentiable(*constants)
        ctx.set_materialize_grads(False)  # an output that the loss does not use costs nothing in backward

        saved_values = values[1::2] if plan.moments else ()  # each entropy, and the reverse KL of a pair
        tiles = [tile for head_tiles in kept_tiles for tile in (head_tiles or {}).values()]
        ctx.save_for_backward(ids, *logsumexps, *saved_values, *tensors, *tiles)
        ctx.plan = plan
        return *values, *constants

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute the gradients of hidden, weight and bias of each head; `grads` are those of forward's outputs."""
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph=True through linear_head, which has no second derivative: leave it out")

        plan: _TilePlan = ctx.plan
        num_heads = len(plan.soft_caps)
        # Each line takes the next of the saved tensors, in the order of `save_for_backward`; last come the kept tiles.
        saved: Iterator[Tensor] = iter(ctx.saved_tensors)
        ids = next(saved)
        logsumexps = list(islice(saved, num_heads))
        # Every second output with a gradient was saved: each entropy, and the reverse KL of a pair.
        saved_values = list(islice(saved, plan.num_values // 2 if plan.moments else 0))
        tensors = _by_head(list(islice(saved, 3 * num_heads)))  # hidden, weight and bias of each head

        with torch.autocast(ids.device.type, enabled=False):
            coefficients = plan.coefficients(grads[: plan.num_values], saved_values)
            heads = plan.heads(tensors, plan.kept_tiles(saved))
            # Forward's arguments 0 to 2 are plan, ids and gather_ids; then come hidden, weight and bias of each head.
            needs = [ctx.needs_input_grad[start : start + 3] for start in range(3, 3 + 3 * num_heads, 3)]
            # A head whose outputs have no gradient has no coefficients: none of its three tensors needs a gradient.
            head_grads = [
                HeadGrads(head, head_tensors, (False,) * 3 if head_coefficients is None else head_needs)
                for head, head_tensors, head_coefficients, head_needs in zip(
                    heads, tensors, coefficients, needs, strict=True
                )
            ]
            backward_tiles(plan.blocks, plan.tiles, ids, plan.reader, heads, logsumexps, coefficients, head_grads)
            # None for plan, ids and gather_ids.
            return None, None, None, *(gradient for head in head_grads for gradient in head.gradients())


def _by_head(tensors: Sequence[Tensor | None]) -> list[HeadTensors]:
    """Group a flat list of tensors, hidden, weight and bias of each head in turn, by heads."""
    return [HeadTensors(*tensors[start : start + 3]) for start in range(0, len(tensors), 3)]  # pyright: ignore[reportArgumentType]  # only a bias may be None


def _joined(block_outputs: Sequence[Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """Concatenate each output over all blocks of C positions: [C] or [C, K] of each block -> [N] or [N, K]."""
    return tuple(torch.cat(pieces) for pieces in zip(*block_outputs, strict=True))
