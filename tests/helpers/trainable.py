"""What every line of a run that trains has."""

import math

from jackpot.training.trainer import MetricsLine


def learned(line: MetricsLine) -> None:
    """Assert that the iteration of this line wrote text that was not all worth the same, and stepped on it."""
    assert line["tokens/rollout"] > 0
    assert line["policy/skipped_steps"] < 1.0 and line["policy/grad_norm"] > 0.0
    assert math.isfinite(line["policy/loss"]) and math.isfinite(line["reward/mean"])
