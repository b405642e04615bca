"""Rejection of tokens sampled from p_inf, for a target p_target: OBRS of Jackpot (arXiv 2602.06107, "the paper").

OBRS is optimal budgeted rejection sampling. Pure functions of tensors, torch only. The paper's sections 3 and 4; the
rule is Verine et al. 2024. With rho = p_target(x) / p_inf(x):

    acceptance   a(x) = min(1, rho / lam)                       eq. 3; a larger lam rejects more
    kept mass    o(x) = p_inf(x) a(x) = min(p_inf(x), p_target(x) / lam)
    normalizer   Z = sum_x o(x)                                 the expected acceptance; 1 - TV at lam = 1
    accepted     p~(x) = o(x) / Z                               eq. 4, the distribution of accepted tokens
    weight       w(x) = p_target(x) / p~(x) = Z max(lam, rho)   of an accepted token

Since lam Z <= 1, a(x) min(w(x), c1) = min(Z rho, c1) for every lam and every c1 >= 1.

`rollout_log_probs` is log p_inf and `target_log_probs` is log p_target, in nats. `lam` is a number above 0 or a tensor
that broadcasts. OBRS is computed without gradient, so pass detached tensors to all functions.
Shapes: `...` any, `V` vocabulary, `K` top-k entries.

Status: supported.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


def acceptance(rollout_log_probs: Tensor, target_log_probs: Tensor, lam: float | Tensor) -> Tensor:
    """Return a(x) = min(1, p_target(x) / (lam p_inf(x))), the probability that OBRS accepts a sampled token (eq. 3).

    It is in [0, 1], smaller for a larger lam, and 0 where p_target is 0, also where p_inf is 0 too. The result has the
    arguments' shape, which may be any.
    """
    ratio = target_log_probs - rollout_log_probs - log_lam(lam)  # NaN where both log-probs are -inf
    return torch.where(target_log_probs.isneginf(), 0.0, ratio.clamp(max=0.0).exp())


def accept(acceptance: Tensor, uniforms: Tensor) -> Tensor:
    """Draw the mask of accepted tokens, True where the uniform number is below the acceptance.

    The result has the arguments' shape, which may be any. With `uniforms` in [0, 1), an acceptance of 1 always accepts
    and one of 0 never does.
    """
    return uniforms < acceptance


def log_kept_mass(rollout_log_probs: Tensor, target_log_probs: Tensor, lam: float | Tensor) -> Tensor:
    """Return log min(p_inf(x), p_target(x) / lam), the log-prob that x is sampled and accepted, of the same shape."""
    return torch.minimum(rollout_log_probs, target_log_probs - log_lam(lam))


def exact_z(rollout_log_probs: Tensor, target_log_probs: Tensor, lam: float | Tensor) -> Tensor:
    """Return Z, the expected acceptance: sum_x min(p_inf(x), p_target(x) / lam) over all tokens, [..., V] -> [...]."""
    return log_kept_mass(rollout_log_probs, target_log_probs, lam).exp().sum(-1)


def post_rejection(rollout_log_probs: Tensor, target_log_probs: Tensor, lam: float | Tensor) -> Tensor:
    """Return the log-probs by which accepted tokens are distributed (the paper's eq. 4): [..., V] -> [..., V].

    All are -inf where no token can be accepted.
    """
    kept = log_kept_mass(rollout_log_probs, target_log_probs, lam)
    return torch.where(kept.isneginf().all(-1, keepdim=True), -torch.inf, torch.log_softmax(kept, dim=-1))


class ZEstimate(NamedTuple):
    """An estimate of Z, the expected acceptance, from a part of the vocabulary, with bounds of Z. All [...], float."""

    value: Tensor  # the estimate that weights use; equals `lower`, the paper's Z_approx
    lower: Tensor
    upper: Tensor
    rollout_mass: Tensor  # sum of p_inf over the tokens of which p_inf and p_target are both known
    target_mass: Tensor  # sum of p_target over the same tokens, without those that a truncated sampler never gives
    # 1 where both probabilities are known for the top k of either model, or for all tokens; 0: for the sampler's top k.
    union: Tensor


def topk_z(
    rollout_top_log_probs: Tensor,
    target_at_rollout_top: Tensor,
    rollout_top_ids: Tensor,
    target_top_ids: Tensor,
    target_top_log_probs: Tensor,
    fill_ins: Tensor,
    fill_valid: Tensor,
    lam: float | Tensor,
) -> ZEstimate:
    """Estimate Z, the expected acceptance, from both models' top-k tokens, and bound it both ways (section 4.4.1).

    S = topk(p_inf); both probabilities of its tokens are known. N = topk(p_target) without S; p_inf of its tokens is
    known only where `fill_valid` is True: there `fill_ins` is their log p_inf, computed again with the weights that
    sampled. With m = 1 - p_inf(known tokens), q the smallest p_inf > 0 in S, and t = 1 - p_target(S and N):

        lower = sum over known x of min(p_inf, p_target/lam)
        upper = lower + min(m, sum over unknown x in N of min(q, p_target/lam) + min(m, t/lam))

    and never more than min(1, 1/lam). Where the known tokens have all of p_inf, the bounds meet.

    Args:
        rollout_top_log_probs: [..., K], -inf outside a truncated support.
        target_at_rollout_top: [..., K] log p_target of the same tokens.
        rollout_top_ids: [..., K] int64.
        target_top_ids: [..., K'] int64, distinct within a row.
        target_top_log_probs: [..., K'].
        fill_ins: [..., K'] log p_inf at `target_top_ids` by a forward pass of the rollout model.
        fill_valid: [...] bool, True where that forward pass used the weights that sampled the token, untruncated.
        lam: as in `acceptance`; a tensor must be [..., 1].
    """
    is_new = _not_among(target_top_ids, rollout_top_ids)  # [..., K'] bool, True for ids in the set N
    filled = is_new & fill_valid.unsqueeze(-1)
    unknown = is_new & ~fill_valid.unsqueeze(-1)

    # The lower bound: the kept mass, the sum of min(p_inf, p_target / lam), of tokens with both probabilities known.
    known = log_kept_mass(rollout_top_log_probs, target_at_rollout_top, lam).exp().sum(-1)
    known = known + _masked_mass(log_kept_mass(fill_ins, target_top_log_probs, lam), filled)

    rollout_mass = (rollout_top_log_probs.exp().sum(-1) + _masked_mass(fill_ins, filled)).clamp(max=1.0)
    target_on_rollout = target_at_rollout_top.exp().sum(-1)
    # A truncated engine may fill its list with any ids outside of its support, which must not count here.
    target_on_support = _masked_mass(target_at_rollout_top, ~rollout_top_log_probs.isneginf())
    target_mass = (target_on_support + _masked_mass(target_top_log_probs, filled)).clamp(max=1.0)

    # The most that all other tokens can add: the upper bound.
    rest = 1.0 - rollout_mass  # m
    target_rest = (1.0 - target_on_rollout - _masked_mass(target_top_log_probs, is_new)).clamp(min=0.0)  # t
    scale = _like(lam.squeeze(-1) if isinstance(lam, Tensor) else lam, known)  # lam as a tensor
    unknown_mass = _unknown_mass(rollout_top_log_probs, target_top_log_probs, unknown, lam)
    missing = torch.minimum(rest, unknown_mass + torch.minimum(rest, target_rest / scale))
    ceiling = (1.0 / scale).clamp(max=1.0)
    upper = torch.minimum(known + missing, torch.maximum(ceiling, known))

    union = fill_valid.to(known.dtype)  # 1 where both probabilities are known for the top k of either model
    return ZEstimate(
        value=known, lower=known, upper=upper, rollout_mass=rollout_mass, target_mass=target_mass, union=union
    )


def known_z(z: Tensor) -> ZEstimate:
    """Return an exactly known expected acceptance, [...], as an estimate whose bounds meet."""
    ones = torch.ones_like(z)
    return ZEstimate(value=z, lower=z, upper=z, rollout_mass=ones, target_mass=ones, union=ones)


def kappa(acceptance_sum: Tensor, z_sum: Tensor) -> Tensor:
    """Return kappa = sum a / sum Z_k over one optimizer step's tokens, the factor on Z_k (the paper's section 4.4.2).

    Z_k is the top-k estimate of Z; kappa corrects the mean of Z_k, not the single Z_k. a is the probability with which
    a token is accepted, not the 0 or 1 that was drawn: the same expectation with less variance. kappa is 1 where z_sum
    is 0: without tokens, or without any overlap, where every weight is 0 whatever kappa is.
    """
    return torch.where(z_sum > 0, acceptance_sum / z_sum.clamp(min=torch.finfo(z_sum.dtype).tiny), 1.0)


def weight(rollout_log_probs: Tensor, target_log_probs: Tensor, z: Tensor, lam: float | Tensor) -> Tensor:
    """Return Z max(lam, p_target / p_inf), an accepted token's weight before caps (the paper's Algorithm 1).

    Z is the expected acceptance, p_inf the distribution that the token was sampled from.
    """
    return (z.log() + torch.maximum(target_log_probs - rollout_log_probs, _like(log_lam(lam), z))).exp()


def lam_for_budget(rollout_log_probs: Tensor, target_log_probs: Tensor, budget: float) -> Tensor:
    """Return the lam at which Z, the expected acceptance, is `budget`, by Theorem 3.4: [..., V] -> [...], float64.

    With rho = p_target / p_inf, Z(lam) = P_inf(rho > lam) + P_target(rho <= lam) / lam falls from P_inf(rho > 0) to 0;
    P_inf and P_target are the probabilities of all tokens with such a rho. With the tokens sorted by rho, lam =
    P_target(first i tokens) / (budget - P_inf(the other tokens)), for the only i at which this lam lies between rho_i
    and rho_(i+1). At the largest budget, P_inf(rho > 0), every lam up to the smallest positive rho is a solution; the
    smallest positive rho is returned.

    Raises:
        ValueError: `budget` is outside (0, 1], or above P_inf(rho > 0) somewhere. On CUDA, which is not waited for, the
            second is an assertion on the device instead.
    """
    if not 0.0 < budget <= 1.0:
        raise ValueError(f"budget is {budget}; an expected acceptance lies in (0, 1]")

    rollout, target = rollout_log_probs.double().exp(), target_log_probs.double().exp()
    reachable = (rollout * (target > 0)).sum(-1)  # P_inf(rho > 0), the largest budget of each position
    too_large = (budget > reachable + 1e-12).any()  # 1e-12: room for rounding
    why = "of p_inf lies where p_target > 0, and nothing else is ever"
    if reachable.is_cuda:
        # torch has no public assertion on the device
        torch._assert_async(~too_large, f"budget is {budget}, but less {why} accepted")  # pyright: ignore[reportPrivateUsage]
    elif too_large:
        raise ValueError(f"budget is {budget}, but only {reachable.min():.6g} {why} accepted; ask for at most that")

    rho, order = torch.where(rollout > 0, target / rollout, math.inf).sort(-1)
    target_up_to = target.gather(-1, order).cumsum(-1)  # P_target(rho <= rho_i)
    rollout = rollout.gather(-1, order)
    from_here = rollout.flip(-1).cumsum(-1).flip(-1)  # P_inf(rho >= rho_i)
    rollout_above = pad(from_here[..., 1:], (0, 1))  # P_inf(rho > rho_i)
    z_at_rho = torch.where(rho > 0, rollout_above + target_up_to / rho, math.inf)  # Z(rho_i), falls with i

    # The last i with Z(rho_i) >= budget (`segment`), and for each i the lam by the docstring's formula (`inside`).
    segment = ((z_at_rho >= budget).sum(-1, keepdim=True) - 1).clamp(min=0)
    inside = target_up_to / (budget - rollout_above).clamp(min=torch.finfo(torch.float64).tiny)
    next_rho = pad(rho[..., 1:], (0, 1), value=math.inf)
    inside = inside.clamp(max=next_rho)  # rounding of the difference must not leave the segment

    smallest = torch.where(rho > 0, rho, math.inf).min(-1).values
    return torch.where(budget >= reachable, smallest, inside.gather(-1, segment).squeeze(-1).clamp(min=smallest))


def z_for_budget(rollout_log_probs: Tensor, target_log_probs: Tensor, budget: float) -> tuple[Tensor, Tensor]:
    """Return Z, the expected acceptance, and the lam from `lam_for_budget` at which Z is `budget`, [...] each, float64.

    The arguments are log-probs of the whole vocabulary, [..., V].
    """
    lam = lam_for_budget(rollout_log_probs, target_log_probs, budget)
    return exact_z(rollout_log_probs.double(), target_log_probs.double(), lam.unsqueeze(-1)), lam


def log_lam(lam: float | Tensor) -> float | Tensor:
    """Return log lam of a number or a tensor.

    Raises:
        ValueError: a lam is not above 0. (lam = 0 would accept every token: use no rejection instead.) A tensor on CUDA
            is not checked, which would wait for the device: there such a lam gives NaN or -inf.
    """
    if isinstance(lam, Tensor):
        if not lam.is_cuda and not (lam > 0).all():
            raise ValueError("lam has entries that are not above 0; the acceptance is min(1, rho / lam)")
        return lam.log()
    if not lam > 0:
        raise ValueError(f"lam is {lam}; it must be above 0, since the acceptance is min(1, rho / lam)")
    return math.log(lam)


def _not_among(ids: Tensor, listed: Tensor) -> Tensor:
    """Return True where an id of `ids` [..., K'] is not among the ids `listed`, [..., K]: bool [..., K']."""
    ids, listed = ids.int(), listed.int()
    missing = torch.ones_like(ids, dtype=torch.bool)
    for listed_id in listed.unbind(-1):  # one by one: a tensor [..., K', K] would be large
        missing &= ids != listed_id.unsqueeze(-1)
    return missing


def _unknown_mass(rollout_top: Tensor, target_top: Tensor, unknown: Tensor, lam: float | Tensor) -> Tensor:
    """Return an upper bound, [...], of sum min(p_inf, p_target / lam) over the target's top tokens that are `unknown`.

    `rollout_top` [..., K] and `target_top` [..., K'] are the log-probs of each model's own top tokens.
    The p_inf of an unknown token is at most the smallest p_inf above 0 among the rollout model's top tokens.
    """
    if not rollout_top.shape[-1]:  # no top token bounds p_inf: the kept mass is at most p_target / lam
        return _masked_mass(target_top - log_lam(lam), unknown)
    smallest = torch.where(rollout_top.isneginf(), torch.inf, rollout_top).min(-1, keepdim=True).values
    return _masked_mass(log_kept_mass(smallest, target_top, lam), unknown)


def _masked_mass(log_mass: Tensor, mask: Tensor) -> Tensor:
    """Sum e^`log_mass` over the last dimension where `mask` is True: [..., K] -> [...]."""
    return torch.where(mask, log_mass.exp(), 0.0).sum(-1)


def _like(value: float | Tensor, tensor: Tensor) -> Tensor:
    """Return `value` in the dtype and on the device of `tensor`; a number is created there, as a copy would wait."""
    return value.to(tensor) if isinstance(value, Tensor) else tensor.new_full((), value)
