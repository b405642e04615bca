"""What a rule about a metric is, and the limits that depend on the run. Layer 6, pure."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from jackpot.config_engines import is_quantised
from jackpot.guards import LARGEST_GAPS
from jackpot.lab.history import History

QUANTISED_GAP = 2e-2  # mean |p_engine - p_training|; below it no correction mattered, docs/quantised.md

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
    return None if is_quantised(engine) else max(LARGEST_GAPS[engine.dtype], LARGEST_GAPS[precision])


def quantising(history: History, values: Values) -> float | None:
    """What fewer bits may make of a probability, on average. `guards` lets a run go on beyond it."""
    return QUANTISED_GAP if is_quantised(history.config.engine) else None


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
    dynamic = history.config.batch.dynamic_sampling
    return dynamic.max_rounds - 1 if dynamic else None


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
