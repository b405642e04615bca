"""What the rule looks at. Layer 6, pure."""

from dataclasses import dataclass

from jackpot.lab.replay.settings import Setting


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """One correction on all responses, or on half of them."""

    setting: Setting
    misplaced: float  # of what is trained on, the probability on other tokens than the policy's
    effective: float  # share of tokens
    known: float  # share of tokens over whose whole distributions the sums go; 0: sampled tokens alone
