"""Finds what is wrong with a run, since when and by which metric, by applying `RULES` to metrics.jsonl.

Status: supported.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jackpot.analysis.diagnose.limits import LEAST, Group, MetricHistory, Rule
from jackpot.analysis.diagnose.rules import ENGINE_GAP, RULES
from jackpot.config.run import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Describes a metric beyond its limit. Values are aggregated over a window as the rule says."""

    group: Group
    metric: str
    since: int  # the first iteration from which the value stays beyond the limit
    then: float  # the value at `since`
    now: float  # the newest value
    side: Literal["above", "below"]
    limit: float
    explanation: str  # what is wrong
    suggestion: str  # which settings to change


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Holds the verdict on a run, and the metrics that are beyond their limits."""

    verdict: Literal["healthy", "unhealthy", "too early"]  # too early: no finding, fewer than LEAST iterations
    iteration: int  # the newest iteration in the metrics
    findings: tuple[Finding, ...]  # causes before their symptoms
    summary: str  # one paragraph


def diagnose(lines: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]], config: Config) -> Diagnosis:
    """Apply every rule to the metrics and events of a run.

    Args:
        lines: records of metrics.jsonl, in their order.
        events: records of events.jsonl.
        config: settings of the run.
    """
    history = MetricHistory(lines, events, config)
    findings = tuple(finding for rule in RULES if (finding := _finding(rule, history)))
    iteration = lines[-1]["iteration"] if lines else 0
    verdict = "unhealthy" if findings else "healthy" if iteration >= LEAST else "too early"
    summary = _summary(verdict, iteration, findings)
    if config.scheme and (apart := history.computed_differently()) and apart not in summary:
        summary += f" Engine and training are not in one flow, as precision {config.precision} asks{apart}."
    return Diagnosis(verdict=verdict, iteration=iteration, findings=findings, summary=summary)


def _finding(rule: Rule, history: MetricHistory) -> Finding | None:
    """Go back from the newest value to the first one from which all are beyond the limit; None where the newest is not.

    A limit that is exceeded as soon as there are enough values counts as exceeded from the first value on.
    """
    series = history.series(rule.metric, rule.over, rule.after_steps)
    values = [value for _, value in series]
    least = LEAST if rule.needs_many else 1
    if len(values) < least:
        return None
    low, high = rule.limits(history, values)
    window = history.window(values)
    beyond: list[tuple[int, float]] = []  # newest first
    for end in range(len(values), least - 1, -1):
        value = rule.aggregate(values[max(0, end - window) : end])
        if low <= value <= high:
            break
        beyond.append((series[end - 1][0] if end > least else series[0][0], value))
    if not beyond:
        return None
    (_, now), (since, then) = beyond[0], beyond[-1]
    return Finding(
        group=rule.group,
        metric=rule.name,
        since=since,
        then=then,
        now=now,
        side="above" if now > high else "below",
        limit=high if now > high else low,
        explanation=rule.explanation + _details(rule.metric, history),
        suggestion=rule.suggestion,
    )


def _details(metric: str, history: MetricHistory) -> str:
    """Return what the events say behind a rule's explanation."""
    details = {
        ENGINE_GAP: history.computed_differently,
        "events/stopped": lambda: history.why_stopped() + history.computed_differently(),
    }
    return details[metric]() if metric in details else ""


def _summary(verdict: str, iteration: int, findings: Sequence[Finding]) -> str:
    if verdict == "healthy":
        return f"Healthy: after {iteration} iterations every metric is within its limit."
    if verdict == "too early":
        return f"Too early to say: {iteration} iterations are done, and {LEAST} are needed. Nothing is wrong so far."
    cause, rest = findings[0], len(findings) - 1
    sentence = (
        f"Unhealthy since iteration {cause.since}: {cause.explanation}. {cause.metric} is {cause.now:.3g}, "
        f"{cause.side} the limit of {cause.limit:.3g}. Try: {cause.suggestion}."
    )
    further = f" {rest} further {'finding' if rest == 1 else 'findings'} may follow from it." if rest else ""
    return sentence + further
