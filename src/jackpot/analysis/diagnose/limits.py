"""Defines what a rule about a metric is, and the limits that depend on the run."""

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
SURE = 4.0  # standard errors beyond which a difference is no chance
ROUNDING = 1e-6  # of acceptance and Z in float32
MOVED = 5e-3  # KL(p_old || p_new) of a mean step with which some ratios have left a clip of 0.2
SMALL_KL = 0.2  # KL(policy || rollout model) below which the policy cannot have a tenth of its mass on unseen tokens

MetricSeries = list[tuple[int, float]]  # (iteration, value)
_PREFIX_ESS = re.compile(r"mismatch/prefix_ess_at_(\d+)")


class MetricHistory:
    """Gives the values of a metric over a run, from the lines of metrics.jsonl, events.jsonl and saved rollouts.

    Four metrics are derived: `mismatch/prefix_ess` is the prefix ESS at the positions in the middle of a mean
    response; `obrs/acceptance_error` is |acceptance - Z| over what chance and the bounds of Z allow (`_with_error`);
    `seconds/slowest` is how many times its median the slowest phase so far took (`_with_slowest`); `events/NAME` counts
    the events of that name in the newest tenth of the iterations.

    Args:
        saved: of `read_saved`.
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
        self.iteration: int = lines[-1]["iteration"] if lines else 0  # the newest

    def series(self, metric: str, over: str | None = None, after_steps: int = 0) -> MetricSeries:
        """Return a metric where it is not null, divided by the metric `over`, from `after_steps` optimizer steps on."""
        if metric.startswith("events/"):
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
        """Return the mean |p_engine - p_training| that the guard allowed a model's engine at the newest start.

        Where it did not check that model's engine, nor one of the same settings, it is that of both dtypes on a GPU;
        so too in evaluations of a policy whose rollouts may be relaxed drafts, for the answers there are exact.
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
        """Say behind a sentence which layers the engine and training compute differently, as the newest start found
        them; "" where there are none."""
        found = [event["layers"] for event in self._events if event["event"] == "computed_differently"] or [[]]
        named = [f"{layers}: {engine} there, {training} in training" for layers, engine, training in found[-1]]
        return f". They compute differently: {'; '.join(named)}" if named else ""

    def newest(self, name: str, key: str) -> str:
        """Give what the newest event of a name says under a key, behind a sentence; "" without one."""
        found = [event[key] for event in self._events if event["event"] == name and key in event]
        return f": {found[-1]}" if found else ""

    def recent(self, metric: str) -> float:
        """Return the median of the newest values of a metric; 0 without one."""
        values = [value for _, value in self.series(metric)]
        return median(values[-self.window(values) :]) if values else 0.0

    def window(self, values: Sequence[float]) -> int:
        """Return how many values a rule aggregates: a tenth of them, and at least LEAST."""
        return max(LEAST, len(values) // 10)


def _prefix_ess(line: Mapping[str, Any]) -> dict[str, float | None]:
    middle = (line.get("response/tokens") or 0.0) / 2
    begins = {int(match[1]): name for name in line if (match := _PREFIX_ESS.match(name))}
    reached = [begin for begin in begins if begin <= middle]
    return {"mismatch/prefix_ess": line[begins[max(reached)]]} if reached else {}


def _with_error(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add `obrs/acceptance_error` to the lines that have acceptance and Z, from the LEASTth on.

    It is |mean of acceptance - Z| over the newest AVERAGED iterations, divided by SURE standard errors of that mean
    plus the mean distance of the bounds of Z: above 1, sampled tokens and top-k lists are not of one distribution.
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
    """Add `seconds/slowest` to the lines: the most times its median that a phase took so far, in one iteration.

    It counts where that cost more than DELAY seconds and DELAYED median iterations, and not where all phases were slow,
    as on a busy machine. The first iterations of a start, in which the engine is checked thoroughly, warm up.
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


PHASES = ("rollout", "score", "check", "train", "sync")  # whose time is alike in all iterations
DELAY, DELAYED, TICK = 5.0, 3.0, 1e-3  # seconds, median iterations; least median of a phase
QUANTIZED_GAP = 2e-2  # mean |p_engine - p_training|; below it no correction mattered, docs/precision.md

Group = Literal["bug", "data", "precision", "learning", "signal", "mismatch", "correction", "models", "length", "disk"]
Values = Sequence[float]
OfRun = Callable[[MetricHistory, Values], float | None]  # a limit that depends on the run; None: it does not apply
Limit = float | OfRun


def latest(values: Values) -> float:
    """Return the last value of the window."""
    return values[-1]


def increase(values: Values) -> float:
    """Return the increase of a running total across the window (last minus first value)."""
    return values[-1] - values[0]


def spread(values: Values) -> float:
    """Return the difference between the largest and the smallest value of the window."""
    return max(values) - min(values)


def rounding(metric: str) -> OfRun:
    """Return the limit of a gap, mean |p_engine - p_training|, that rounding explains.

    It does not apply where engine and training are not quantized alike.
    """

    def of(history: MetricHistory, values: Values) -> float | None:
        config, engines = history.config, _engines_of(metric, history.config)
        formats = unified_formats(config.engine)
        alike = [
            bool(formats) and unified_formats(one) == formats if config.trained_quantization else not is_quantized(one)
            for one in engines.values()
        ]
        return max(history.largest_gap(metric, *one) for one in engines.items()) if all(alike) else None

    return of


def since_later(limit: OfRun) -> OfRun:
    """Return the limit where the first value keeps it, so that what is beyond it began later; else None."""

    def of(history: MetricHistory, values: Values) -> float | None:
        most = limit(history, values)
        return most if most is not None and values[0] <= most else None

    return of


def unless_back(kind: str) -> OfRun:
    """Return how often an engine may be lost: twice, and no oftener than it came back."""
    return lambda history, values: min(2.0, float(len(history.series(f"events/{kind}_back"))))


def is_uncorrected(config: Config) -> bool:
    """Return whether nothing corrects the rollouts of another model."""
    return config.rollout_model is not None and config.objective.correction.name == "none"


def is_loose(config: Config) -> bool:
    """Return whether nothing keeps the rollout model near the policy."""
    model = config.rollout_model
    return model is not None and (model.optimizer is None or model.distill_weight == 0.0)


def where(applies: Callable[[Config], bool], limit: OfRun) -> OfRun:
    """Return the limit where it applies to the settings; else None."""
    return lambda history, values: limit(history, values) if applies(history.config) else None


def clipped(history: MetricHistory, values: Values) -> float | None:
    """Return the least share of tokens that a clip takes, where the policy moves far within an iteration."""
    objective = history.config.objective
    has_clip = objective.clip_low is not None and objective.clip_high is not None and objective.surrogate != "oapl"
    return math.ulp(1.0) if has_clip and history.recent("policy/approx_kl_k3") > MOVED else None


def quantizing(metric: str) -> OfRun:
    """Return the limit of a gap, mean |p_engine - p_training|, from which a quantized engine needs a correction."""
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
    """Return a limit of the mean ratio, `distance` from 1 and at least SURE standard errors.

    It applies where the models are close (SMALL_KL). Elsewhere much of the policy's probability can be on tokens that
    are hardly ever sampled, and then the ratios of those that are sum to less than 1.
    """

    def of(history: MetricHistory, values: Values) -> float | None:
        away = max(abs(distance), SURE * history.recent("mismatch/ratio_stderr"))
        is_close = history.recent("mismatch/kl_policy_rollout") < SMALL_KL
        return 1.0 + math.copysign(away, distance) if is_close else None

    return of


def above_start(least: float, factor: float) -> OfRun:
    """Return the limit `factor` times the metric at the start, at least `least`."""
    return lambda history, values: max(least, factor * at_start(history, values))


def below_start(most: float, factor: float) -> OfRun:
    """Return the limit `factor` times the metric at the start, at most `most`."""
    return lambda history, values: min(most, factor * at_start(history, values))


def above_first_alone(history: MetricHistory, values: Values) -> float | None:
    """Return the first accuracy plus two standard errors where the policy has fallen as much, else None."""
    policy = [value for _, value in history.series("eval/policy_accuracy")]
    has_fallen = policy[-1] < policy[0] - two_errors(history.problems, policy[0])
    return values[0] + two_errors(history.problems, values[0]) if has_fallen else None


def all_rounds(history: MetricHistory, values: Values) -> float | None:
    """Return the most generation batches of group filtering minus 1; None where groups are not filtered."""
    dynamic = history.config.batch.filter_groups
    return dynamic.max_num_gen_batches - 1 if dynamic else None


def at_start(history: MetricHistory, values: Values) -> float:
    """Return the median of the first window of values."""
    return median(values[: history.window(values)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Names a metric and its limits: a run is unhealthy where the aggregated metric is below `low` or above `high`."""

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
        """Return the name of the quantity: the metric, or the ratio of two."""
        return f"{self.metric} / {self.over}" if self.over else self.metric

    @property
    def needs_many(self) -> bool:
        """Return whether the rule needs LEAST values."""
        return self.aggregate in (median, fmean, spread)

    def limits(self, history: MetricHistory, values: Values) -> tuple[float, float]:
        """Return the low and the high limit for these values of the metric."""
        low, high = (limit(history, values) if callable(limit) else limit for limit in (self.low, self.high))
        return -math.inf if low is None else low, math.inf if high is None else high
