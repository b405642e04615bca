"""What a rule about a metric is, and the limits that depend on the run."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from jackpot.config.engines import is_quantized
from jackpot.config.run import Config
from jackpot.training.guards import LARGEST_GAPS

LEAST = 5  # values before a smoothed one means anything

Series = list[tuple[int, float]]  # iteration and value
_PREFIX_ESS = re.compile(r"mismatch/prefix_ess_at_(\d+)")


class History:
    """The lines of metrics.jsonl, and what is derived from them and from events.jsonl:

    mismatch/prefix_ess: at the positions that the middle of a mean response is among
    events/NAME: how many events of that name there were in the newest tenth of the iterations, at each of them
    """

    def __init__(self, lines: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]], config: Config) -> None:
        self.config = config
        self._lines = [dict(line) | _prefix_ess(line) for line in lines]
        self._events = events

    def series(self, metric: str, over: str | None = None, after_steps: int = 0) -> Series:
        """Where it is not null: the metric, divided by the metric `over`, after so many optimizer steps."""
        if metric.startswith("events/"):
            newest = self._lines[-1]["iteration"] if self._lines else 0
            recent = newest - max(LEAST, newest // 10)
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

    def window(self, values: Sequence[float]) -> int:
        """How many values are smoothed over: a tenth of them, and LEAST at least."""
        return max(LEAST, len(values) // 10)


def _prefix_ess(line: Mapping[str, Any]) -> dict[str, float | None]:
    middle = (line.get("response/tokens") or 0.0) / 2
    begins = {int(match[1]): name for name in line if (match := _PREFIX_ESS.match(name))}
    reached = [begin for begin in begins if begin <= middle]
    return {"mismatch/prefix_ess": line[begins[max(reached)]]} if reached else {}


QUANTIZED_GAP = 2e-2  # mean |p_engine - p_training|; below it no correction mattered, docs/quantised.md

Group = Literal["bug", "precision", "signal", "mismatch", "correction", "models", "length", "disk"]
Values = Sequence[float]
Limit = float | Callable[[History, Values], float | None]  # None: the rule does not apply


def latest(values: Values) -> float:
    return values[-1]


def rise(values: Values) -> float:
    """Over the window, of a total over the run."""
    return values[-1] - values[0]


def rounding(history: History, values: Values) -> float | None:
    """What number formats may make of a probability, on average."""
    engine, precision = history.config.engine, history.config.precision
    return None if is_quantized(engine) else max(LARGEST_GAPS[engine.dtype], LARGEST_GAPS[precision])


def quantizing(history: History, values: Values) -> float | None:
    """What fewer bits may make of a probability, on average. `guards` lets a run go on beyond it."""
    return QUANTIZED_GAP if is_quantized(history.config.engine) else None


def above_start(least: float, factor: float) -> Limit:
    """`factor` times what the metric was at the start, and `least` at least."""
    return lambda history, values: max(least, factor * _start(history, values))


def below_start(most: float, factor: float) -> Limit:
    """`factor` times what the metric was at the start, and `most` at most."""
    return lambda history, values: min(most, factor * _start(history, values))


def below_first(history: History, values: Values) -> float:
    """As far below the first evaluation as chance goes."""
    return values[0] - two_errors(history.config.evaluation.problems, values[0])


def above_first_alone(history: History, values: Values) -> float | None:
    """As far above the first evaluation as chance goes, where the policy has fallen that far below its own."""
    policy = [value for _, value in history.series("eval/policy_accuracy")]
    by_chance = two_errors(history.config.evaluation.problems, values[0])
    return values[0] + by_chance if policy[-1] < below_first(history, policy) else None


def all_rounds(history: History, values: Values) -> float | None:
    dynamic = history.config.batch.filter_groups
    return dynamic.max_num_gen_batches - 1 if dynamic else None


def both_parts(limit: float) -> Limit:
    """Where the rollout model learns from reward and from distillation."""

    def of(history: History, values: Values) -> float | None:
        model = history.config.rollout_model
        return limit if model and model.ppo_weight and model.distill_weight else None

    return of


def _start(history: History, values: Values) -> float:
    return median(values[: history.window(values)])


def two_errors(problems: int, accuracy: float) -> float:
    """Two standard errors of the difference between two evaluations on so many problems.

    With two more right and two more wrong answers: none are wrong in a small evaluation by chance as well.
    """
    share = (accuracy * problems + 2) / (problems + 4)
    return 2.0 * math.sqrt(2.0 * share * (1.0 - share) / (problems + 4))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Sick is below `low` or above `high`."""

    group: Group
    metric: str
    over: str | None = None  # the rule is about metric / over
    low: Limit = -math.inf
    high: Limit = math.inf
    see: Callable[[Values], float] = median  # of the values in the window
    after_steps: int = 0  # optimizer steps before the metric means anything
    means: str
    tries: str

    @property
    def name(self) -> str:
        return f"{self.metric} / {self.over}" if self.over else self.metric

    @property
    def needs_many(self) -> bool:
        """Whether a single value says nothing."""
        return self.see is median

    def limits(self, history: History, values: Values) -> tuple[float, float]:
        """Low and high, for these values of the metric."""
        low, high = (limit(history, values) if callable(limit) else limit for limit in (self.low, self.high))
        return -math.inf if low is None else low, math.inf if high is None else high
