"""Rules about metrics: the class `Rule`, the history of metrics that it reads, and limits that depend on the run."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any, Literal

from jackpot.analysis.diagnose.explained import Explained, unexplained
from jackpot.config.config import Config
from jackpot.config.engines import EngineConfig, is_quantized, unified_formats
from jackpot.core.roles import Writer
from jackpot.training.limits import LARGEST_GAPS, problems_of, two_errors

LEAST = 5  # fewest values of a metric for a median
AVERAGED = 20  # iterations over which acceptance and Z are compared
SURE = 4.0  # standard errors beyond which a difference is not by chance
ROUNDING = 1e-6  # rounding of acceptance and Z in float32
MOVED = 5e-3  # KL(p_old || p_new) of a mean step with which some ratios have left a clip of 0.2
SMALL_KL = 0.2  # KL(policy || rollout model) below which the policy cannot have a tenth of its mass on unseen tokens

MetricSeries = list[tuple[int, float]]  # (iteration, value)
_PREFIX_ESS = re.compile(r"mismatch/prefix_ess_at_(\d+)")


class MetricHistory:
    """The values of all metrics over a run, from the lines of metrics.jsonl, events.jsonl and saved rollouts.

    Four metrics are derived here: `mismatch/prefix_ess` is the prefix ESS in the middle of a mean response;
    `obrs/acceptance_error` is |acceptance - Z| over what chance and the bounds of Z allow (`_with_error`);
    `seconds/slowest` is how many times its median the slowest phase so far took (`_with_slowest`); `events/NAME` counts
    the events of that name in the newest tenth of the iterations.

    Args:
        lines: records of metrics.jsonl, in their order.
        events: records of events.jsonl.
        config: settings of the run.
        saved: signs from saved rollouts, as `read_saved` returns them.
    """

    def __init__(
        self,
        lines: Sequence[Mapping[str, Any]],
        events: Sequence[Mapping[str, Any]],
        config: Config,
        saved: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.config, self.problems = config, problems_of(lines, config)  # problems of each evaluation
        derived = _with_slowest(_with_error([dict(line) | _prefix_ess(line) for line in lines]), events)
        self._lines = [*derived, *map(dict, saved)]
        self._events = events
        self.iteration: int = lines[-1]["iteration"] if lines else 0  # newest iteration

    def series(self, metric: str, over: str | None = None, after_steps: int = 0) -> MetricSeries:
        """Return the values of a metric, as (iteration, value), without iterations that do not have it.

        Args:
            metric: name of the metric.
            over: name of a metric to divide by; None: no division.
            after_steps: optimizer steps of the run before the first value.
        """
        if metric.startswith("events/"):  # the running number of such events in the newest tenth of the iterations
            recent = self.iteration - max(LEAST, self.iteration // 10)
            those = [
                event["iteration"]
                for event in self._events
                if f"events/{event['event']}" == metric and event["iteration"] >= recent
            ]
            return [(iteration, float(count)) for count, iteration in enumerate(those, start=1)]

        steps = self.config.batch.steps_per_iteration
        return [
            (line["iteration"], line[metric] / (line[over] if over else 1.0))
            for line in self._lines
            if line.get(metric) is not None
            and (over is None or line.get(over))
            and line["iteration"] * steps >= after_steps
        ]

    def largest_gap(self, metric: str, model: Writer, engine: EngineConfig) -> float:
        """Return the largest mean |p_engine - p_training| that the guard allowed a model's engine at the newest start.

        A default takes its place where the guard checked neither that engine nor one with the same settings: the gap
        that the dtypes of engine and training allow on a GPU. It does so in evaluations too, where the limit of the
        rollouts is for inexact drafts (`draft.lam` below 1) and evaluations use exact ones.

        Args:
            metric: name of the gap.
            model: the model that the engine holds.
            engine: settings of the engine.
        """
        of_dtypes = max(LARGEST_GAPS[engine.dtype], LARGEST_GAPS[self.config.compute_dtype])
        draft = self.config.draft
        if draft and draft.lam < 1.0 and metric == "eval/policy_engine_gap":
            return of_dtypes

        checks = [event for event in self._events if "allowed" in event]
        own = [event for event in checks if event.get("model", model) == model]
        alike = checks if self.config.evaluation.engine is None else []
        return [of_dtypes, *(event["allowed"] for event in own or alike)][-1]

    def computed_differently(self) -> str:
        """Return a sentence, to follow another, about the layers that engine and training compute differently.

        It is from the newest start of the run, and "" where there are no such layers.
        """
        found = [event["layers"] for event in self._events if event["event"] == "computed_differently"] or [[]]
        named = [f"{layers}: {engine} there, {training} in training" for layers, engine, training in found[-1]]
        return f". They compute differently: {'; '.join(named)}" if named else ""

    def newest(self, name: str, key: str) -> str:
        """Return what the newest event of a name says under a key, as ": text" to follow a sentence; "" without one."""
        found = [event[key] for event in self._events if event["event"] == name and key in event]
        return f": {found[-1]}" if found else ""

    def recent(self, metric: str) -> float:
        """Return the median of a metric's newest window of values; 0 for a metric without values."""
        values = [value for _, value in self.series(metric)]
        return median(values[-self.window(values) :]) if values else 0.0

    def window(self, values: Sequence[float]) -> int:
        """Return how many of `values` a rule aggregates at a time: a tenth, and at least LEAST."""
        return max(LEAST, len(values) // 10)


def _prefix_ess(line: Mapping[str, Any]) -> dict[str, float | None]:
    middle = (line.get("response/tokens") or 0.0) / 2
    begins = {int(match[1]): name for name in line if (match := _PREFIX_ESS.match(name))}
    reached = [begin for begin in begins if begin <= middle]
    return {"mismatch/prefix_ess": line[begins[max(reached)]]} if reached else {}


def _with_error(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the metric `obrs/acceptance_error` to the lines that have acceptance and Z, from the LEASTth of them on.

    It is |mean of acceptance - Z| over the newest AVERAGED iterations, divided by SURE standard errors of that mean
    plus the mean distance of the bounds of Z. Above 1, sampled tokens and top-k lists are not of one distribution.
    """
    names = ("obrs/acceptance_minus_z", "obrs/acceptance_minus_z_stderr", "obrs/z_bound_width")
    there = [line for line in lines if all(line.get(name) is not None for name in names)]
    for end in range(LEAST, len(there) + 1):
        newest = there[max(0, end - AVERAGED) : end]
        gap, width = (fmean(line[name] for line in newest) for name in (names[0], names[2]))
        error = math.hypot(*(line[names[1]] for line in newest)) / len(newest)
        there[end - 1]["obrs/acceptance_error"] = abs(gap) / (SURE * error + width + ROUNDING)
    return lines


def _with_slowest(lines: list[dict[str, Any]], events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Add the metric `seconds/slowest` to the lines: how many times its median the slowest phase so far took.

    A slow phase counts if it cost more than DELAY seconds and DELAYED median iterations beyond its median, and not if
    all phases were slow, as on a busy machine. The first iteration of every start is left out, since the engine is
    checked thoroughly in it.
    """
    starts = {event["iteration"] for event in events if event["event"] == "engine_check"} | {1}
    timed = [line for line in lines if line["iteration"] not in starts and line.get("seconds/train")]
    usual = {phase: median([line.get(f"seconds/{phase}") or 0.0 for line in timed] or [0.0]) for phase in PHASES}
    total, slowest = sum(usual.values()), 1.0

    for line in timed:
        took = {phase: line.get(f"seconds/{phase}") or 0.0 for phase in PHASES}
        for phase, seconds in usual.items():
            others, usual_others = sum(took.values()) - took[phase], total - seconds
            if took[phase] - seconds > max(DELAY, DELAYED * total) and others < 2.0 * usual_others:
                slowest = max(slowest, took[phase] / max(seconds, TICK))
        line["seconds/slowest"] = slowest
    return lines


PHASES = ("rollout", "score", "check", "train", "sync")  # phases that take about equally long in all iterations
DELAY, DELAYED, TICK = 5.0, 3.0, 1e-3  # least delay in seconds and in median iterations; least median of a phase, s
QUANTIZED_GAP = 2e-2  # mean |p_engine - p_training| below which no correction mattered (docs/precision.md)

Group = Literal["bug", "data", "precision", "learning", "signal", "mismatch", "correction", "models", "length", "disk"]
Values = Sequence[float]
OfRun = Callable[[MetricHistory, Values], float | None]  # a limit that depends on the run; None: it does not apply
Limit = float | OfRun


def latest(values: Values) -> float:
    """Return the newest value of a window."""
    return values[-1]


def increase(values: Values) -> float:
    """Return the increase of a running total across a window: the last value minus the first."""
    return values[-1] - values[0]


def spread(values: Values) -> float:
    """Return the difference between the largest and the smallest value of a window."""
    return max(values) - min(values)


def rounding(metric: str) -> OfRun:
    """Return the limit of a gap, mean |p_engine - p_training|, up to which rounding explains it.

    The limit does not apply where engine and training are quantized differently.
    """

    def of(history: MetricHistory, values: Values) -> float | None:
        config, engines = history.config, _engines_of(metric, history.config)

        # With quantized training an engine computes alike in the same formats, else if it is not quantized.
        formats = unified_formats(config.engine)
        alike = [
            bool(formats) and unified_formats(one) == formats if config.trained_quantization else not is_quantized(one)
            for one in engines.values()
        ]
        return max(history.largest_gap(metric, *one) for one in engines.items()) if all(alike) else None

    return of


def since_later(limit: OfRun) -> OfRun:
    """Return a limit that applies only if the first value kept it, so that what is wrong began later."""

    def of(history: MetricHistory, values: Values) -> float | None:
        most = limit(history, values)
        return most if most is not None and values[0] <= most else None

    return of


def unless_back(kind: str) -> OfRun:
    """Return the limit of how often an engine may be lost: as often as it came back, and at most twice."""
    return lambda history, values: min(2.0, float(len(history.series(f"events/{kind}_back"))))


def is_uncorrected(config: Config) -> bool:
    """Return whether the rollouts are another model's and no correction is applied to them."""
    return config.rollout_model is not None and config.objective.correction.name == "none"


def is_loose(config: Config) -> bool:
    """Return whether nothing keeps the rollout model near the policy: it is frozen, or not distilled."""
    model = config.rollout_model
    return model is not None and (model.optimizer is None or model.distill_weight == 0.0)


def where(applies: Callable[[Config], bool], limit: OfRun) -> OfRun:
    """Return a limit that applies only to runs with certain settings."""
    return lambda history, values: limit(history, values) if applies(history.config) else None


def clipped(history: MetricHistory, values: Values) -> float | None:
    """Return a limit just above 0 for the share of clipped tokens, if the policy moves far within an iteration."""
    objective = history.config.objective
    has_clip = objective.clip_low is not None and objective.clip_high is not None and objective.surrogate != "oapl"
    return math.ulp(1.0) if has_clip and history.recent("policy/approx_kl_k3") > MOVED else None


def quantizing(metric: str) -> OfRun:
    """Return the limit of a quantized engine's gap, mean |p_engine - p_training|, above which it needs a correction."""
    return lambda history, values: (
        QUANTIZED_GAP if any(map(is_quantized, _engines_of(metric, history.config).values())) else None
    )


def _engines_of(metric: str, config: Config) -> dict[Writer, EngineConfig]:
    """Return the engines whose log-probs a gap compares with training's, by their models."""
    evaluated: dict[Writer, EngineConfig] = {
        "policy": config.evaluation.engine or config.engine,
        "rollout_model": config.engine,
    }
    for model, engine in evaluated.items():
        if metric == f"eval/{model}_engine_gap":
            return {model: engine}

    if config.rollout_model is None:
        return {"policy": config.engine}
    return {model: evaluated[model] for model in config.writers(1, config.iterations)}


def near_1(distance: float) -> OfRun:
    """Return a limit of the mean ratio of policy to engine, `distance` from 1 and at least SURE standard errors away.

    The limit applies where the models are close (SMALL_KL). Elsewhere much of the policy's probability can be on tokens
    that are hardly ever sampled, and the mean ratio of the sampled tokens is then below 1 in a sound run.
    """

    def of(history: MetricHistory, values: Values) -> float | None:
        away = max(abs(distance), SURE * history.recent("mismatch/ratio_stderr"))
        is_close = history.recent("mismatch/kl_policy_rollout") < SMALL_KL
        return 1.0 + math.copysign(away, distance) if is_close else None

    return of


def above_start(least: float, factor: float) -> OfRun:
    """Return a limit for a metric: `factor` times the metric at the start, but at least `least`."""
    return lambda history, values: max(least, factor * at_start(history, values))


def below_start(most: float, factor: float) -> OfRun:
    """Return a limit for a metric: `factor` times the metric at the start, but at most `most`."""
    return lambda history, values: min(most, factor * at_start(history, values))


def above_first_alone(history: MetricHistory, values: Values) -> float | None:
    """Return the rollout model's first accuracy plus two standard errors, if the policy has fallen by as much."""
    policy = [value for _, value in history.series("eval/policy_accuracy")]
    has_fallen = policy[-1] < policy[0] - two_errors(history.problems, policy[0])
    return values[0] + two_errors(history.problems, values[0]) if has_fallen else None


def all_rounds(history: MetricHistory, values: Values) -> float | None:
    """Return the limit of the generation batches: one less than group filtering may use; None without filtering."""
    dynamic = history.config.batch.filter_groups
    return dynamic.max_num_gen_batches - 1 if dynamic else None


def at_start(history: MetricHistory, values: Values) -> float:
    """Return the median of the first window of values."""
    return median(values[: history.window(values)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A metric with its limits: a run is unhealthy where the aggregated metric is below `low` or above `high`."""

    group: Group
    metric: str
    over: str | None = None  # metric by which `metric` is divided
    low: Limit = -math.inf
    high: Limit = math.inf
    explained_by: Explained = unexplained  # settings that explain a value beyond the limit
    aggregate: Callable[[Values], float] = median  # reduces the values in the window to one
    after_steps: int = 0  # optimizer steps before the rule applies
    source: str = "21 honest runs of the quickstart keep it"  # where the limit comes from
    explanation: str  # what is wrong
    suggestion: str  # what to do, the obvious first; behind each semicolon another remedy
    look: str = ""  # what to look at; empty: what `LOOKS` says of the group

    @property
    def name(self) -> str:
        """Return the name of what the rule limits: a metric, or the ratio of two metrics."""
        return f"{self.metric} / {self.over}" if self.over else self.metric

    @property
    def needs_many(self) -> bool:
        """Return whether the rule needs LEAST values."""
        return self.aggregate in (median, fmean, spread)

    def limits(self, history: MetricHistory, values: Values) -> tuple[float, float]:
        """Return the low and the high limit for these values of the metric; infinite where a limit does not apply."""
        low, high = (limit(history, values) if callable(limit) else limit for limit in (self.low, self.high))
        return -math.inf if low is None else low, math.inf if high is None else high
