"""The backward pass of one or two heads, tile by tile: each tile's logits are formed again. Pure, torch only.

With p a head's own probabilities, the gradients of its outputs with respect to its logits are

    d log p(id) = onehot(id) - p                d entropy = -p (log p + entropy)

and for the rollout model, q, against the policy, p, which both divergences hold constant (SG),

    d forward KL = q - p                        d reverse KL = q (log q - log p - reverse KL)

As in FlashAttention, forward saves the logsumexp of each position, so that backward recomputes a tile's probabilities
without a running maximum. All gradients are linear in those of the outputs, so a few numbers for each position
(`GradCoefficients`) hold them, and a tile costs a few elementwise products more than its logits and exponentials. Where
p is 0 the gradient of its own terms is 0, even if log p is -inf.

Shapes: `N` positions in all, `C` of a block, `T` tokens of a tile.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from jackpot.objectives.kernels.tiles import LOWEST, HeadGrads, HeadOperands


class GradCoefficients(NamedTuple):
    """Holds the coefficients of the gradient of one head's logits; [N] each, None for 0:

        on_id onehot(id) + p (constant + on_log log p - on_other_log log o) - on_other o

    with p its own probabilities and o those of the other head.
    """

    on_id: Tensor | None
    constant: Tensor
    on_log: Tensor | None
    on_other_log: Tensor | None
    on_other: Tensor | None

    @staticmethod
    def from_output_grads(
        to_log_probs: Tensor | None,
        to_entropy: Tensor | None,
        entropy: Tensor,
        to_forward: Tensor | None = None,
        to_reverse: Tensor | None = None,
        reverse_kl: Tensor | None = None,
    ) -> "GradCoefficients | None":
        """Combine the gradients of the outputs; None where no output has one.

        Args:
            to_log_probs, to_entropy, to_forward, to_reverse: [N] d loss / d output over the temperature; None for 0.
            entropy, reverse_kl: [N] the outputs themselves, which their gradients contain.
        """
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
        return GradCoefficients(to_log_probs, constant, on_log, to_reverse, to_forward)

    def at(self, rows: slice) -> "GradCoefficients":
        """Select the coefficients of some positions, as columns [C, 1]."""
        return GradCoefficients(*(None if tensor is None else tensor[rows, None] for tensor in self))


class TileDistribution(NamedTuple):
    """Holds one head's distribution over a tile's tokens; [C, T] each."""

    log_probs: Tensor
    probs: Tensor
    softcap_derivative: Tensor | None  # d capped / d raw; None without a soft cap

    @staticmethod
    def of(head: HeadOperands, rows: slice, columns: slice, logsumexp: Tensor) -> "TileDistribution":
        """Form a tile's logits again and normalize them by the saved `logsumexp` [N]."""
        logits = head.logits(rows, columns)
        softcap_derivative = head.softcap_derivative(logits)
        log_probs = logits.sub_(logsumexp[rows, None])
        probs = torch.exp(log_probs, out=head.buffer("probs", tuple(logits.shape)))
        if head.may_mask:
            log_probs.clamp_(min=LOWEST)
        return TileDistribution(log_probs, probs, softcap_derivative)


def backward_tiles(
    blocks: Sequence[slice],
    tiles: Sequence[slice],
    ids: Tensor,
    heads: Sequence[HeadOperands],
    logsumexps: Sequence[Tensor],
    coefficients: Sequence[GradCoefficients | None],
    grads: Sequence[HeadGrads],
) -> None:
    """Add the gradients of one or two heads over all tiles to `grads`; a head that no gradient needs is not multiplied.

    Args:
        blocks: of positions.
        tiles: of tokens.
        ids: [N].
        heads, logsumexps, coefficients, grads: of each head; `logsumexps` [N].
    """
    trained = [i for i, (own, sums) in enumerate(zip(coefficients, grads, strict=True)) if own and sums.is_needed]
    other = coefficients[-1] if trained[-1:] == [1] else None
    reads_policy = other is not None and not (other.on_other_log is None and other.on_other is None)
    needed = sorted({*trained, *([0] if reads_policy else [])})
    for columns in tiles:
        for i in needed:
            heads[i].load_weight(columns)
        for i in trained:
            grads[i].begin_tile(columns)
        for rows in blocks:
            tile = {i: TileDistribution.of(heads[i], rows, columns, logsumexps[i]) for i in needed}
            for i in reversed(trained):  # the policy's last: its gradient overwrites what the other's reads
                grad = _logits_grad(coefficients[i].at(rows), ids[rows, None] - columns.start, tile[i], tile.get(0))
                if tile[i].softcap_derivative is not None:
                    grad.mul_(tile[i].softcap_derivative)
                heads[i].accumulate_grad(rows, columns, grad, grads[i])
        for i in trained:
            grads[i].end_tile(columns)


def _logits_grad(
    coefficients: GradCoefficients, places: Tensor, own: TileDistribution, other: TileDistribution | None
) -> Tensor:
    """Evaluate the formula of `GradCoefficients` on a tile: [C, T], overwriting `own`. `places` [C, 1] are the ids,
    counted from the tile's first token."""
    if coefficients.on_log is None:
        grad = own.probs.mul_(coefficients.constant)
    else:
        grad = own.log_probs.mul_(coefficients.on_log).add_(coefficients.constant)
        if coefficients.on_other_log is not None:
            grad.addcmul_(other.log_probs, coefficients.on_other_log, value=-1.0)
        grad.mul_(own.probs)
    if coefficients.on_other is not None:
        grad.addcmul_(other.probs, coefficients.on_other, value=-1.0)
    if coefficients.on_id is not None:
        width = grad.shape[1]
        here = torch.where((places >= 0) & (places < width), coefficients.on_id, 0.0)
        grad.scatter_add_(1, places.clamp(0, width - 1), here)
    return grad
