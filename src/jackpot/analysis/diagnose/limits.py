"""The class `Rule`, the history of a run's metrics that rules read, and limits that depend on the run."""

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

LEAST_VALUES = 5  # fewest values that a metric needs for its median to be judged
AVERAGED_ITERATIONS = 20  # number of iterations over which acceptance and Z are compared
CHANCE_ERRORS = 4.0  # standard errors beyond which a difference is not by chance
ROUNDING = 1e-6  # allowance for the rounding of acceptance and Z in float32
LARGE_STEP_KL = 5e-3  # nats; mean KL(p_old || p_new) of a step above which some ratios are outside of a clip of 0.2
SMALL_KL = 0.2  # nats; below this KL(policy || rollout model) at most 10 % of the policy's mass is on unsampled tokens
QUANTIZED_GAP = 2e-2  # mean |p_engine - p_training| below which no correction mattered (docs/precision.md)
PHASES = ("rollout", "score", "check", "train", "sync")  # phases, each of which takes about as long in every iteration
LEAST_DELAY = 5.0  # seconds; a phase is slow if it took longer than its median duration by more than this
LEAST_DELAY_ITERATIONS = 3.0  # the least delay in durations of a median iteration; the longer of the two counts
SHORTEST_MEDIAN = 1e-3  # seconds; a phase's duration is divided by its median, or by this if the median is shorter

_PREFIX_ESS = re.compile(r"mismatch/prefix_ess_at_(\d+)")


class MetricHistory:
    """The values of all metrics over a run, from metrics.jsonl, events.jsonl and saved rollouts.

    Four metrics are derived here:
    - `mismatch/prefix_ess` is the effective sample size (ESS) of prefixes' weights at half the mean response length.
    - `obrs/acceptance_error` is |acceptance - Z|, divided by what chance and the bounds of Z allow
      (`_add_acceptance_error`).
    - `seconds/slowest` is a delayed phase's duration over the phase's median, the largest so far (`_add_slowest`).
    - `events/NAME` is the running number of events of that name in the newest tenth of the iterations.

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
        """Copy the lines, and add the derived metrics and those from saved rollouts to the copies."""
        self.config = config
        self.problems = problems_of(lines, config)  # number of problems in each evaluation
        self.iteration: int = lines[-1]["iteration"] if lines else 0  # newest iteration
        self._events = events

        self._lines: list[dict[str, Any]] = [dict(line) | _prefix_ess(line) for line in lines]
        _add_acceptance_error(self._lines)
        _add_slowest(self._lines, events)
        # Signs from saved rollouts are further metrics of iterations. `series` takes a metric from lines that have it.
        self._lines += map(dict, saved)

    def series(self, metric: str, over: str | None = None, after_steps: int = 0) -> list[tuple[int, float]]:
        """Return the values of a metric as (iteration, value), for all iterations that have the metric.

        Args:
            metric: name of the metric.
            over: name of a metric to divide by, whose iterations with 0 or none are left out; None: no division.
            after_steps: number of the run's optimizer steps before which values are left out.
        """
        if metric.startswith("events/"):
            # The n-th event in the newest tenth of the iterations gives the value n, at the event's iteration.
            begin = self.iteration - max(LEAST_VALUES, self.iteration // 10)
            events = self._events_named(metric.removeprefix("events/"))
            recent = (event["iteration"] for event in events if event["iteration"] >= begin)
            return [(iteration, float(count)) for count, iteration in enumerate(recent, start=1)]

        steps = self.config.batch.steps_per_iteration
        return [
            (line["iteration"], line[metric] / (line[over] if over else 1.0))
            for line in self._lines
            if line.get(metric) is not None
            and (over is None or line.get(over))
            and line["iteration"] * steps >= after_steps
        ]

    def largest_gap(self, metric: str, model: Writer, engine: EngineConfig) -> float:
        """Return the largest mean |p_engine - p_training| that the guard allowed when it last checked a model's engine.

        The guard checks engines when a run starts or continues. If the guard checked neither that engine nor one with
        the same settings, return the gap that the dtypes of engine and training allow on a GPU. Return that gap too in
        evaluations of a run with inexact drafts (`draft.lam` below 1), since the guard's limit is for inexact drafts,
        and evaluations use exact ones.

        Args:
            metric: name of the gap metric.
            model: the model that the engine holds.
            engine: settings of the engine.
        """
        gap_of_dtypes = max(LARGEST_GAPS[engine.dtype], LARGEST_GAPS[self.config.compute_dtype])
        draft = self.config.draft
        if draft and draft.lam < 1.0 and metric == "eval/policy_engine_gap":
            return gap_of_dtypes

        checks = [event for event in self._events if "allowed" in event]
        checks_of_model = [event for event in checks if event.get("model", model) == model]
        # Without settings of its own, the engine of evaluations has those of the other engine, so all checks count.
        checks_of_equals = checks if self.config.evaluation.engine is None else []
        relevant = checks_of_model or checks_of_equals
        return relevant[-1]["allowed"] if relevant else gap_of_dtypes

    def computed_differently(self) -> str:
        """Return a sentence, to follow another, about the layers that engine and training compute differently.

        The layers are those of the newest start of the run; the sentence is "" if there are none.
        """
        # [], no layers, stands first for a run without such an event.
        newest = [[], *(event["layers"] for event in self._events_named("computed_differently"))][-1]
        texts = [f"{layers}: {engine} there, {training} in training" for layers, engine, training in newest]
        return f". They compute differently: {'; '.join(texts)}" if texts else ""

    def newest_why(self, name: str) -> str:
        """Return why the newest event of a name happened, as ": text" to append to a sentence; "" without one."""
        texts = [event["why"] for event in self._events_named(name) if "why" in event]
        return f": {texts[-1]}" if texts else ""

    def _events_named(self, name: str) -> list[Mapping[str, Any]]:
        """Return all events of a name, oldest first."""
        return [event for event in self._events if event["event"] == name]

    def recent(self, metric: str) -> float:
        """Return the median of the newest window of a metric's values; 0 for a metric without values."""
        values = [value for _, value in self.series(metric)]
        return median(values[-self.window(values) :]) if values else 0.0

    def window(self, values: Sequence[float]) -> int:
        """Return how many of `values` a rule aggregates at a time: a tenth of them, but at least LEAST_VALUES."""
        return max(LEAST_VALUES, len(values) // 10)


def _prefix_ess(line: Mapping[str, Any]) -> dict[str, float | None]:
    """Return `mismatch/prefix_ess` of an iteration: the effective sample size (ESS) of weights of prefixes.

    The prefixes, whose weights are products of importance ratios, end at the last measured position up to half the mean
    response length; {} without such a position.
    """
    middle = (line.get("response/tokens") or 0.0) / 2
    begins = {int(match[1]): name for name in line if (match := _PREFIX_ESS.match(name))}
    reached = [begin for begin in begins if begin <= middle]  # the largest of these positions is taken
    return {"mismatch/prefix_ess": line[begins[max(reached)]]} if reached else {}


def _add_acceptance_error(lines: list[dict[str, Any]]) -> None:
    """Add the metric `obrs/acceptance_error` to the lines with acceptance and Z, but for the first LEAST_VALUES - 1.

    The error is |mean of acceptance - Z| over the newest AVERAGED_ITERATIONS, divided by CHANCE_ERRORS standard errors
    of that mean plus the mean distance of the bounds of Z and ROUNDING. Above 1, sampled tokens and top-k lists are not
    of one distribution.
    """
    names = ("obrs/acceptance_minus_z", "obrs/acceptance_minus_z_stderr", "obrs/z_bound_width")
    with_z = [line for line in lines if all(line.get(name) is not None for name in names)]
    for end in range(LEAST_VALUES, len(with_z) + 1):
        newest = with_z[max(0, end - AVERAGED_ITERATIONS) : end]
        gaps, errors, widths = ([line[name] for line in newest] for name in names)
        # The standard error of a mean of n independent values is the root of their summed squared errors, over n.
        allowed = CHANCE_ERRORS * (math.hypot(*errors) / len(newest)) + fmean(widths) + ROUNDING
        with_z[end - 1]["obrs/acceptance_error"] = abs(fmean(gaps)) / allowed


def _add_slowest(lines: list[dict[str, Any]], events: Sequence[Mapping[str, Any]]) -> None:
    """Add `seconds/slowest` to the lines: the largest ratio so far of a slow phase's duration to its median, or 1.

    A phase, such as training, is slow in an iteration if it took longer than its median by more than LEAST_DELAY
    seconds and LEAST_DELAY_ITERATIONS durations of a median iteration, unless all phases were slow, as on a busy
    machine. The first iteration of every start is left out, since it checks the engine thoroughly.
    """
    starts = {event["iteration"] for event in events if event["event"] == "engine_check"} | {1}
    # Only iterations that trained: the line of iteration 0 is that of an evaluation.
    timed = [line for line in lines if line["iteration"] not in starts and line.get("seconds/train")]
    usual = {phase: median([line.get(f"seconds/{phase}") or 0.0 for line in timed] or [0.0]) for phase in PHASES}
    usual_total = sum(usual.values())  # seconds of a median iteration

    slowest = 1.0
    for line in timed:
        took = {phase: line.get(f"seconds/{phase}") or 0.0 for phase in PHASES}
        for phase, usual_seconds in usual.items():
            elsewhere = sum(took.values()) - took[phase]  # seconds of all other phases
            is_delayed = took[phase] - usual_seconds > max(LEAST_DELAY, LEAST_DELAY_ITERATIONS * usual_total)
            # If all other phases took twice as long as usual, the machine was busy.
            if is_delayed and elsewhere < 2.0 * (usual_total - usual_seconds):
                slowest = max(slowest, took[phase] / max(usual_seconds, SHORTEST_MEDIAN))
        line["seconds/slowest"] = slowest


Group = Literal["bug", "data", "precision", "learning", "signal", "mismatch", "correction", "models", "length", "disk"]
Values = Sequence[float]
RunLimit = Callable[[MetricHistory, Values], float | None]  # the limit for a given run; None: the limit does not apply
Limit = float | RunLimit


def latest(values: Values) -> float:
    """Return the newest value of a window."""
    return values[-1]


def increase(values: Values) -> float:
    """Return the increase of a running total across a window: the last value minus the first."""
    return values[-1] - values[0]


def spread(values: Values) -> float:
    """Return the difference between the largest and the smallest value of a window."""
    return max(values) - min(values)


def rounding_limit(metric: str) -> RunLimit:
    """Return a limit of a gap metric: the largest mean |p_engine - p_training| that rounding explains.

    The limit does not apply if engine and training are quantized differently.
    """

    def limit(history: MetricHistory, values: Values) -> float | None:
        """Return the largest gap that rounding explains in this run; None: engine and training quantize differently."""
        # Engine and training compute alike if neither is quantized or, in quantized training, if all engines have one
        # format in which they compute as training does.
        config, engines = history.config, _engines_of(metric, history.config)
        formats = {unified_formats(engine) for engine in (config.engine, *engines.values())}
        if config.trained_quantization:
            is_alike = len(formats) == 1 and None not in formats
        else:
            is_alike = not any(map(is_quantized, engines.values()))
        if not is_alike:
            return None

        return max(history.largest_gap(metric, model, engine) for model, engine in engines.items())

    return limit


def if_kept_at_first(limit: RunLimit) -> RunLimit:
    """Return a high limit that applies only to runs whose first value of the metric is within it.

    In these runs a later value above the limit is a fault that began after the start.
    """

    def limit_of_run(history: MetricHistory, values: Values) -> float | None:
        """Return the high limit for this run; None if the first value is above it, or if `limit` gives none."""
        high = limit(history, values)
        return high if high is not None and values[0] <= high else None

    return limit_of_run


def lost_engines_limit(kind: str) -> RunLimit:
    """Return a limit of how often an engine may be lost: as often as engines came back, but at most twice.

    Args:
        kind: kind of engine in the names of events, peer or server.
    """
    return lambda history, values: min(2.0, float(len(history.series(f"events/{kind}_back"))))


def is_uncorrected(config: Config) -> bool:
    """Tell whether another model than the policy generates, and no correction is applied to the rollouts."""
    return config.rollout_model is not None and config.objective.correction.name == "none"


def is_loose(config: Config) -> bool:
    """Tell whether nothing keeps the rollout model near the policy: the rollout model is frozen, or not distilled."""
    model = config.rollout_model
    return model is not None and (model.optimizer is None or model.distill_weight == 0.0)


def only_for(applies: Callable[[Config], bool], limit: RunLimit) -> RunLimit:
    """Restrict a limit to the runs for whose settings `applies` returns True; no limit applies to other runs."""
    return lambda history, values: limit(history, values) if applies(history.config) else None


def clip_limit(history: MetricHistory, values: Values) -> float | None:
    """Return a low limit just above 0 for the share of clipped tokens, which cannot be 0 if the policy moves far.

    None: the policy moves little in a step, or PPO has no clip on both sides.
    """
    objective = history.config.objective
    has_clip = objective.clip_low is not None and objective.clip_high is not None and objective.surrogate != "oapl"
    return math.ulp(1.0) if has_clip and history.recent("policy/approx_kl_k3") > LARGE_STEP_KL else None


def quantization_limit(metric: str) -> RunLimit:
    """Return a limit of a gap metric: the mean |p_engine - p_training| above which a correction matters.

    The limit applies to quantized engines only.
    """
    return lambda history, values: (
        QUANTIZED_GAP if any(map(is_quantized, _engines_of(metric, history.config).values())) else None
    )


def _engines_of(metric: str, config: Config) -> dict[Writer, EngineConfig]:
    """Return the settings of the engines whose log-probs a gap metric compares with training's, by model."""
    # The engine that holds each model where there are two; a policy alone generates its rollouts with `engine`.
    by_model: dict[Writer, EngineConfig] = {
        "policy": config.evaluation.engine or config.engine,
        "rollout_model": config.engine,
    }
    for model, engine in by_model.items():
        if metric == f"eval/{model}_engine_gap":
            return {model: engine}

    # Any other metric is of training rollouts: the engines of all models that generate some of them.
    if config.rollout_model is None:
        return {"policy": config.engine}
    return {model: by_model[model] for model in config.writers(1, config.iterations)}


def ratio_limit(distance: float) -> RunLimit:
    """Return a limit of the mean ratio p_policy / p_engine of the sampled tokens, which is 1 in a sound run.

    The limit is 1 + `distance`, or, where this is farther from 1, CHANCE_ERRORS standard errors from 1 in the same
    direction. It applies only if the KL of the two models is below SMALL_KL. Else much of the policy's probability can
    be on tokens that the engine hardly ever samples, and the mean ratio is below 1 in a sound run too.
    """

    def limit(history: MetricHistory, values: Values) -> float | None:
        """Return a limit of the mean ratio, above 1 for a positive `distance`, else below 1; None: KL is too large."""
        deviation = max(abs(distance), CHANCE_ERRORS * history.recent("mismatch/ratio_stderr"))
        is_close = history.recent("mismatch/kl_policy_rollout") < SMALL_KL
        return 1.0 + math.copysign(deviation, distance) if is_close else None

    return limit


def above_start(least: float, factor: float) -> RunLimit:
    """Return a high limit for a metric: `factor` times the metric's value at the start, but at least `least`."""
    return lambda history, values: max(least, factor * at_start(history, values))


def below_start(most: float, factor: float) -> RunLimit:
    """Return a low limit for a metric: `factor` times the metric's value at the start, but at most `most`."""
    return lambda history, values: min(most, factor * at_start(history, values))


def learns_alone_limit(history: MetricHistory, values: Values) -> float | None:
    """Return a limit of the rollout model's accuracy, above which that model learns while the policy unlearns.

    The limit is two standard errors above the rollout model's first accuracy. It applies only if the policy's newest
    accuracy is more than two standard errors below the policy's first one; else the result is None.
    """
    policy = [value for _, value in history.series("eval/policy_accuracy")]
    has_fallen = policy[-1] < policy[0] - two_errors(history.problems, policy[0])
    return values[0] + two_errors(history.problems, values[0]) if has_fallen else None


def generation_batches_limit(history: MetricHistory, values: Values) -> float | None:
    """Return a limit of the batches generated in an iteration: the most allowed minus 1; None without filtering."""
    filtering = history.config.batch.filter_groups
    return filtering.max_num_gen_batches - 1 if filtering else None


def at_start(history: MetricHistory, values: Values) -> float:
    """Return a metric's value at the start of the run: the median of the first window of values."""
    return median(values[: history.window(values)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A metric with its limits: a run is unhealthy if the aggregated metric is below `low` or above `high`."""

    group: Group
    metric: str
    over: str | None = None  # metric by which `metric` is divided
    low: Limit = -math.inf
    high: Limit = math.inf
    explained_by: Explained = unexplained  # settings that explain a value beyond the limit
    aggregate: Callable[[Values], float] = median  # function that makes one number of the values in a window
    after_steps: int = 0  # optimizer steps before the rule applies
    source: str = "21 honest runs of the quickstart keep it"  # where the limit comes from
    explanation: str  # what is wrong
    suggestion: str  # what to do, the obvious first; behind each semicolon another remedy
    look: str = ""  # what to look at; empty: the text of the group in `LOOKS`

    @property
    def name(self) -> str:
        """Return the name of the metric that the rule limits, or "METRIC / OVER" for a ratio of two metrics."""
        return f"{self.metric} / {self.over}" if self.over else self.metric

    @property
    def needs_many(self) -> bool:
        """Tell whether the rule needs LEAST_VALUES values of the metric, and not just one."""
        return self.aggregate in (median, fmean, spread)

    def limits(self, history: MetricHistory, values: Values) -> tuple[float, float]:
        """Return the low and the high limit of the rule's metric in a run; a limit that does not apply is infinite."""
        low, high = (limit(history, values) if callable(limit) else limit for limit in (self.low, self.high))
        return -math.inf if low is None else low, math.inf if high is None else high
