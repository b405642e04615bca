"""PPO's surrogate and value loss, how token losses are aggregated, distillation, and KL estimates of the reference.

One surrogate serves all corrections: a correction is (weights, accept_mask) plus the proximal point that the ratio is
taken from. Shapes: `B` sequences, `T` response tokens, `N` response tokens in one row; log-probs in nats.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from jackpot.objectives.kernels.linear_head import JointOutput


def clipped_surrogate(
    log_probs: Tensor, proximal_log_probs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = p_new / p_proximal, PPO, arXiv 1707.06347 eq. 7.

    Training maximizes it. With infinite clips it is r A. Where the proximal point is the detached current policy, r is
    1 and its gradient is A times that of log p_new: the clip then has no effect.

    Args:
        log_probs: [B, T] current policy, carries the gradient; nats.
        proximal_log_probs: [B, T] detached.
        advantages: [B, T] detached.
        clip_low, clip_high: at least 0; math.inf for no clip.
    """
    ratio = (log_probs - proximal_log_probs.detach()).exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.minimum(ratio * advantages, clipped * advantages)


def clip_share(
    log_probs: Tensor, proximal_log_probs: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """True where the clip removes the gradient, [B, T]: r > 1 + clip_high and A > 0, or r < 1 - clip_low and A < 0."""
    ratio = (log_probs - proximal_log_probs).detach().exp()
    return ((ratio > 1.0 + clip_high) & (advantages > 0)) | ((ratio < 1.0 - clip_low) & (advantages < 0))


def clipped_value_error(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2 of a critic, as PPO2 and verl: [B, T].

    The second tensor is True where the clip removes the gradient: [B, T].

    Args:
        values: [B, T] carries the critic's gradient.
        old_values: [B, T] detached, before the first update on the batch.
        returns: [B, T] detached, of `advantages.gae`.
        clip: above 0; math.inf for no clip.
    """
    clipped = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    free, held = (values - returns).square(), (clipped - returns).square()
    return 0.5 * torch.maximum(free, held), (held > free).detach()


# An aggregate turns token losses [B, T] into (numerator, denominator), both scalars that add up over micro-batches and
# ranks. `counted` [B, T] is the weight of each token in the denominator: the response mask, the acceptance mask, or
# a(x). A sequence is never split between micro-batches. `max_length` is the sampling limit on T.


def _token_mean(losses: Tensor, counted: Tensor, max_length: int) -> tuple[Tensor, Tensor]:
    """Average over all tokens, DAPO, arXiv 2503.14476 eq. 12."""
    return losses.sum(), counted.sum()


def _seq_mean_token_mean(losses: Tensor, counted: Tensor, max_length: int) -> tuple[Tensor, Tensor]:
    """Average over the tokens of a sequence, then over the sequences with counted tokens, GRPO, arXiv 2402.03300."""
    counts = counted.sum(-1)
    present = counts > 0
    return torch.where(present, losses.sum(-1) / torch.where(present, counts, 1.0), 0.0).sum(), present.sum()


def _seq_mean_token_sum_norm(losses: Tensor, counted: Tensor, max_length: int) -> tuple[Tensor, Tensor]:
    """Divide the sum by sequences x max_length, a constant, Dr. GRPO, arXiv 2503.20783."""
    return losses.sum(), losses.new_tensor(float(losses.shape[0] * max_length))


Aggregate = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
LOSS_AGG_MODES: dict[str, Aggregate] = {
    "token-mean": _token_mean,
    "seq-mean-token-mean": _seq_mean_token_mean,
    "seq-mean-token-sum-norm": _seq_mean_token_sum_norm,
}

DISTILLATIONS: dict[str, Callable[[JointOutput], Tensor]] = {
    "forward": lambda head: head.forward_kl,  # KL(SG(p_new) || p_omega) [N], eq. 7 as printed
    "reverse": lambda head: head.reverse_kl,  # KL(p_omega || SG(p_new)) [N]
}


def k2(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """(log p - log p_reference)^2 / 2 of sampled tokens; on the policy's own rollouts its gradient is the KL's."""
    return 0.5 * (log_probs - reference_log_probs).square()


def k3(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """r - 1 - log r with r = p_reference / p of sampled tokens, never negative; GRPO's, arXiv 2402.03300 eq. 4."""
    log_ratio = reference_log_probs - log_probs
    return log_ratio.exp() - 1.0 - log_ratio


SAMPLED_KL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k2": k2, "k3": k3}
