"""Log-probs of a policy that is renormalized on the few ids that a truncated sampler kept. Pure, torch only.

With top-k a sampler gives probability to a set S of ids alone. The policy on the same support is

    log p_S(x) = logit(x) - log sum over y in S of e^logit(y)

so only the rows of the head's weight at S are read; the gradient is in closed form, as that of any softmax.
"""

from typing import Any

import torch
from torch import Tensor

from jackpot.objectives.kernels.tiles import Head, operand_dtype, sum_dtype

_GATHERED = 2**24  # most numbers of the weight's rows that are gathered at a time


def support_log_probs(
    head: Head, ids: Tensor, support_ids: Tensor, is_kept: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Compute log-probs under a head whose distribution is renormalized on the kept ids of each position.

    Args:
        head: head over N positions.
        ids: [N] int64, the sampled ids; each belongs to the support, whether it is listed or not.
        support_ids: [N, G] int64, the ids that are listed for each position, none twice.
        is_kept: [N, G] bool, False for listed ids that are outside of the support.
        temperature: divides the logits, above 0.

    Returns:
        log p_S(ids), [N] with gradient, and log p_S(support_ids), [N, G] without gradient, -inf where not kept; p_S is
        the renormalized distribution.
    """
    # `columns` are the ids whose logits are formed: the sampled one, then those listed. Where the sampled id is listed
    # too, its second logit is masked: it must not count twice.
    is_sampled = support_ids == ids[:, None]
    columns = torch.cat((ids[:, None], support_ids), dim=1)
    in_support = torch.cat((torch.ones_like(ids[:, None], dtype=torch.bool), is_kept & ~is_sampled), dim=1)

    dtype = sum_dtype([head])
    logits = _RowProducts.apply(dtype, operand_dtype(head, dtype), columns, head.hidden, head.weight)
    if head.bias is not None:
        logits = logits + head.bias[columns]
    if head.soft_cap is not None:
        logits = head.soft_cap * (logits / head.soft_cap).tanh()

    log_probs = (logits / temperature).masked_fill(~in_support, -torch.inf).log_softmax(-1)
    sampled = log_probs[:, 0]
    listed = torch.where(is_sampled, sampled[:, None], log_probs[:, 1:]).masked_fill(~is_kept, -torch.inf)
    return sampled, listed.detach()


class _RowProducts(torch.autograd.Function):
    """The autograd function that multiplies each position's hidden state by the rows of the weight at its own ids."""

    @staticmethod
    def forward(
        ctx: Any, dtype: torch.dtype, operands: torch.dtype, columns: Tensor, hidden: Tensor, weight: Tensor
    ) -> Tensor:
        """Multiply the hidden state of each position by the rows of the weight at its ids, `columns` [N, G].

        Hidden states [N, H] and weight [V, H] are first rounded to the dtype `operands`. The products are [N, G], in
        `dtype`.
        """
        ctx.save_for_backward(columns, hidden, weight)
        ctx.dtype, ctx.operands = dtype, operands
        products = hidden.new_empty(columns.shape, dtype=dtype)  # filled below, some positions (`rows`) at a time

        with torch.autocast(hidden.device.type, enabled=False):
            for rows in _chunks(columns, hidden.shape[1]):
                weight_rows = weight[columns[rows]].to(operands).to(dtype)  # [rows, G, H], one for each id
                products[rows] = (weight_rows @ hidden[rows].to(operands).to(dtype)[..., None])[..., 0]
        return products

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of forward's arguments: those of `hidden` and `weight` where needed, else None.

        `gradients` is one tensor, the loss's gradient with respect to the products, [N, G].
        """
        [gradient] = gradients
        columns, hidden, weight = ctx.saved_tensors
        dtype, operands = ctx.dtype, ctx.operands
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[3] else None
        to_weight = torch.zeros_like(weight, dtype=dtype) if ctx.needs_input_grad[4] else None

        with torch.autocast(hidden.device.type, enabled=False):
            for rows in _chunks(columns, hidden.shape[1]):
                if to_hidden is not None:
                    weight_rows = weight[columns[rows]].to(operands).to(dtype)  # [rows, G, H], one for each id
                    to_hidden[rows] = (gradient[rows][:, None] @ weight_rows)[:, 0].to(hidden.dtype)
                if to_weight is not None:
                    # [rows, G, H]: each gradient times its hidden state, added to the weight's row of that id.
                    outer = gradient[rows][..., None] * hidden[rows].to(operands).to(dtype)[:, None]
                    to_weight.index_add_(0, columns[rows].flatten(), outer.flatten(0, 1))

        return None, None, None, to_hidden, None if to_weight is None else to_weight.to(weight.dtype)


def _chunks(columns: Tensor, width: int) -> list[slice]:
    """Cut the N positions into slices, for each of which at most `_GATHERED` numbers of the weight are copied.

    A position copies G rows of `width` numbers: the rows at its ids in `columns` [N, G].
    """
    step = max(1, _GATHERED // max(1, columns.shape[1] * width))
    return [slice(start, start + step) for start in range(0, len(columns), step)]
