"""Log-probs of a head over a few ids at each position: those of a policy renormalized on what a sampler kept. Pure,
torch only.

With top-k a sampler gives probability to a set S of ids alone. The policy on the same support is

    log p_S(x) = logit(x) - log sum over y in S of e^logit(y)

so it takes the rows of the weight at S and no others, and its gradient is in closed form, as that of any softmax.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from jackpot.objectives.kernels.tiles import Head, operand_dtype, sum_dtype

_GATHERED = 2**24  # elements of gathered rows at a time


def support_log_probs(
    head: Head, ids: Tensor, support_ids: Tensor, is_kept: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Compute log-probs under a head whose distribution is renormalized on the kept ids of each position.

    Args:
        head: of N positions.
        ids: [N] int64, what was sampled; it belongs to the support whether it is listed or not.
        support_ids: [N, G] int64, distinct within a position.
        is_kept: [N, G] bool, False for those outside of the support.
        temperature: divides the logits, above 0.

    Returns:
        log p_S(ids), [N] with gradient, and log p_S(support_ids), [N, G] without, -inf where not kept.
    """
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


class _Context(FunctionCtx):
    """What autograd hands to both passes, which torch does not describe."""

    dtype: torch.dtype  # of the products
    operands: torch.dtype  # that hidden states and weight are rounded to
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]


class _RowProducts(torch.autograd.Function):
    """Products of each position's hidden state with some rows of the weight, some positions at a time."""

    @staticmethod
    def forward(
        ctx: _Context, dtype: torch.dtype, operands: torch.dtype, columns: Tensor, hidden: Tensor, weight: Tensor
    ) -> Tensor:
        """Return [N, G] in `dtype`, of hidden [N, H] and weight [V, H] rounded to `operands`, at columns [N, G]."""
        ctx.save_for_backward(columns, hidden, weight)
        ctx.dtype, ctx.operands = dtype, operands
        products = hidden.new_empty(columns.shape, dtype=dtype)

        with torch.autocast(hidden.device.type, enabled=False):
            for rows in _chunks(columns, hidden.shape[1]):
                taken = weight[columns[rows]].to(operands).to(dtype)
                products[rows] = (taken @ hidden[rows].to(operands).to(dtype)[..., None])[..., 0]
        return products

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        [gradient] = gradients
        columns, hidden, weight = ctx.saved_tensors
        dtype, operands = ctx.dtype, ctx.operands
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[3] else None
        of_weight = torch.zeros_like(weight, dtype=dtype) if ctx.needs_input_grad[4] else None

        with torch.autocast(hidden.device.type, enabled=False):
            for rows in _chunks(columns, hidden.shape[1]):
                if of_hidden is not None:
                    taken = weight[columns[rows]].to(operands).to(dtype)
                    of_hidden[rows] = (gradient[rows][:, None] @ taken)[:, 0].to(hidden.dtype)
                if of_weight is not None:
                    outer = gradient[rows][..., None] * hidden[rows].to(operands).to(dtype)[:, None]
                    of_weight.index_add_(0, columns[rows].flatten(), outer.flatten(0, 1))
        return None, None, None, of_hidden, None if of_weight is None else of_weight.to(weight.dtype)


def _chunks(columns: Tensor, width: int) -> list[slice]:
    """Return ranges of positions whose gathered rows fit into `_GATHERED`."""
    step = max(1, _GATHERED // max(1, columns.shape[1] * width))
    return [slice(start, start + step) for start in range(0, len(columns), step)]
