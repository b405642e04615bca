"""Decides whether and when a run has collapsed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jackpot.analysis.diagnose.diagnose import diagnose
from jackpot.analysis.diagnose.limits import two_errors
from jackpot.config.run import Config

COLLAPSED_BELOW = 0.5  # share of its best accuracy below which a policy counts as collapsed
IN_A_ROW = 2  # low evaluations that make a collapse; a single one may be chance

MetricLines = Sequence[Mapping[str, Any]]  # records of metrics.jsonl


@dataclass(frozen=True, kw_only=True, slots=True)
class Collapse:
    """Says when and why a run collapsed."""

    iteration: int  # iteration of the first low evaluation, or at which the run stopped itself
    accuracy: float  # accuracy of the policy in that evaluation
    best: float  # highest accuracy of the policy before it
    first_sign: str  # earliest unhealthy metric and its first iteration; empty without one
    why: str  # a phrase for tables


def collapse_of(lines: MetricLines, events: Sequence[Mapping[str, Any]], config: Config) -> Collapse | None:
    """Return when and why a run collapsed; None where it did not.

    A run has collapsed where in 2 evaluations in a row the policy has less than half of its best accuracy, by more than
    two standard errors, or where a guard stopped the run.

    Args:
        lines: records of metrics.jsonl, in their order.
        events: records of events.jsonl.
        config: settings of the run.
    """
    evaluated = [(line["iteration"], line["eval/policy_accuracy"]) for line in lines if _evaluated(line)]
    found = _fallen(evaluated, config.evaluation.problems)
    stopped = next((event for event in events if event["event"] == "stopped"), None)
    if found is None and stopped is None:
        return None
    if found is None:
        best = max((accuracy for _, accuracy in evaluated), default=0.0)
        found = (stopped["iteration"], evaluated[-1][1] if evaluated else 0.0, best)
        why = f"stopped itself: {stopped['why']}"
    else:
        why = f"{found[1]:.1%} right at iteration {found[0]}, after {found[2]:.1%}"
    iteration, accuracy, best = found
    return Collapse(
        iteration=iteration, accuracy=accuracy, best=best, first_sign=_first_sign(lines, events, config), why=why
    )


def _evaluated(line: Mapping[str, Any]) -> bool:
    return line.get("eval/policy_accuracy") is not None


def _fallen(evaluated: Sequence[tuple[int, float]], problems: int) -> tuple[int, float, float] | None:
    """Return iteration and accuracy of the first of IN_A_ROW low evaluations, and the best accuracy before."""
    best, since = 0.0, []
    for iteration, accuracy in evaluated:
        if accuracy < COLLAPSED_BELOW * best and accuracy < best - two_errors(problems, best):
            since.append((iteration, accuracy))
            if len(since) == IN_A_ROW:
                return (*since[0], best)
        else:
            since, best = [], max(best, accuracy)
    return None


def _first_sign(lines: MetricLines, events: Sequence[Mapping[str, Any]], config: Config) -> str:
    """Name the finding that began first and its first iteration."""
    findings = diagnose(lines, events, config).findings
    first = min(findings, key=lambda finding: finding.since, default=None)
    return f"{first.metric} since {first.since}" if first else ""
