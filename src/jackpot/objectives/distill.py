"""Which KL pulls the rollout model after the policy (eq. 7). Layer 2: pure.

The paper's introduction says reverse KL, its equation 7 is the forward one: the source is ambiguous, both exist here.
Either is the full-vocabulary KL at the sampling temperature, never truncated, and reaches the rollout model only.
"""

from collections.abc import Callable

from torch import Tensor

from jackpot.ops.linear_head import JointOutput

DISTILLATIONS: dict[str, Callable[[JointOutput], Tensor]] = {
    "forward": lambda head: head.forward_kl,  # KL(SG(p_new) || p_omega) [N], eq. 7 as printed
    "reverse": lambda head: head.reverse_kl,  # KL(p_omega || SG(p_new)) [N]
}
