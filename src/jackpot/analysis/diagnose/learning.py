"""Limits below which a policy has learned nothing, or has lost what it had.

They compare levels: evaluations, by the standard errors that they carry, or means of the training rewards over
stretches of iterations, whose errors follow from how much successive iterations differ.
"""

import math
from itertools import pairwise
from statistics import NormalDist, fmean
from typing import NamedTuple

from jackpot.analysis.diagnose.limits import Limit, MetricHistory, OfRun, Values, at_start
from jackpot.training.limits import COLLAPSED_BELOW

EVALUATED = ("eval/policy_accuracy", "eval/policy_reward")  # the second where the task has no verdict
REWARDS = "reward/mean"
ENOUGH = 30  # iterations before which a policy may have learned nothing, after the warm-up of its learning rate
MOVES = 1e-5  # learning rate times steps, the furthest that AdamW takes a weight, below which nothing is learned
SEES = 0.04  # standard error of the difference of two accuracies, above which "learned nothing" is not known
SEES_OF_LEVEL = 0.25  # the same as a share of the accuracy, which is low where rewards are sparse
RARE = 0.99  # share of groups without a right response, from which rewards are too rare
CUT = 0.3  # share of the responses that are cut at the limit
CHANCE = 2.0  # standard errors of a difference beyond which it is not by chance
AT_ONCE = 2  # iterations whose rewards are those of the start where they fall at once
_ONE_TAIL = 1.0 - NormalDist().cdf(CHANCE)  # the probability of more


class Level(NamedTuple):
    """Says how good a policy was, in an evaluation or over a stretch of iterations."""

    mean: float
    error: float  # standard error of the mean


def levels_of(history: MetricHistory, metric: str) -> list[Level]:
    """Return the levels of a metric, oldest first; none of a reward in evaluations that have an accuracy."""
    if metric == REWARDS:
        return _stretches(history)
    errors = dict(history.series(f"{metric}_stderr"))
    return [Level(value, errors[step]) for step, value in history.series(metric) if step in errors]


def _stretches(history: MetricHistory) -> list[Level]:
    """Return the mean of the rewards over the first window and over all further ones that end with the newest."""
    values = [value for _, value in history.series(REWARDS)]
    size = history.window(values)
    if len(values) < 2 * size:
        return []
    error = math.sqrt(fmean((after - before) ** 2 for before, after in pairwise(values)) / (2 * size))
    first = Level(fmean(values[:AT_ONCE]), error * math.sqrt(size / AT_ONCE))  # what falls at once falls from there
    starts = [0, *range(len(values) % size or size, len(values), size)]
    levels = [Level(fmean(values[start : start + size]), error) for start in starts]
    return [first if first.mean - levels[0].mean > CHANCE * first.error else levels[0], *levels[1:]]


def fallen(metric: str, *, at_once: bool) -> OfRun:
    """Return the limit below which a policy has lost what it had.

    It is below its first level, or below its best one, by more than chance. The best of several levels is the one that
    chance raised most, so more standard errors are asked for the more there are (Bonferroni). Training rewards also
    depend on the prompts of the stretch and on the model that generates: of them less than half must be left.

    Args:
        at_once: apply where no level was above the first by more than chance; else where one was.
    """

    def of(history: MetricHistory, values: Values) -> float | None:
        levels = levels_of(history, metric)
        if len(levels) < 2:
            return None
        first, last, best = levels[0], levels[-1], max(levels[:-1])
        many = NormalDist().inv_cdf(1.0 - _ONE_TAIL / (len(levels) - 1))
        if metric == REWARDS and best.mean <= 0.0:  # half of it says nothing
            return None
        if (best.mean <= first.mean + many * _error(first, best)) != at_once:
            return None
        limit = max(first.mean - CHANCE * _error(first, last), best.mean - many * _error(best, last))
        return min(limit, COLLAPSED_BELOW * best.mean) if metric == REWARDS else limit

    return of


def risen(metric: str) -> OfRun:
    """Return the limit below which a policy has learned nothing: its first level plus one standard error.

    Chance alone exceeds it in 1 case of 6, and a policy that learns a little stays above it. It does not apply before
    ENOUGH iterations, where the policy has fallen, where nothing is left to learn, and to training rewards where
    evaluations say more. Nor does it where evaluations are too small to see anything or the training rewards have
    risen, unless the settings keep the run from learning.
    """

    def of(history: MetricHistory, values: Values) -> float | None:
        levels = levels_of(history, metric)
        if len(levels) < 2 or not _is_late(history) or (metric == REWARDS and _evaluations(history) > 1):
            return None
        lost = [limit(history, values) for limit in (fallen(metric, at_once=one) for one in (True, False))]
        error = _error(levels[0], levels[-1])
        is_coarse = metric == EVALUATED[0] and (error > SEES or error > SEES_OF_LEVEL * levels[-1].mean > 0.0)
        is_unsure = is_coarse or (metric != REWARDS and _rewards_rise(history))
        has_fallen = any(limit is not None and levels[-1].mean < limit for limit in lost)
        limit = levels[0].mean + error
        is_full = metric == EVALUATED[0] and limit >= 1.0
        return None if has_fallen or is_full or (is_unsure and not why_nothing(history)) else limit

    return of


def _rewards_rise(history: MetricHistory) -> bool:
    """Return whether the newest training rewards are above the first by more than chance."""
    levels = levels_of(history, REWARDS)
    return bool(levels) and levels[-1].mean > levels[0].mean + CHANCE * _error(levels[0], levels[-1])


def below_start_unless_risen(history: MetricHistory, values: Values) -> float:
    """Return a tenth of the entropy at the start; half of that where the policy has become better."""
    return (0.05 if _has_risen(history) else 0.1) * at_start(history, values)


def unless_sparse(limit: float) -> OfRun:
    """Return a limit of how many groups may teach nothing.

    Where rewards are sparse from the start it is RARE, and applies where the mean of all iterations is above that, for
    in a small batch most are without a reward by chance; not early, nor where the policy has become better.
    """

    def of(history: MetricHistory, values: Values) -> float | None:
        if at_start(history, values) <= limit:
            return limit
        is_rare = fmean(values) > RARE and _is_late(history) and not _has_risen(history)
        return RARE if is_rare else None

    return of


def unless_risen(limit: float) -> OfRun:
    """Return a limit that does not apply where the policy has become better."""
    return lambda history, values: None if _has_risen(history) else limit


def unless_rewards_fell(limit: Limit) -> OfRun:
    """Return a limit that applies where the rewards are not lower than at the start."""

    def of(history: MetricHistory, values: Values) -> float | None:
        rewards = [value for _, value in history.series(REWARDS)]
        applies = bool(rewards) and history.recent(REWARDS) >= rewards[0]
        return (limit(history, values) if callable(limit) else limit) if applies else None

    return of


def fallen_for_rewards(metric: str, *, at_once: bool) -> OfRun:
    """Return the limit of `fallen` where the training rewards have risen meanwhile."""
    limit = fallen(metric, at_once=at_once)
    return lambda history, values: limit(history, values) if _rewards_rise(history) else None


def never_unequal(history: MetricHistory, values: Values) -> float | None:
    """Return the least spread of the mean rewards where no iteration had another one than the first."""
    return math.ulp(1.0) if max(values) == min(values) else None


def longer(history: MetricHistory, values: Values) -> float | None:
    """Return 1.3 times the length at the start, where the reward pays for length and the policy is not better."""
    pays = history.recent("saved/length_reward") > 0.5 and not _has_risen(history)
    return 1.3 * at_start(history, values) if pays else None


def cut_from_start(history: MetricHistory, values: Values) -> float | None:
    """Return the limit of the share of responses that are cut, where it was above that from the start."""
    return unless_cut_earn(history, values) if at_start(history, values) > CUT else None


def unless_cut_earn(history: MetricHistory, values: Values) -> float | None:
    """Return the limit of the share of responses that are cut, where those earn nothing; none where they were cut from
    the start and the policy has become better nevertheless."""
    is_harmless = at_start(history, values) > CUT and _has_risen(history)
    return CUT if history.recent("saved/cut_earn") <= 0.0 and not is_harmless else None


def behind_at_start(history: MetricHistory, values: Values) -> float | None:
    """Return the policy's first accuracy, where the rollout model's is above it by more than chance, and it costs more.

    Training costs 3 passes of each model that is trained, so with a rollout model of the policy's cost 6 times the
    FLOPs of the rollouts.
    """
    policy, model = (levels_of(history, f"eval/{role}_accuracy") for role in ("policy", "rollout_model"))
    is_behind = policy and model and model[0].mean > policy[0].mean + CHANCE * _error(policy[0], model[0])
    rollouts = history.recent("flops/rollout") * history.config.batch.ppo_epochs
    return policy[0].mean if is_behind and history.recent("flops/train") < 6.0 * rollouts else None


def why_nothing(history: MetricHistory) -> str:
    """Say behind a sentence which settings keep a run from learning; "" where none does."""
    optimizer, steps = history.config.policy.optimizer, history.iteration * history.config.batch.steps_per_iteration
    if optimizer and optimizer.learning_rate * steps < MOVES:
        return f". The learning rate is too low: {steps} steps of {optimizer.learning_rate:g} move no weight"
    return ". Each group is one response, which is compared with none" if history.config.batch.group_size == 1 else ""


def why_unknown(history: MetricHistory) -> str:
    """Say why it is not known whether the policy learns; "" where it does."""
    evaluations = _evaluations(history)
    if _has_risen(history):
        return ""
    if evaluations < 2:
        return f"the run has {evaluations} evaluation{'' if evaluations == 1 else 's'}, and 2 are needed"
    if not _is_late(history):
        return f"the newest evaluation is within chance of the first, and {ENOUGH} iterations are needed"
    return "the newest evaluation is above the first by less than two standard errors"


def _evaluations(history: MetricHistory) -> int:
    return max(len(levels_of(history, metric)) for metric in EVALUATED)


def _has_risen(history: MetricHistory) -> bool:
    """Return whether the newest evaluation is above the first by more than chance."""
    levels = next(filter(None, (levels_of(history, metric) for metric in EVALUATED)), [Level(0.0, 0.0)])
    return levels[-1].mean > levels[0].mean + CHANCE * _error(levels[0], levels[-1])


def _is_late(history: MetricHistory) -> bool:
    """Return whether ENOUGH iterations are done since the learning rate is warm."""
    optimizer = history.config.policy.optimizer
    warm = optimizer.warmup_steps / history.config.batch.steps_per_iteration if optimizer else 0.0
    return history.iteration >= warm + ENOUGH


def _error(one: Level, other: Level) -> float:
    """Return the standard error of the difference, as if the levels were independent."""
    return math.hypot(one.error, other.error)
