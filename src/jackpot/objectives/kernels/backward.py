"""The backward pass of one or two heads, tile by tile. Pure, torch only.

With p a head's own probabilities, the gradients of its outputs with respect to its logits are

    d log p(id) = onehot(id) - p                d entropy = -p (log p + entropy)

and for the rollout model, q, against the policy, p, which both divergences hold constant (SG),

    d forward KL = q - p                        d reverse KL = q (log q - log p - reverse KL)

As in FlashAttention, forward saves the logsumexp of each position, so that backward computes a tile's probabilities
without a running maximum. The gradient of the logits is linear in the gradients of the outputs, so a few coefficients
for each position (`GradCoefficients`) describe it, and a tile costs a few elementwise products more than its logits and
exponentials. Where p is 0, the terms with p are 0 even if log p is -inf.

Shapes: `N` positions in all, `C` of a block, `T` tokens of a tile.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from jackpot.objectives.kernels.reader import GradCoefficients, TileGradient, TileReader
from jackpot.objectives.kernels.tiles import HeadGrads, HeadOperands


class OutputGradient(NamedTuple):
    """The loss's gradient with respect to a head's entropy or reverse KL (the output), and the output's own value.

    The value is needed too, because it stands in the output's derivative with respect to the logits, as
    in d entropy = -p (log p + entropy), with p the head's probabilities.
    """

    to: Tensor  # [N] d loss / d output, divided by the temperature
    value: Tensor  # [N] the entropy or the reverse KL


def coefficients_of(
    to_log_probs: Tensor | None,
    entropy: OutputGradient | None = None,
    to_forward: Tensor | None = None,
    reverse_kl: OutputGradient | None = None,
) -> GradCoefficients | None:
    """Combine the loss's gradients with respect to one head's outputs into coefficients of the logits' gradient.

    The logits' gradient is on_id onehot(id) + p (constant + on_log log p - on_other_log log o) - on_other o, with p the
    head's probabilities and o the other head's. Comments below give each output's derivative with respect to the
    logits. Return None if every argument is None.

    Args:
        to_log_probs, to_forward: [N] d loss / d log-probs and d loss / d forward KL, divided by the temperature.
            None for 0, as for every argument.
        entropy, reverse_kl: gradient and value of these outputs.
    """
    constants: list[Tensor] = []  # what each output adds to the coefficient `constant`
    on_log = None

    if to_log_probs is not None:  # d log p(id) = onehot(id) - p
        constants.append(-to_log_probs)
    if entropy is not None:  # d entropy = -p (log p + entropy)
        constants.append(-entropy.to * entropy.value)
        on_log = -entropy.to
    if to_forward is not None:  # d forward KL = p - o, with o the probabilities of the other head
        constants.append(to_forward)
    if reverse_kl is not None:  # d reverse KL = p (log p - log o - reverse KL)
        product = reverse_kl.to * reverse_kl.value
        constants.append(-product.masked_fill_(reverse_kl.to == 0.0, 0.0))  # no gradient adds 0, even if the KL is inf
        on_log = reverse_kl.to if on_log is None else on_log + reverse_kl.to

    if not constants:
        return None

    return GradCoefficients(
        on_id=to_log_probs,
        constant=sum(constants[1:], constants[0]),
        on_log=on_log,
        on_other_log=None if reverse_kl is None else reverse_kl.to,
        on_other=to_forward,
    )


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
    """Sum the gradients of one or two heads over all tiles into `grads`; form only the logits that a gradient reads.

    Args:
        blocks: slices of positions.
        tiles: slices of tokens.
        ids: [N], the sampled ids.
        reader: reader that differentiates the tiles.
        heads, logsumexps, coefficients, grads: one for each head; a logsumexp is [N].
    """
    trained = {  # coefficients of the heads that need a gradient, by the head's index
        i: head_coefficients
        for i, (head_coefficients, grad) in enumerate(zip(coefficients, grads, strict=True))
        if head_coefficients is not None and grad.is_needed
    }
    if not trained:
        return

    # The rollout model's gradient may contain the policy's probabilities; then the policy's logits are formed too.
    reads_both = any(terms.on_other_log is not None or terms.on_other is not None for terms in trained.values())
    heads_read = range(len(heads)) if reads_both else list(trained)

    for columns in tiles:
        for i in heads_read:
            heads[i].select(columns)
        for i in trained:
            grads[i].begin_tile(columns)

        for rows in blocks:
            logits = {i: heads[i].tile(rows) for i in heads_read}
            gradients = {  # coefficients, and the memory that `differentiate` will fill
                i: TileGradient(coefficients=head_coefficients.at(rows), out=heads[i].gradient_tile(logits[i]))
                for i, head_coefficients in trained.items()
            }
            reader.differentiate(  # fills the memory in `gradients`
                list(logits.values()),
                [logsumexps[i][rows] for i in heads_read],
                [gradients.get(i) for i in heads_read],
                ids[rows] - columns.start,  # counted from the tile's first token
            )
            for i, gradient in gradients.items():
                heads[i].accumulate_grad(rows, gradient.out, grads[i])

        for i in trained:
            grads[i].end_tile(columns)
