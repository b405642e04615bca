"""Settings of tasks: one class each, chosen by name. Layer 0: pydantic only."""

from jackpot.config_base import Finite, Strict


class RewardConfig(Strict):
    """One part of a reward; the parts are summed (docs/rewards.md)."""

    name: str  # correct, format, or package.module:function
    weight: Finite = 1.0
