"""The collapse of a run: whether, when and why it happened."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jackpot.analysis.diagnose.diagnose import diagnose
from jackpot.config.config import Config
from jackpot.training.limits import Fall, evaluations, fall_of, problems_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Collapse:
    """The collapse of a run: when, how far the policy fell, and why."""

    iteration: int  # iteration of the first low evaluation, or at which the run stopped itself
    accuracy: float  # accuracy of the policy in that evaluation
    best: float  # highest accuracy of the policy before that evaluation
    first_sign: str  # earliest unhealthy metric and its first unhealthy iteration; empty if no metric is unhealthy
    why: str  # why the run collapsed, a phrase for tables

    @property
    def sentence(self) -> str:
        """Return text that says why the run collapsed, with the first sign of the collapse if there was one."""
        return self.why + (f"; first sign: {self.first_sign}" if self.first_sign else "")


def collapse_of(
    lines: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]], config: Config
) -> Collapse | None:
    """Return when and why a run collapsed; None for a run that did not collapse.

    A run has collapsed if its evaluations fell too far (`fall_of`), or if one of its guards stopped the run.

    Args:
        lines: records of metrics.jsonl, in their order.
        events: records of events.jsonl.
        config: settings of the run.
    """
    evaluated = evaluations(lines)
    fall = fall_of(evaluated, problems_of(lines, config))
    stopped = next((event for event in events if event["event"] == "stopped"), None)
    if stopped and not fall:  # a run that a guard stopped counts as collapsed, whatever its evaluations say
        accuracies = [accuracy for _, accuracy in evaluated] or [0.0]
        why = f"stopped itself: {stopped['why']}"
        fall = Fall(iteration=stopped["iteration"], accuracy=accuracies[-1], best=max(accuracies))
    elif fall:
        why = fall.why
    else:
        return None

    findings = diagnose(lines, events, config).findings
    first = min(findings, key=lambda finding: finding.since, default=None)
    return Collapse(
        iteration=fall.iteration,
        accuracy=fall.accuracy,
        best=fall.best,
        first_sign=f"{first.metric} since {first.since}" if first else "",
        why=why,
    )
