"""Optimal budgeted rejection sampling (OBRS) of single tokens, in one file to copy: torch only.

Jackpot, arXiv 2602.06107. A rollout model p_inf sampled the tokens, the policy p_target is trained on them. With
rho(x) = p_target(x) / p_inf(x) of a sampled token x:

    acceptance   a = min(1, rho / lam)                          eq. 3; a larger lam rejects more
    normalizer   Z = sum over x of min(p_inf(x), p_target(x) / lam)     of eq. 4; the expected acceptance
    weight       w = p_target / p~ = Z max(lam, rho)            p~ of eq. 4, the distribution of accepted tokens
    kappa        mean of a / mean of Z                          section 4.4.2, where Z is summed over a top k
    loss         - sum of m min(kappa w, c1) S / tokens         eq. 5; m the Bernoulli mask of mean a, S PPO's surrogate

`tis` is the weight min(rho, cap) without a rejection. As lam Z <= 1, a min(w, c1) = min(Z rho, c1): in expectation OBRS
is `tis` on Z rho, so `obrs` without `uniforms`, whose mask is a itself, is that with less variance.

All log-probs are in nats, at the temperature of sampling, and detached: nothing here carries a gradient. Shapes: `B`
responses of `T` tokens, `V` vocabulary, `K` of the top k, `...` any. jackpot has the same with checks and metrics
(`jackpot.correct`, `jackpot.estimate_z`), and tests/examples/test_obrs.py holds both to the same bits. Apache-2.0.

Example: a policy and a sampler of 50 tokens, whose engine reports its 20 most probable ones, as vLLM's `logprobs=20`.

    >>> rng = torch.Generator().manual_seed(0)
    >>> policy_logits, rollout_logits = torch.randn(2, 4, 6, 50, generator=rng)  # [B, T, V] each
    >>> p_inf = rollout_logits.log_softmax(-1)
    >>> ids = torch.multinomial(p_inf.flatten(0, 1).exp(), 1, generator=rng).view(4, 6, 1)
    >>> top_log_probs, top_ids = p_inf.topk(20)  # [B, T, K] each, of the engine
    >>> rollout_log_probs = p_inf.gather(-1, ids)[..., 0]  # [B, T], of the engine
    >>> log_probs = policy_logits.log_softmax(-1).gather(-1, ids)[..., 0]  # [B, T], with gradient in a real loop
    >>> mask, advantages = torch.ones(4, 6, dtype=torch.bool), torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])

    >>> z = topk_z(top_ids, top_log_probs, policy_logits)
    >>> uniforms = torch.rand(4, 6, generator=rng)
    >>> old_log_probs = log_probs.detach()
    >>> weights, accept_mask = obrs(rollout_log_probs, old_log_probs, z, mask, uniforms)
    >>> ratio = (log_probs - old_log_probs).exp()
    >>> surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    >>> loss = -(accept_mask * weights * surrogate).sum() / mask.sum()
    >>> print(f"{int(accept_mask.sum())} of {int(mask.sum())} tokens are kept, loss {loss:.3f}")
    9 of 24 tokens are kept, loss -0.146
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def tis(rollout_log_probs: Tensor, target_log_probs: Tensor, cap: float = 3.0) -> Tensor:
    """Truncated importance sampling: the weight min(rho, cap) of sampled tokens. Any shape, kept."""
    return (target_log_probs - rollout_log_probs).exp().clamp(max=cap)


def acceptance(rollout_log_probs: Tensor, target_log_probs: Tensor, lam: float = 1.0) -> Tensor:
    """a = min(1, rho / lam) of sampled tokens (eq. 3), the expected mask. Any shape, kept."""
    return (target_log_probs - rollout_log_probs - math.log(lam)).clamp(max=0.0).exp()


def sampled_mask(acceptance: Tensor, uniforms: Tensor) -> Tensor:
    """Draw the Bernoulli mask of mean a: 1 where a token is kept, else 0. Any shape, kept; `uniforms` in [0, 1)."""
    return (uniforms < acceptance).to(acceptance.dtype)


def exact_z(rollout_log_probs: Tensor, target_log_probs: Tensor, lam: float = 1.0) -> Tensor:
    """Z = sum of min(p_inf, p_target / lam) over the whole vocabulary: [..., V] -> [...]."""
    return torch.minimum(rollout_log_probs, target_log_probs - math.log(lam)).exp().sum(-1)


def topk_z(
    rollout_top_ids: Tensor,
    rollout_top_log_probs: Tensor,
    policy_logits: Tensor,
    lam: float = 1.0,
    temperature: float = 1.0,
    fill_ins: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Z_approx, the same sum over the top k of both models (section 4.4.1): [...] float32, a lower bound of Z.

    Args:
        rollout_top_ids: [..., K] int64, as the engine sampled; any id of the vocabulary where it named fewer.
        rollout_top_log_probs: [..., K] of these tokens; -inf where it named fewer.
        policy_logits: [..., V], not yet divided by the temperature.
        fill_ins: gives log p_inf, [..., K], of the policy's top k, ids [..., K], by a forward pass of the very weights
            that sampled. None where there is no such pass: then the sum is over the sampler's top k alone.
    """
    scaled = policy_logits.float() / temperature
    normalizer = scaled.logsumexp(-1, keepdim=True)
    z = exact_z(rollout_top_log_probs.float(), scaled.gather(-1, rollout_top_ids) - normalizer, lam)
    if fill_ins is None:
        return z

    top, top_ids = scaled.topk(rollout_top_ids.shape[-1], dim=-1)
    named = torch.where(rollout_top_log_probs.isneginf(), -1, rollout_top_ids)
    is_new = (top_ids.unsqueeze(-1) != named.unsqueeze(-2)).all(-1)  # [..., K], in the policy's top k alone
    return z + exact_z(fill_ins(top_ids).where(is_new, -torch.inf), top - normalizer, lam)


def kappa(acceptance: Tensor, z: Tensor, mask: Tensor) -> Tensor:
    """kappa = sum of a / sum of Z over the tokens of a whole optimizer step (section 4.4.2), a float64 scalar.

    The paper divides the share of accepted tokens; their expectation a has the same mean and less variance.

    Args:
        acceptance, z, mask: [B, T] each, of all micro-batches and ranks. Else add up both sums over them.
    """
    total, z_total = (torch.where(mask, column.double(), 0.0).sum() for column in (acceptance, z))
    return torch.where(z_total > 0, total / z_total.clamp(min=torch.finfo(torch.float64).tiny), 1.0)


def obrs(
    rollout_log_probs: Tensor,
    target_log_probs: Tensor,
    z: Tensor,
    mask: Tensor,
    uniforms: Tensor | None = None,
    lam: float = 1.0,
    c1: float = 3.0,
    z_is_exact: bool = False,
) -> tuple[Tensor, Tensor]:
    """Weights min(kappa Z max(lam, rho), c1) and the mask of accepted tokens (eq. 5, Algorithm 1): [B, T] each.

    Multiply PPO's surrogate by both, and divide by all sampled tokens, rejected ones included. PPO's ratio starts at
    p_target; where it starts at another p_proximal, the weight has the factor min(p_proximal / p_target, c2) too.

    Args:
        rollout_log_probs: [B, T] log p_inf of the sampled tokens, as the engine sampled them.
        target_log_probs: [B, T] log p_target of the same tokens: the policy's before the update.
        z: [B, T] of `topk_z`, or of `exact_z`, whose mean needs no kappa: `z_is_exact`.
        mask: [B, T] bool, True where the rollout model sampled a token; 0 in both results elsewhere.
        uniforms: [B, T] in [0, 1); None for the expected mask.
    """
    accepted = acceptance(rollout_log_probs, target_log_probs, lam)
    if not z_is_exact:
        z = (kappa(accepted, z, mask) * z.double()).to(rollout_log_probs.dtype)

    log_ratio = target_log_probs - rollout_log_probs
    weights = (z.log() + log_ratio.clamp(min=math.log(lam))).exp().clamp(max=c1)
    accepted = accepted if uniforms is None else sampled_mask(accepted, uniforms)
    return weights.where(mask, 0.0), accepted.where(mask, 0.0)
