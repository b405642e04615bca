"""The diagnosis of a run: what is wrong, since when and by which metric, from all `RULES`.

Status: supported.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jackpot.analysis.diagnose.causes import ENGINE_GAP, LOOKS, NOTHING, SAME
from jackpot.analysis.diagnose.learning import why_nothing, why_unknown
from jackpot.analysis.diagnose.limits import LEAST_VALUES, Group, MetricHistory, Rule
from jackpot.analysis.diagnose.rules import RULES
from jackpot.config.config import Config

_SETTING = re.compile(rf"\b(?:{'|'.join(Config.model_fields)})(?:\.[a-z_]\w*)+")  # a setting's path in a suggestion


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A metric of a run that is beyond the limit of a rule.

    The values are aggregates over windows of iterations, as the rule defines them.
    """

    group: Group
    metric: str
    since: int  # the iteration from which on the value stays beyond the limit
    then: float  # the value at `since`
    now: float  # the newest value
    side: Literal["above", "below"]
    limit: float
    explanation: str  # what is wrong
    suggestion: str  # what to do, the likeliest remedy first; names only settings that the run has
    source: str  # where the limit comes from
    look: str  # what to look at; RUN stands for the run's folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """The verdict on a run, with the metrics beyond their limits and the metrics that were judged."""

    verdict: Literal[
        "no finding", "unhealthy", "too early"
    ]  # too early: no finding, fewer than LEAST_VALUES iterations
    iteration: int  # the newest iteration in the metrics
    findings: tuple[Finding, ...]  # causes before their symptoms
    looked_at: tuple[str, ...]  # metrics that at least one rule judged
    not_looked_at: dict[str, str]  # metrics that no rule judged, each with the reason
    explained: dict[str, str]  # metrics beyond a limit that are no finding, each with the settings that explain it
    summary: str  # the diagnosis as text: one paragraph, or several lines for an unhealthy run

    @property
    def coverage(self) -> tuple[str, ...]:
        """Return a sentence on the metrics that were judged, then one for each reason why others were not judged."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in self.not_looked_at.items():
            by_reason.setdefault(reason, []).append(name)

        unseen = (f"Not looked at, {reason}: {', '.join(names)}." for reason, names in by_reason.items())
        return f"Looked at: {', '.join(self.looked_at) or 'nothing'}.", *unseen


def diagnose(
    lines: Sequence[Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]],
    config: Config,
    saved: Sequence[Mapping[str, Any]] = (),
) -> Diagnosis:
    """Apply every rule to the metrics, events and saved rollouts of a run.

    Args:
        lines: records of metrics.jsonl, in their order.
        events: records of events.jsonl.
        config: settings of the run.
        saved: signs from saved rollouts, as `read_saved` returns them.
    """
    history = MetricHistory(lines, events, config, saved)
    judged = [(rule.name, _judge(rule, history)) for rule in RULES]
    # A judgement is `unseen` where the rule could not judge, for example for want of values.
    looked_at = tuple(dict.fromkeys(name for name, judgement in judged if not judgement.unseen))
    explained = {name: judgement.explained for name, judgement in judged if judgement.explained}

    # Of the findings about a metric only the first counts, since the rules are in causal order.
    by_metric: dict[str, Finding] = {}
    for name, judgement in judged:
        if judgement.finding:
            by_metric.setdefault(name, judgement.finding)
    findings = tuple(by_metric.values())

    summary = _unhealthy(findings) if findings else _no_finding(history, len(looked_at), explained)
    # With quantized training, name the layers that engine and training compute differently, if no finding does.
    if config.trained_quantization and (layers := history.computed_differently()) and layers not in summary:
        summary += f" Engine and training are not in one flow, as precision {config.precision} asks{layers}."

    healthy = "no finding" if history.iteration >= LEAST_VALUES else "too early"
    return Diagnosis(
        verdict="unhealthy" if findings else healthy,
        iteration=history.iteration,
        findings=findings,
        looked_at=looked_at,
        not_looked_at={name: judgement.unseen for name, judgement in judged if name not in looked_at},
        explained=explained,
        summary=summary,
    )


class _Judgement(NamedTuple):
    """The judgement of a run by one rule: a finding, or the reason why there is none.

    All fields are empty if the run keeps the limit.
    """

    finding: Finding | None = None
    explained: str = ""  # the settings that explain a value beyond the limit
    unseen: str = ""  # why the rule could not judge


def _judge(rule: Rule, history: MetricHistory) -> _Judgement:
    """Judge a run by one rule: find the iteration since which the metric is beyond the limit and unexplained.

    A metric that is beyond the limit once it has enough values counts as beyond the limit since its first value.
    """
    series = history.series(rule.metric, rule.over, rule.after_steps)
    values = [value for _, value in series]
    least = LEAST_VALUES if rule.needs_many else 1

    if rule.metric.startswith("events/") and not values:
        return _Judgement()
    if len(values) < least:
        return _Judgement(unseen="for want of iterations" if values else "without a value in this run")
    low, high = rule.limits(history, values)
    if low == -math.inf and high == math.inf:
        return _Judgement(unseen="for its limit does not apply")

    # Go back from the newest window of values until one has a value within the limits, or one that settings explain.
    window = history.window(values)
    beyond: list[tuple[int, float]] = []  # (iteration, value), newest first
    explained = ""
    for end in range(len(values), least - 1, -1):
        value = rule.aggregate(values[max(0, end - window) : end])
        if low <= value <= high:
            break
        if explained := rule.explained_by(history.config, value):
            break
        # The iteration of the window's newest value; for the run's first window, of its oldest (see the docstring).
        iteration, _ = series[end - 1 if end > least else 0]
        beyond.append((iteration, value))

    if not beyond:
        return _Judgement(explained=explained)

    since, first_value = beyond[-1]
    _, newest_value = beyond[0]

    finding = Finding(
        group=rule.group,
        metric=rule.name,
        since=since,
        then=first_value,
        now=newest_value,
        side="above" if newest_value > high else "below",
        limit=high if newest_value > high else low,
        explanation=rule.explanation + _details(rule, history),
        suggestion=_remedies(rule.suggestion, history.config),
        source=rule.source,
        look=rule.look or LOOKS[rule.group],
    )
    return _Judgement(finding=finding)


def _remedies(suggestion: str, config: Config) -> str:
    """Drop the remedies from a suggestion that name settings the run does not have; keep all if none would remain."""
    remedies = suggestion.split("; ")
    possible = [remedy for remedy in remedies if all(_has(config, path) for path in _SETTING.findall(remedy))]
    return "; ".join(possible or remedies)


def _has(config: Config, path: str) -> bool:
    """Tell whether the run has the setting at a dotted path, such as `rollout_model.share`.

    A run lacks a setting if a block that holds it is null, or of a kind without this setting.
    """
    *blocks, name = path.split(".")
    block: Any = config
    for key in blocks:
        block = getattr(block, key, None)
    return hasattr(block, name)


def _details(rule: Rule, history: MetricHistory) -> str:
    """Return text from events and settings to append to a rule's explanation; "" for most rules."""
    # For each metric a function that returns the text; only the function for this rule's metric is called. SAME names
    # the metrics that rise if the policy learns, and NOTHING begins the explanation that it has learned nothing.
    details = {
        ENGINE_GAP: history.computed_differently,
        "events/stopped": lambda: history.newest_why("stopped") + history.computed_differently(),
        "policy/skipped_steps": lambda: history.newest_why("skipped_step"),
        **dict.fromkeys(SAME, lambda: why_nothing(history) if rule.explanation.startswith(NOTHING) else ""),
    }
    return details[rule.metric]() if rule.metric in details else ""


def _no_finding(history: MetricHistory, looked_at: int, explained: Mapping[str, str]) -> str:
    """Return the summary of a run without a finding: what was judged, what settings explain, what is not known.

    Args:
        history: the run's metrics.
        looked_at: number of metrics that a rule judged.
        explained: settings that explain a value beyond its limit, by metric.
    """
    text = f"No finding: after {history.iteration} iterations {looked_at} signs were looked at, and none is there"
    if explained:
        names = (f"{name} ({settings})" for name, settings in explained.items())
        text += f" but what the settings explain: {', '.join(names)}"
    text += "."

    if history.iteration < LEAST_VALUES:
        text += f" It is too early to say more: {LEAST_VALUES} iterations are needed."
    if why := why_unknown(history):
        text += f" Whether the policy learns is not known: {why}."
    return text


def _unhealthy(findings: Sequence[Finding]) -> str:
    """Return the summary of an unhealthy run: lines on the fault, sign, remedies and evidence of the first finding."""
    cause, *symptoms = findings
    remedy, _, further_remedies = cause.suggestion.partition("; ")
    sign = f"{cause.metric} is {cause.now:.3g}, {cause.side} the limit of {cause.limit:.3g} ({cause.source})"
    if symptoms:
        sign += f"; may follow from it: {', '.join(finding.metric for finding in symptoms)}"

    lines = {
        "Unhealthy since iteration": f"{cause.since}: {cause.explanation}",
        "Sign:": sign,
        "First:": remedy,
        "Then:": further_remedies,
        "Look at:": cause.look,
    }
    return "\n".join(f"{label} {text}." for label, text in lines.items() if text)
