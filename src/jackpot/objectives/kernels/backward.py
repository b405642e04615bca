"""The backward pass of one or two heads, tile by tile. Pure, torch only.

With p a head's own probabilities, the gradients of its outputs with respect to its logits are

    d log p(id) = onehot(id) - p                d entropy = -p (log p + entropy)

and for the rollout model, q, against the policy, p, which both divergences hold constant (SG),

    d forward KL = q - p                        d reverse KL = q (log q - log p - reverse KL)

As in FlashAttention, forward saves the logsumexp of each position, so that backward computes a tile's probabilities
without a running maximum. All gradients are linear in those of the outputs, so a few numbers for each position
(`GradCoefficients`) hold them, and a tile costs a few elementwise products more than its logits and exponentials. Where
p is 0 the gradient of its own terms is 0, even if log p is -inf.

Shapes: `N` positions in all, `C` of a block, `T` tokens of a tile.
"""

from collections.abc import Sequence

from torch import Tensor

from jackpot.objectives.kernels.reader import GradCoefficients, TileReader
from jackpot.objectives.kernels.tiles import HeadGrads, HeadOperands


def coefficients_of(
    to_log_probs: Tensor | None,
    to_entropy: Tensor | None = None,
    entropy: Tensor | None = None,
    to_forward: Tensor | None = None,
    to_reverse: Tensor | None = None,
    reverse_kl: Tensor | None = None,
) -> GradCoefficients | None:
    """Combine the gradients of one head's outputs; None where no output has one.

    Args:
        to_log_probs, to_entropy, to_forward, to_reverse: [N] d loss / d output over the temperature; None for 0.
        entropy, reverse_kl: [N] the outputs themselves, which their gradients contain.
    """
    if to_log_probs is to_entropy is to_forward is to_reverse is None:
        return None
    parts, on_log = [], None
    if to_log_probs is not None:
        parts.append(-to_log_probs)
    if to_entropy is not None:
        parts.append(-to_entropy * entropy)
        on_log = -to_entropy
    if to_forward is not None:
        parts.append(to_forward)
    if to_reverse is not None:
        parts.append(-(to_reverse * reverse_kl).masked_fill_(to_reverse == 0.0, 0.0))  # 0 even if the KL is infinite
        on_log = to_reverse if on_log is None else on_log + to_reverse
    return GradCoefficients(to_log_probs, sum(parts[1:], parts[0]), on_log, to_reverse, to_forward)


def backward_tiles(
    blocks: Sequence[slice],
    tiles: Sequence[slice],
    ids: Tensor,
    reader: TileReader,
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
        reader: differentiates the tiles.
        heads, logsumexps, coefficients, grads: of each head; `logsumexps` [N].
    """
    own = [of_head if grad.is_needed else None for of_head, grad in zip(coefficients, grads, strict=True)]
    trained = [i for i, of_head in enumerate(own) if of_head is not None]
    if not trained:
        return
    needed = range(len(heads)) if any(own[i].reads_other for i in trained) else trained
    for columns in tiles:
        for i in needed:
            heads[i].select(columns)
        for i in trained:
            grads[i].begin_tile(columns)
        for rows in blocks:
            formed = [head.tile(rows) if i in needed else None for i, head in enumerate(heads)]
            out = [heads[i].gradient_tile(tile) if own[i] is not None else None for i, tile in enumerate(formed)]
            reader.differentiate(
                formed,
                [logsumexp[rows] for logsumexp in logsumexps],
                [None if of_head is None else of_head.at(rows) for of_head in own],
                ids[rows] - columns.start,
                out,
            )
            for i in trained:
                heads[i].accumulate_grad(rows, out[i], grads[i])
        for i in trained:
            grads[i].end_tile(columns)
