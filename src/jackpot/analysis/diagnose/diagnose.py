"""What is wrong with a run, since when, by which metric: `RULES` asked of the lines of metrics.jsonl."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jackpot.analysis.diagnose.rule import LEAST, Group, History, Rule
from jackpot.analysis.diagnose.rules import RULES
from jackpot.config.run import Config


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A metric beyond its limit. Its numbers are smoothed as its rule says."""

    group: Group
    metric: str
    since: int  # the first iteration from which the value stays beyond the limit
    then: float  # the value at `since`
    now: float
    side: Literal["above", "below"]
    limit: float
    means: str
    tries: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    verdict: Literal["healthy", "sick", "too early"]  # too early: nothing wrong, and fewer than LEAST iterations
    iteration: int  # the newest one that was looked at
    findings: tuple[Finding, ...]  # causes before their symptoms
    summary: str  # one paragraph


def diagnose(lines: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]], config: Config) -> Diagnosis:
    """Ask every rule.

    Args:
        lines: of metrics.jsonl, in their order.
        events: of events.jsonl.
        config: of the run.
    """
    history = History(lines, events, config)
    findings = tuple(finding for rule in RULES if (finding := _finding(rule, history)))
    iteration = lines[-1]["iteration"] if lines else 0
    verdict = "sick" if findings else "healthy" if iteration >= LEAST else "too early"
    summary = _summary(verdict, iteration, findings)
    return Diagnosis(verdict=verdict, iteration=iteration, findings=findings, summary=summary)


def _finding(rule: Rule, history: History) -> Finding | None:
    """From the newest value back to the first from which all are beyond the limit.

    A rule that was broken as soon as there were enough values to say so, was broken from the first of them on.
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
        value = rule.see(values[max(0, end - window) : end])
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
        means=rule.means,
        tries=rule.tries,
    )


def _summary(verdict: str, iteration: int, findings: Sequence[Finding]) -> str:
    if verdict == "healthy":
        return f"Healthy: after {iteration} iterations every metric is within its limit."
    if verdict == "too early":
        return f"Too early to say: {iteration} iterations are done, and {LEAST} are needed. Nothing is wrong so far."
    cause, rest = findings[0], len(findings) - 1
    sentence = (
        f"Sick since iteration {cause.since}: {cause.means}. {cause.metric} is {cause.now:.3g}, {cause.side} the limit "
        f"of {cause.limit:.3g}. Try: {cause.tries}."
    )
    further = f" {rest} further {'finding' if rest == 1 else 'findings'} may be what follows from it." if rest else ""
    return sentence + further
