"""What holds the policy back beside the reward: KL to a frozen reference. Layer 2: pure.

The estimates of KL(policy || reference) of a token's state. `exact` sums over the vocabulary: no noise, and right
whoever wrote the text. The others see the sampled token alone, so their mean is a KL only on the policy's own text
(Schulman, "Approximating KL divergence"). k1 = log p - log p_reference is not here: its gradient has mean 0.
"""

from collections.abc import Callable

from torch import Tensor


def k2(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """(log p - log p_reference)^2 / 2 of sampled tokens; its gradient is that of the KL on the policy's own text."""
    return 0.5 * (log_probs - reference_log_probs).square()


def k3(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
    """r - 1 - log r with r = p_reference / p of sampled tokens, never negative; GRPO's, arXiv 2402.03300 eq. 4."""
    log_ratio = reference_log_probs - log_probs
    return log_ratio.exp() - 1.0 - log_ratio


SAMPLED_KL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k2": k2, "k3": k3}
