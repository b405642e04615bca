"""The gradient of what `head_forward` reads, tile by tile. Pure, torch only.

With p a head's own probabilities, the gradient of what training differentiates is, with respect to the logits,

    d log p(id) = onehot(id) - p                d entropy = -p (log p + entropy)

and for the rollout model, q, against the policy, p, which the divergences hold constant (SG)

    d forward KL = q - p                        d reverse KL = q (log q - log p - reverse KL)

All are linear in the gradients of the outputs, so that those of a position are gathered in a few numbers (`Slopes`),
and a tile costs a few products on top of its logits and their exponentials. Where p is 0 the gradient of its own terms
is 0, even if log p is -inf.

Shapes: `N` positions in all, `C` of a block, `T` tokens of a tile.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from jackpot.objectives.kernels.tiles import LOWEST, Side, Totals


class Slopes(NamedTuple):
    """The gradient of one head's logits, p its own probabilities and o the other head's; [N] each, None for 0:

    on_id onehot(id) + p (constant + on_log log p - on_other_log log o) - on_other o
    """

    on_id: Tensor | None
    constant: Tensor
    on_log: Tensor | None
    on_other_log: Tensor | None
    on_other: Tensor | None

    @staticmethod
    def of_values(
        to_log_probs: Tensor | None,
        to_entropy: Tensor | None,
        entropy: Tensor,
        to_forward: Tensor | None = None,
        to_reverse: Tensor | None = None,
        reverse_kl: Tensor | None = None,
    ) -> "Slopes | None":
        """From the gradients of the outputs, and what they subtract; None where no output has one."""
        constant, on_log = torch.zeros_like(entropy), None
        if to_log_probs is not None:
            constant -= to_log_probs
        if to_entropy is not None:
            constant -= to_entropy * entropy
            on_log = -to_entropy
        if to_forward is not None:
            constant += to_forward
        if to_reverse is not None:
            constant -= (to_reverse * reverse_kl).masked_fill_(to_reverse == 0.0, 0.0)  # 0 even if the KL is infinite
            on_log = to_reverse if on_log is None else on_log + to_reverse
        if to_log_probs is to_entropy is to_forward is to_reverse is None:
            return None
        return Slopes(to_log_probs, constant, on_log, to_reverse, to_forward)

    def at(self, rows: slice) -> "Slopes":
        """Those of some positions, as columns [C, 1]."""
        return Slopes(*(None if tensor is None else tensor[rows, None] for tensor in self))


class Distribution(NamedTuple):
    """What one head gives a tile's tokens; [C, T] each."""

    log_probs: Tensor
    probs: Tensor
    bend: Tensor | None  # d capped / d raw of the soft cap

    @staticmethod
    def of(side: Side, rows: slice, columns: slice, log_normaliser: Tensor) -> "Distribution":
        """log_normaliser: [N]."""
        logits = side.logits(rows, columns)
        bend = side.bend(logits)
        log_probs = logits.sub_(log_normaliser[rows, None])
        probs = torch.exp(log_probs, out=side.buffer("probs", tuple(logits.shape)))
        if side.has_bans:
            log_probs.clamp_(min=LOWEST)
        return Distribution(log_probs, probs, bend)


def differentiate(
    blocks: Sequence[slice],
    tiles: Sequence[slice],
    ids: Tensor,
    sides: Sequence[Side],
    log_normalisers: Sequence[Tensor],
    slopes: Sequence[Slopes | None],
    totals: Sequence[Totals],
) -> None:
    """Adds everything that flows back into one or two heads to their totals.

    Only the heads that the gradient needs are multiplied.
    """
    trained = [i for i, (slope, total) in enumerate(zip(slopes, totals, strict=True)) if slope and total.is_wanted]
    other = slopes[-1] if trained[-1:] == [1] else None
    reads_policy = other is not None and not (other.on_other_log is None and other.on_other is None)
    needed = sorted({*trained, *([0] if reads_policy else [])})
    for columns in tiles:
        for i in needed:
            sides[i].load(columns)
        for i in trained:
            totals[i].open(columns)
        for rows in blocks:
            seen = {i: Distribution.of(sides[i], rows, columns, log_normalisers[i]) for i in needed}
            for i in reversed(trained):  # the policy's last: its gradient overwrites what the other's reads
                grad = _gradient(slopes[i].at(rows), ids[rows, None] - columns.start, seen[i], seen.get(0))
                if seen[i].bend is not None:
                    grad.mul_(seen[i].bend)
                sides[i].pull_back(rows, columns, grad, totals[i])
        for i in trained:
            totals[i].close(columns)


def _gradient(slopes: Slopes, places: Tensor, own: Distribution, other: Distribution | None) -> Tensor:
    """The formula of `Slopes` [C, T], in the place of `own`. `places` [C, 1]: ids, counted from the tile's first."""
    if slopes.on_log is None:
        grad = own.probs.mul_(slopes.constant)
    else:
        grad = own.log_probs.mul_(slopes.on_log).add_(slopes.constant)
        if slopes.on_other_log is not None:
            grad.addcmul_(other.log_probs, slopes.on_other_log, value=-1.0)
        grad.mul_(own.probs)
    if slopes.on_other is not None:
        grad.addcmul_(other.probs, slopes.on_other, value=-1.0)
    if slopes.on_id is not None:
        width = grad.shape[1]
        here = torch.where((places >= 0) & (places < width), slopes.on_id, 0.0)
        grad.scatter_add_(1, places.clamp(0, width - 1), here)
    return grad
