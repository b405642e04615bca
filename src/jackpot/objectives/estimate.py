"""An estimate of Z, the mean acceptance of OBRS, from an engine's top-k log-probs and the policy's distribution.

It is for another framework's training loop; ours reads Z from the joint head (`kernels/linear_head.py`).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from jackpot.core.errors import DataError
from jackpot.objectives import obrs
from jackpot.objectives.constants import LAM, TEMPERATURE
from jackpot.objectives.kernels.linear_head import linear_head
from jackpot.objectives.kernels.tiles import Head
from jackpot.objectives.tensor_checks import described, report_signs, sign_of_shift

FillIns = Callable[[Tensor], Tensor]  # returns log p_inf, [..., K], of ids [..., K]
_MASS = 1.01  # largest sum of probabilities of a top-k list, with room for rounding


def estimate_z(
    *,
    rollout_top_ids: Tensor,
    rollout_top_log_probs: Tensor,
    policy_logits: Tensor | None = None,
    hidden_states: Tensor | None = None,
    head: nn.Linear | None = None,
    temperature: float = TEMPERATURE,
    lam: float = LAM,
    fill_ins: FillIns | None = None,
) -> obrs.ZEstimate:
    """Estimate Z of every position from the top-k log-probs of the engine that sampled, and the policy's distribution.

    Give the policy's logits, or its last hidden states and its output layer, from which the logits are formed tile by
    tile. The estimate of Z = sum_x min(p_inf(x), p_policy(x) / lam) is a lower bound unless K is the whole vocabulary;
    `correct` multiplies it by kappa, so that its mean is right.

    Args:
        rollout_top_ids: [..., K] int64, the engine's most probable tokens at each position; at masked positions any K
            ids of the vocabulary.
        rollout_top_log_probs: [..., K] nats, of these tokens as the engine sampled them; -inf where the engine named
            fewer than K tokens, whatever id stands there.
        policy_logits: [..., V] float.
        hidden_states: [..., H] float.
        head: the output layer, weight [V, H], that maps hidden states to logits.
        temperature: temperature of sampling, above 0, by which the policy's logits are divided.
        lam: lam of the correction that will read Z.
        fill_ins: a function that returns log p_inf, [..., K], of ids [..., K], by a forward pass with the weights that
            sampled. It is called with the policy's most probable ids. None: p_inf of ids that the engine does not name
            stays unknown.

    Returns:
        Z, its bounds, and the mass of the known tokens: [...] each, without gradient. Z is NaN where a list of the
        engine names a token twice or sums to more than 1, as it may at masked positions.

    Raises:
        DataError: tensors of other shapes, dtypes or devices, neither or both forms of the policy's distribution, a
            temperature or lam that is not above 0, logits that are shifted by a token (on a GPU a later call reports
            that), or, on a CPU, ids outside of the vocabulary.
    """
    ids, top = rollout_top_ids, rollout_top_log_probs
    name, scores = _policy_scores(policy_logits, hidden_states, head)
    _check_distributions(ids, top, name, scores, head)
    if not (temperature > 0 and lam > 0):
        raise DataError(f"temperature is {temperature} and lam {lam}; both must be above 0")

    with torch.no_grad():
        at_ids, policy_ids, policy_top = _read_policy(scores, head, ids, temperature)
        filled = torch.full_like(policy_top, -torch.inf) if fill_ins is None else fill_ins(policy_ids)
        if getattr(filled, "shape", None) != policy_ids.shape:
            raise DataError(f"fill_ins returned {described(filled)}; it must be {list(policy_ids.shape)}, as the ids")

        is_absent = top.isneginf()  # the engine named fewer than K tokens
        z = obrs.topk_z(
            rollout_top_log_probs=top.float(),
            target_at_rollout_top=at_ids.masked_fill(is_absent, -torch.inf),
            rollout_top_ids=ids.masked_fill(is_absent, -1),
            target_top_ids=policy_ids,
            target_top_log_probs=policy_top,
            fill_ins=filled,
            fill_valid=ids.new_full(ids.shape[:-1], fill_ins is not None, dtype=torch.bool),
            lam=lam,
        )

        # The logits may be shifted by a token: see whether both models' most probable tokens agree better when shifted.
        is_usable = _is_distribution(ids, top)
        if ids.dim() > 1 and top.shape[-1]:
            best = ids.gather(-1, top.argmax(-1, keepdim=True))[..., 0]
            report_signs(sign_of_shift(policy_ids[..., 0], best, is_usable & ~is_absent.all(-1)))
        return z._replace(value=torch.where(is_usable, z.value, torch.nan))


def _is_distribution(ids: Tensor, top: Tensor) -> Tensor:
    """Return whether the top-k list of each position has no token twice and sums to at most 1: bool [...]. A list has K
    tokens, `ids` [..., K], and their log-probs, `top` [..., K]."""
    absent = -1 - torch.arange(ids.shape[-1], device=ids.device)  # distinct ids in place of absent tokens
    named = torch.where(top > -torch.inf, ids, absent).sort(-1).values
    return (named.diff(dim=-1) != 0).all(-1) & (top.float().exp().sum(-1) <= _MASS)


def _policy_scores(
    policy_logits: Tensor | None, hidden_states: Tensor | None, head: nn.Linear | None
) -> tuple[str, Tensor]:
    """Return the name and the tensor of the argument of `estimate_z` that gives the policy's distribution.

    Raise DataError where neither logits nor hidden states with a head are given, or both.
    """
    if policy_logits is not None and hidden_states is None and head is None:
        return "policy_logits", policy_logits
    if policy_logits is None and hidden_states is not None and head is not None:
        return "hidden_states", hidden_states
    raise DataError("the policy's distribution is needed once: give policy_logits, or hidden_states and head")


def _check_distributions(ids: Tensor, top: Tensor, name: str, scores: Tensor, head: object) -> None:
    """Raise the DataErrors of `estimate_z` about the engine's lists, `ids` and `top`, and the policy's `scores` and
    `head`; `name` is the argument of `estimate_z` that gave `scores`."""
    arguments: dict[str, object] = {"rollout_top_ids": ids, "rollout_top_log_probs": top, name: scores}
    for argument, tensor in arguments.items():
        if not isinstance(tensor, Tensor):
            raise DataError(f"{argument} is {described(tensor)}; it must be a tensor")

    if ids.shape != top.shape or not ids.dim() or ids.dtype != torch.int64 or not top.is_floating_point():
        raise DataError(
            f"rollout_top_ids is {list(ids.shape)} {ids.dtype}, rollout_top_log_probs {list(top.shape)} {top.dtype}; "
            f"they must be [..., K], int64 and float"
        )
    if scores.shape[:-1] != ids.shape[:-1] or scores.device != ids.device or top.device != ids.device:
        raise DataError(
            f"{name} is {list(scores.shape)} on {scores.device}, rollout_top_ids {list(ids.shape)} on {ids.device} and "
            f"rollout_top_log_probs on {top.device}; they must be of the same positions and on one device"
        )
    if head is not None and not isinstance(head, nn.Linear):
        raise DataError(f"head is {described(head)}; it must be the policy's output layer, a torch.nn.Linear")

    size = scores.shape[-1] if head is None else head.out_features
    if ids.device.type == "cpu" and ids.numel() and not (ids.min() >= 0 and ids.max() < size):
        raise DataError(
            f"rollout_top_ids holds ids from {int(ids.min())} to {int(ids.max())}; the policy's vocabulary has 0 to "
            f"{size - 1}; at masked positions and for absent tokens, whose log-prob is -inf, give any of these"
        )


def _read_policy(
    scores: Tensor, head: nn.Linear | None, ids: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the policy's log-probs at `ids`, the policy's K most probable ids, and their log-probs: [..., K] each.

    Args:
        scores: logits without a `head`, else hidden states.
    """
    if head is None:
        scaled = scores.float() / temperature
        normalizer = scaled.logsumexp(-1, keepdim=True)
        top, top_ids = scaled.topk(min(ids.shape[-1], scaled.shape[-1]), dim=-1)
        return scaled.gather(-1, ids) - normalizer, top_ids, top - normalizer

    states, k = scores.reshape(-1, scores.shape[-1]), ids.shape[-1]
    output = linear_head(
        Head(hidden=states, weight=head.weight, bias=head.bias, soft_cap=None),
        ids.new_zeros(len(states)),  # in place of sampled ids, whose log-probs are not needed
        temperature=temperature,
        num_top=k,
        gather_ids=ids.reshape(len(states), k),
        only_log_probs=True,
    )
    tensors = output.gathered, output.top_ids, output.top_log_probs
    at_ids, top_ids, top = (tensor.view(*ids.shape[:-1], tensor.shape[-1]) for tensor in tensors)
    return at_ids, top_ids, top
