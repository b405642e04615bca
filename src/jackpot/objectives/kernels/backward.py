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
from typing import NamedTuple

from torch import Tensor

from jackpot.objectives.kernels.reader import GradCoefficients, TileGradient, TileReader
from jackpot.objectives.kernels.tiles import HeadGrads, HeadOperands


class OutputGradient(NamedTuple):
    """Holds the gradient of an output, and the output itself, which its gradient with respect to logits contains."""

    to: Tensor  # [N] d loss / d output over the temperature
    value: Tensor  # [N]


def coefficients_of(
    to_log_probs: Tensor | None,
    entropy: OutputGradient | None = None,
    to_forward: Tensor | None = None,
    reverse_kl: OutputGradient | None = None,
) -> GradCoefficients | None:
    """Combine the gradients of one head's outputs; None where no output has one.

    Args:
        to_log_probs, to_forward: [N] d loss / d output over the temperature; None for 0, as for the others.
    """
    parts: list[Tensor] = []
    on_log = None

    if to_log_probs is not None:
        parts.append(-to_log_probs)
    if entropy is not None:
        parts.append(-entropy.to * entropy.value)
        on_log = -entropy.to
    if to_forward is not None:
        parts.append(to_forward)
    if reverse_kl is not None:
        product = reverse_kl.to * reverse_kl.value
        parts.append(-product.masked_fill_(reverse_kl.to == 0.0, 0.0))  # 0 even if the KL is infinite
        on_log = reverse_kl.to if on_log is None else on_log + reverse_kl.to

    if not parts:
        return None

    on_other_log = None if reverse_kl is None else reverse_kl.to
    return GradCoefficients(to_log_probs, sum(parts[1:], parts[0]), on_log, on_other_log, to_forward)


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
    trained = {
        i: of_head
        for i, (of_head, grad) in enumerate(zip(coefficients, grads, strict=True))
        if of_head is not None and grad.is_needed
    }
    if not trained:
        return

    needed = range(len(heads)) if any(of_head.reads_other for of_head in trained.values()) else list(trained)

    for columns in tiles:
        for i in needed:
            heads[i].select(columns)
        for i in trained:
            grads[i].begin_tile(columns)

        for rows in blocks:
            formed = {i: heads[i].tile(rows) for i in needed}
            gradients = {
                i: TileGradient(of_head.at(rows), heads[i].gradient_tile(formed[i])) for i, of_head in trained.items()
            }
            reader.differentiate(
                list(formed.values()),
                [logsumexps[i][rows] for i in needed],
                [gradients.get(i) for i in needed],
                ids[rows] - columns.start,
            )
            for i, gradient in gradients.items():
                heads[i].accumulate_grad(rows, gradient.out, grads[i])
        for i in trained:
            grads[i].end_tile(columns)
