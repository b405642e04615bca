"""Limits below which a policy has learned nothing, or has lost what it had learned.

They compare levels of skill: evaluations with their standard errors, or mean training rewards over stretches of
iterations, whose errors follow from how much successive iterations differ.
"""

import math
from itertools import pairwise
from statistics import NormalDist, fmean
from typing import NamedTuple

from jackpot.analysis.diagnose.limits import Limit, MetricHistory, OfRun, Values, at_start
from jackpot.training.limits import COLLAPSED_BELOW

EVALUATED = ("eval/policy_accuracy", "eval/policy_reward")  # the second for a task without a verdict
REWARDS = "reward/mean"
ENOUGH = 30  # iterations before which a policy may have learned nothing, after the warm-up of its learning rate
MOVES = 1e-5  # learning rate times steps, about the furthest that AdamW moves a weight, below which nothing is learned
SEES = 0.04  # largest standard error of the difference of two accuracies at which "learned nothing" can be known
SEES_OF_LEVEL = 0.25  # the same limit as a share of the accuracy, for tasks of low accuracy
RARE = 0.99  # share of groups without a right response, from which rewards are too rare
CUT = 0.3  # share of the responses that are cut at the limit
CHANCE = 2.0  # standard errors of a difference beyond which it is not by chance
AT_ONCE = 2  # first iterations, whose rewards are the level at the start if rewards fall at once
_ONE_TAIL = 1.0 - NormalDist().cdf(CHANCE)  # the probability that chance alone exceeds CHANCE standard errors


class Level(NamedTuple):
    """How good a policy was, in an evaluation or over a stretch of iterations."""

    mean: float
    error: float  # standard error of the mean


def levels_of(history: MetricHistory, metric: str) -> list[Level]:
    """Return the levels of a metric in a run, oldest first; empty where the run does not have the metric."""
    if metric == REWARDS:
        return _stretches(history)
    errors = dict(history.series(f"{metric}_stderr"))
    return [Level(value, errors[step]) for step, value in history.series(metric) if step in errors]


def _stretches(history: MetricHistory) -> list[Level]:
    """Return the mean reward of the first window of iterations, and of all later windows, counted back from the end."""
    values = [value for _, value in history.series(REWARDS)]
    size = history.window(values)
    if len(values) < 2 * size:
        return []

    # The standard error of a window's mean, from the differences of successive iterations: a trend does not enter.
    error = math.sqrt(fmean((after - before) ** 2 for before, after in pairwise(values)) / (2 * size))
    first = Level(fmean(values[:AT_ONCE]), error * math.sqrt(size / AT_ONCE))  # what falls at once falls from there
    starts = [0, *range(len(values) % size or size, len(values), size)]
    levels = [Level(fmean(values[start : start + size]), error) for start in starts]

    return [first if first.mean - levels[0].mean > CHANCE * first.error else levels[0], *levels[1:]]


def fallen(metric: str, *, at_once: bool) -> OfRun:
    """Return the limit of a level below which a policy has lost what it had learned.

    The limit is below the first level, or below the best one, by more than chance. The best of several levels is the
    one that chance raised most, so the more levels there are, the more standard errors are asked for (Bonferroni).
    Training rewards also depend on prompts and on the model that generates: of them less than half must be left.

    Args:
        metric: one of EVALUATED, or REWARDS.
        at_once: True: the limit applies to runs in which no level rose above the first by more than chance; False: to
            all others.
    """

    def of(history: MetricHistory, values: Values) -> float | None:
        levels = levels_of(history, metric)
        if len(levels) < 2:
            return None

        first, last, best = levels[0], levels[-1], max(levels[:-1])
        many = NormalDist().inv_cdf(1.0 - _ONE_TAIL / (len(levels) - 1))
        if metric == REWARDS and best.mean <= 0.0:  # half of a negative reward is no limit
            return None
        if (best.mean <= first.mean + many * _error(first, best)) != at_once:
            return None

        limit = max(first.mean - CHANCE * _error(first, last), best.mean - many * _error(best, last))
        return min(limit, COLLAPSED_BELOW * best.mean) if metric == REWARDS else limit

    return of


def risen(metric: str) -> OfRun:
    """Return the limit of the newest level below which a policy has learned nothing: the first plus a standard error.

    Chance alone exceeds that limit in 1 case of 6, and a policy that learns a little stays above it. The limit does not
    apply before ENOUGH iterations, where the policy has fallen, where nothing is left to learn, and to training rewards
    where evaluations say more. Where evaluations are too small to see anything, or training rewards have risen, it
    applies only if a setting keeps the run from learning (`why_nothing`).
    """

    def of(history: MetricHistory, values: Values) -> float | None:
        levels = levels_of(history, metric)
        if len(levels) < 2 or not _is_late(history) or (metric == REWARDS and _evaluations(history) > 1):
            return None

        # Whether that can be known, and whether another rule says more.
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
    """Return the limit of a healthy entropy: a tenth of that at the start, or a twentieth if the policy is better."""
    return (0.05 if _has_risen(history) else 0.1) * at_start(history, values)


def unless_sparse(limit: float) -> OfRun:
    """Return the limit of the share of groups that teach nothing: `limit`, or RARE if more teach nothing at the start.

    RARE applies only where the mean over all iterations exceeds it, since in a small batch most groups are without a
    reward by chance; and neither early nor where the policy has become better.
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
    """Return a limit that applies only where the training rewards are at least those of the start."""

    def of(history: MetricHistory, values: Values) -> float | None:
        rewards = [value for _, value in history.series(REWARDS)]
        applies = bool(rewards) and history.recent(REWARDS) >= rewards[0]
        return (limit(history, values) if callable(limit) else limit) if applies else None

    return of


def fallen_for_rewards(metric: str, *, at_once: bool) -> OfRun:
    """Return the limit of `fallen`, which applies only where the training rewards have risen meanwhile."""
    limit = fallen(metric, at_once=at_once)
    return lambda history, values: limit(history, values) if _rewards_rise(history) else None


def never_unequal(history: MetricHistory, values: Values) -> float | None:
    """Return a limit just above 0 for the spread of the mean rewards, if all iterations had the same mean reward."""
    return math.ulp(1.0) if max(values) == min(values) else None


def longer(history: MetricHistory, values: Values) -> float | None:
    """Return 1.3 times the response length at the start, if the reward pays for length and the policy is not better."""
    pays = history.recent("saved/length_reward") > 0.5 and not _has_risen(history)
    return 1.3 * at_start(history, values) if pays else None


def cut_from_start(history: MetricHistory, values: Values) -> float | None:
    """Return CUT, the limit of the share of cut responses, if the share was above CUT from the start."""
    return unless_cut_earn(history, values) if at_start(history, values) > CUT else None


def unless_cut_earn(history: MetricHistory, values: Values) -> float | None:
    """Return CUT, the limit of the share of cut responses, if cut responses earn nothing.

    The limit does not apply if the share was above CUT from the start and the policy has become better nevertheless.
    """
    is_harmless = at_start(history, values) > CUT and _has_risen(history)
    return CUT if history.recent("saved/cut_earn") <= 0.0 and not is_harmless else None


def behind_at_start(history: MetricHistory, values: Values) -> float | None:
    """Return the policy's first accuracy as a limit of the rollout model's, if the two models may be swapped.

    That is where the rollout model begins above the policy by more than chance, and costs more FLOPs than the policy.
    Training takes three passes of each trained model, so if both cost the same, six times the FLOPs of the rollouts.
    """
    policy, model = (levels_of(history, f"eval/{role}_accuracy") for role in ("policy", "rollout_model"))
    is_behind = policy and model and model[0].mean > policy[0].mean + CHANCE * _error(policy[0], model[0])

    rollouts = history.recent("flops/rollout") * history.config.batch.ppo_epochs
    return policy[0].mean if is_behind and history.recent("flops/train") < 6.0 * rollouts else None


def why_nothing(history: MetricHistory) -> str:
    """Return a sentence, to follow another, about the setting that keeps a run from learning; "" if none does."""
    optimizer, steps = history.config.policy.optimizer, history.iteration * history.config.batch.steps_per_iteration
    if optimizer and optimizer.learning_rate * steps < MOVES:
        return f". The learning rate is too low: {steps} steps of {optimizer.learning_rate:g} move no weight"
    return ". Each group is one response, which is compared with none" if history.config.batch.group_size == 1 else ""


def why_unknown(history: MetricHistory) -> str:
    """Say why it is not known whether the policy learns; "" where it is known to learn."""
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
    """Return whether the policy has become better: its newest evaluation is above the first by more than chance."""
    levels = next(filter(None, (levels_of(history, metric) for metric in EVALUATED)), [Level(0.0, 0.0)])
    return levels[-1].mean > levels[0].mean + CHANCE * _error(levels[0], levels[-1])


def _is_late(history: MetricHistory) -> bool:
    """Return whether ENOUGH iterations are done after the warm-up of the learning rate."""
    optimizer = history.config.policy.optimizer
    warm = optimizer.warmup_steps / history.config.batch.steps_per_iteration if optimizer else 0.0
    return history.iteration >= warm + ENOUGH


def _error(one: Level, other: Level) -> float:
    """Return the standard error of the difference of two levels, taken as independent."""
    return math.hypot(one.error, other.error)
