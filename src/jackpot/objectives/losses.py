"""PPO's surrogate and its relatives, the value loss, aggregates of token losses, distillation, and KL estimates.

Every surrogate serves all corrections: a correction is (weights, accept_mask) plus the proximal point that the ratio is
taken from. Shapes: `B` sequences, `T` response tokens, `N` response tokens in one row; log-probs in nats.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from jackpot.objectives.kernels.linear_head import JointOutput


class Surrogate(NamedTuple):
    """Each token's objective, which training maximizes, and where a clip changed the token's gradient: [B, T] each."""

    value: Tensor  # the objective S, carries the gradient of the policy
    clipped: Tensor  # bool, True where the clip changed the gradient


# A surrogate function computes the objective S of every token from the arguments of `clipped_surrogate`.
# The gradient of a token's S is a factor times that of the token's own log p_new, so that a correction can weigh or
# reject the token alone; the factor may depend on the whole response, rejected tokens included. S does not depend on
# the correction, as `training.kappa.KappaRepair` requires. SG is the stop-gradient.


def clipped_surrogate(
    log_probs: Tensor, proximal: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float
) -> Surrogate:
    """Compute min(r A, clip(r, 1 - low, 1 + high) A), r = p_new / p_proximal, PPO, arXiv 1707.06347 eq. 7.

    With infinite clips it is r A. Where the proximal point is the detached current policy, r is 1, the clip has no
    effect, and the gradient is A times that of log p_new. `clipped` is True where the clip removes the gradient.

    Args:
        log_probs: [B, T] current policy, carries the gradient; nats.
        proximal: [B, T] detached.
        advantages: [B, T] detached.
        mask: [B, T] response mask, which PPO does not read.
        low, high: widths of the band around 1 that r is clipped to, at least 0; math.inf for no clip.
    """
    return _clipped((log_probs - proximal.detach()).exp(), advantages, low, high)


def _gspo(log_probs: Tensor, proximal: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float) -> Surrogate:
    """Compute min(s A, clip(s) A), s the geometric mean of r = p_new / p_proximal over a response's sampled tokens.

    GSPO-token, arXiv 2507.18071 section 4.3: s_t = SG(s) p_new / SG(p_new), SG the stop-gradient, has the value s and
    the gradient of SG(s) log p_new of the token. Averaged over a response whose tokens have one advantage, value and
    gradient are those of GSPO, eq. 5.
    verl's `gspo` is the same with log s_t cut at 10 (verl/trainer/ppo/core_algos.py, commit b178a3c). `clipped` is True
    where the clip removes the gradient: on all tokens of a response or on none.
    """
    # s_t is a product. The first factor, a mean over a response's tokens, is its value. The second is always 1 and has
    # the gradient of log p_new.
    ratio = _mean((log_probs - proximal).detach(), mask).exp() * _unit_ratio(log_probs)
    return _clipped(ratio, advantages, low, high)


def _gmpo(log_probs: Tensor, proximal: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float) -> Surrogate:
    """Compute A times the geometric mean of a response's r = p_new / p_proximal, each clipped as in PPO by A's sign.

    GMPO, arXiv 2507.20673 (its code: callsys/GMPO, train_zero_math_gmpo.py, commit 1f7b092; verl's `geo_mean`), written
    for single tokens as in `_gspo`: the value is that of the response; a token's gradient goes through its own
    log p_new, and is removed where its own ratio is clipped. Averaged over a response, both are those of the paper.
    """
    log_ratio = (log_probs - proximal).detach()
    floor = math.log1p(-low) if low < 1.0 else -math.inf  # log of the least ratio, 1 - low, if that is above 0
    # As in PPO, the lower bound holds where A < 0, and the upper bound where A > 0.
    bounded = torch.where(advantages < 0, log_ratio.clamp(min=floor), log_ratio)
    bounded = torch.where(advantages > 0, log_ratio.clamp(max=math.log1p(high)), bounded)
    clipped = bounded != log_ratio
    # The geometric mean, without gradient, times a 1 that has the gradient of log p_new; clipped tokens get none.
    ratio = _mean(bounded, mask).exp() * torch.where(clipped, 1.0, _unit_ratio(log_probs))
    return Surrogate(ratio * advantages, clipped)


def _cispo(log_probs: Tensor, proximal: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float) -> Surrogate:
    """Compute SG(clip(r, 1 - low, 1 + high)) A log p_new, r = p_new / p_proximal: no bound removes a gradient.

    CISPO, arXiv 2506.13585 eqs. 4 and 5; SG is the stop-gradient. verl's `cispo` is the same with log r cut at +-20
    (core_algos.py, commit b178a3c); TRL's bounds r from above alone, at `epsilon_high` itself (grpo_trainer.py, commit
    f2cd577). `clipped` is True where the bounds change r.
    """
    ratio = (log_probs - proximal).detach().exp()
    bounded = ratio.clamp(1.0 - low, 1.0 + high)
    return Surrogate(bounded * advantages * log_probs, bounded != ratio)


def oapl(
    log_probs: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    low: float,
    high: float,
    beta: float = 1.0,
) -> Surrogate:
    """Compute -(beta log R - A)^2 / (2 beta), R = p_new / p_proximal of a response, in equal parts for its tokens.

    OAPL, arXiv 2602.19362: with the sampler as the proximal point and A from `advantages.oapl`, this regresses
    beta log p_new / p_inf of the response on the optimal advantage, without any importance ratio. The optimum is
    p_new = p_inf e^(r / beta) / sum p_inf e^(r / beta), with the reward r. The factor 1 / (2 beta) is ours: with it
    the gradient's factor is A minus beta log R, of the size of the other surrogates'. Nothing is clipped: `low` and
    `high` are not read.
    """
    log_ratio = torch.where(mask, log_probs - proximal, 0.0).detach()
    residual = advantages - beta * log_ratio.sum(-1, keepdim=True)
    value = -residual.square() / mask.sum(-1, keepdim=True).clamp(min=1) / (2.0 * beta)
    # The second term is 0 and gives each token its gradient, residual * d log p_new.
    return Surrogate(value + residual * (log_probs - log_probs.detach()), torch.zeros_like(mask))


SurrogateFn = Callable[[Tensor, Tensor, Tensor, Tensor, float, float], Surrogate]
SURROGATES: dict[str, SurrogateFn] = {
    "ppo": clipped_surrogate,
    "gspo": _gspo,
    "gmpo": _gmpo,
    "cispo": _cispo,
    "oapl": oapl,
}


def _clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Surrogate:
    """Return min(r A, clip(r) A), PPO's clipped objective of the ratios r, and where the clip removes the gradient."""
    bound = ratio.detach().clamp(1.0 - clip_low, 1.0 + clip_high)
    clipped = ((ratio > 1.0 + clip_high) & (advantages > 0)) | ((ratio < 1.0 - clip_low) & (advantages < 0))

    # Not torch.minimum of the two: where r is exactly a bound, versions of torch differ in the gradient of clamp.
    return Surrogate(torch.where(clipped, bound * advantages, ratio * advantages), clipped)


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the sampled tokens of each response, [B, 1]; 0 for a response without sampled tokens."""
    return torch.where(mask, values, 0.0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def _unit_ratio(log_probs: Tensor) -> Tensor:
    """Return p_new / stop_gradient(p_new), which is 1 and has the gradient of log p_new: [B, T]."""
    return (log_probs - log_probs.detach()).exp()


def clipped_value_error(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Compute a critic's loss, max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2, as PPO2 and verl.

    Args:
        values: [B, T] carries the critic's gradient.
        old_values: [B, T] detached, before the first update on the batch.
        returns: [B, T] detached, of `advantages.gae`.
        clip: above 0; math.inf for no clip.

    Returns:
        The loss of every token, and a bool that is True where the clip removes its gradient: [B, T] each.
    """
    clipped = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    free, held = (values - returns).square(), (clipped - returns).square()  # errors of V, and of V held near V_old
    return 0.5 * torch.maximum(free, held), (held > free).detach()


# An aggregate turns token losses [B, T] into (numerator, denominator), two scalars that add up over micro-batches and
# ranks. `counted` [B, T] is the weight of each token in the denominator: the response mask, the acceptance mask, or
# the acceptance probability a(x). A sequence is never split between micro-batches. `max_length` limits T.


def _token_mean(losses: Tensor, counted: Tensor, max_length: int) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses and the number of counted tokens, to be divided: DAPO, arXiv 2503.14476 eq. 12."""
    return losses.sum(), counted.sum()


def _seq_mean_token_mean(losses: Tensor, counted: Tensor, max_length: int) -> tuple[Tensor, Tensor]:
    """Return the sum of the sequences' mean losses, and the number of sequences: GRPO, arXiv 2402.03300.

    A sequence's mean is its sum of losses divided by its number of counted tokens; a sequence without counted tokens
    is left out of both.
    """
    counts = counted.sum(-1)
    present = counts > 0
    return torch.where(present, losses.sum(-1) / torch.where(present, counts, 1.0), 0.0).sum(), present.sum()


def _seq_mean_token_sum_norm(losses: Tensor, counted: Tensor, max_length: int) -> tuple[Tensor, Tensor]:
    """Return the sum of the losses, and a constant divisor, sequences x max_length: Dr. GRPO, arXiv 2503.20783."""
    return losses.sum(), losses.new_tensor(float(losses.shape[0] * max_length))


Aggregate = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
LOSS_AGG_MODES: dict[str, Aggregate] = {
    "token-mean": _token_mean,
    "seq-mean-token-mean": _seq_mean_token_mean,
    "seq-mean-token-sum-norm": _seq_mean_token_sum_norm,
}

Distillation = Callable[[JointOutput], Tensor | None]  # returns None where the head computed log-probs only
DISTILLATIONS: dict[str, Distillation] = {
    "forward": lambda head: head.forward_kl,  # KL(detached policy || rollout model), [N]: eq. 7 of the Jackpot paper
    "reverse": lambda head: head.reverse_kl,  # KL(rollout model || detached policy), [N]: the other direction
}


def k2(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """Return (log p - log p_reference)^2 / 2; over tokens sampled from p, its mean gradient is that of
    KL(p || p_reference)."""
    return 0.5 * (log_probs - reference_log_probs).square()


def k3(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """Return r - 1 - log r, r = p_reference / p: GRPO's estimate of KL(p || p_reference), arXiv 2402.03300 eq. 4."""
    log_ratio = reference_log_probs - log_probs
    return log_ratio.exp() - 1.0 - log_ratio


SAMPLED_KL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k2": k2, "k3": k3}
