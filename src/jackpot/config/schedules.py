"""Settings of two numbers that change in a run: the rollout model's share, and the weight of its distillation."""

import math
from typing import Annotated, Literal

from pydantic import Field

from jackpot.config.base import Conflicts, Count, Finite, Strict

Share = Annotated[float, Field(ge=0.0, le=1.0)]


class DistillControlConfig(Strict):
    """Settings of a controller that adapts the weight of the distillation to hold a metric at a target.

    After every step of the rollout model the weight is multiplied by 1 + error / `horizon`. The error is
    (metric - target) / target, cut to at most 0.2 above or below 0, where 1 - acceptance stands for an acceptance (the
    adaptive KL coefficient of PPO, arXiv 1909.08593, 2.2).
    """

    metric: Literal["kl", "acceptance"] = "kl"
    """What is held: KL(policy || rollout model) in nats per token (kl), or the mean acceptance probability of the
    tokens that the rollout model sampled (acceptance), each over an optimizer step."""
    target: Finite
    """Value at which the metric is held. For `acceptance` below 1, and errors are relative to 1 - target."""
    horizon: Annotated[float, Field(ge=1.0, lt=float("inf"))] = 10.0
    """Steps of the rollout model over which an error is corrected; smaller reacts faster and swings more."""
    low: Finite = 0.01
    """Smallest weight."""
    high: Finite = 100.0
    """Largest weight, which a target that cannot be reached ends at."""

    def conflicts(self) -> Conflicts:
        """Refuse a smallest weight above the largest."""
        return [
            (
                self.low > self.high,
                f"low is {self.low:g} and high is {self.high:g}; low must be at most high",
            ),
        ]


class ShareSchedule(Strict):
    """Settings of a share that changes once, or falls or rises over some iterations."""

    schedule: Literal["step", "linear", "cosine"]
    """Course of the share from `start` to `end`: at once, along a line, or along half a cosine wave."""
    start: Share = 1.0
    """Share in the iterations up to `hold`."""
    end: Share = 0.0
    """Share in the last iterations."""
    hold: Annotated[int, Field(ge=0)]
    """Last iteration with the share `start`."""
    until: Count | None = None
    """First iteration with the share `end`, of linear and cosine; step takes the one after `hold`."""

    def conflicts(self) -> Conflicts:
        """Refuse an `until` that the schedule does not read, and one that is missing or not after `hold`."""
        return [
            (
                self.until is not None and self.schedule == "step",
                f"schedule step changes after iteration hold {self.hold} and has no until; leave until out",
            ),
            (
                self.schedule != "step" and (self.until or 0) <= self.hold,  # a missing until counts as 0
                f"schedule {self.schedule} needs until, the first iteration with the share `end`, above hold "
                f"{self.hold}, and it is {self.until}; give a later one",
            ),
        ]

    def at(self, iteration: int) -> float:
        """Return the share in an iteration. Iterations count from 1."""
        if iteration <= self.hold:
            return self.start
        first_at_end = self.hold + 1 if self.until is None else self.until  # `until` is None for schedule step
        if iteration >= first_at_end:
            return self.end

        time_passed = (iteration - self.hold) / (first_at_end - self.hold)  # from 0 to 1
        # The part of the change that is done, along a straight line or half a cosine wave.
        done = time_passed if self.schedule == "linear" else 0.5 - 0.5 * math.cos(math.pi * time_passed)
        return self.start + (self.end - self.start) * done
