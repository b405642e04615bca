"""Limits below which a policy has learned nothing, or has lost what it had learned.

The limits compare levels of skill: evaluations with their standard errors, or mean training rewards over windows of
iterations, with standard errors from the differences between successive iterations.
"""

import math
from itertools import pairwise
from statistics import NormalDist, fmean
from typing import NamedTuple

from jackpot.analysis.diagnose.limits import Limit, MetricHistory, RunLimit, Values, at_start
from jackpot.training.limits import COLLAPSED_BELOW

EVALUATED = ("eval/policy_accuracy", "eval/policy_reward")  # accuracy, or reward for a task without a verdict
REWARDS = "reward/mean"
LEAST_ITERATIONS = 30  # iterations after the learning rate's warm-up until a policy must have learned something
LEAST_MOVE = 1e-5  # least learning rate x steps to learn anything: about the distance that AdamW moves a weight
LARGEST_ERROR = 0.04  # largest standard error of the difference of two accuracies that can show "learned nothing"
LARGEST_ERROR_SHARE = 0.25  # LARGEST_ERROR as a share of the accuracy, the stricter limit in tasks of low accuracy
RARE_REWARDS = 0.99  # largest healthy share of groups without a signal in a run that begins with many of them
CUT_SHARE = 0.3  # largest healthy share of responses that are cut at the limit
CHANCE_ERRORS = 2.0  # standard errors beyond which a difference is not by chance
FIRST_ITERATIONS = 2  # number of iterations whose mean reward is the level at the start if rewards fall at once
_ONE_TAIL = 1.0 - NormalDist().cdf(CHANCE_ERRORS)  # probability of more than CHANCE_ERRORS standard errors by chance


class Level(NamedTuple):
    """The skill of a policy in one evaluation, or in training over a window of iterations."""

    mean: float
    error: float  # standard error of the mean

    def exceeds(self, lower: "Level") -> bool:
        """Tell whether this level is above another by more than chance."""
        return self.mean > lower.mean + CHANCE_ERRORS * _difference_error(self, lower)


def levels_of(history: MetricHistory, metric: str) -> list[Level]:
    """Return the levels of skill by one metric in a run, oldest first.

    An evaluation with a standard error gives one level, and so does a window of training rewards. The list is empty
    without such an evaluation, or if the rewards are fewer than two windows.
    """
    if metric == REWARDS:
        return _reward_levels(history)
    errors = dict(history.series(f"{metric}_stderr"))
    return [Level(value, errors[step]) for step, value in history.series(metric) if step in errors]


def _reward_levels(history: MetricHistory) -> list[Level]:
    """Return the mean training rewards of windows of iterations: the first window, then windows that end at the newest.

    The list is empty for a run of less than two windows.
    """
    values = [value for _, value in history.series(REWARDS)]
    size = history.window(values)  # iterations of a window
    if len(values) < 2 * size:
        return []

    # The standard error of a window's mean, from differences of successive iterations, which a trend hardly changes.
    # The mean square of such a difference is twice the variance of one iteration.
    error = math.sqrt(fmean((after - before) ** 2 for before, after in pairwise(values)) / (2 * size))
    # The first window begins at 0. The others are counted back from the end, so the second may overlap the first.
    begin_of_second = len(values) % size or size
    starts = [0, *range(begin_of_second, len(values), size)]
    levels = [Level(fmean(values[start : start + size]), error) for start in starts]

    # Rewards that fall at once fall from the level of the very first iterations.
    first = Level(fmean(values[:FIRST_ITERATIONS]), error * math.sqrt(size / FIRST_ITERATIONS))
    falls_at_once = first.mean - levels[0].mean > CHANCE_ERRORS * first.error
    return [first, *levels[1:]] if falls_at_once else levels


def unlearning_limit(metric: str, *, at_once: bool) -> RunLimit:
    """Return a limit of a metric, below which the policy has lost what it had learned.

    The limit is below the first level, or below the best one, by more than chance. The best of several levels is the
    one that chance raised most, so the more levels there are, the more standard errors are required (Bonferroni).
    Training rewards also depend on prompts and on the model that generates, so their limit is at most half of the best.

    Args:
        metric: one of EVALUATED, or REWARDS.
        at_once: True: the limit applies to runs in which no level rose above the first by more than chance; False: to
            all others.
    """

    def limit(history: MetricHistory, values: Values) -> float | None:
        """Return the value below which this run has lost what it had learned; None: no limit applies to this run."""
        levels = levels_of(history, metric)
        if len(levels) < 2:
            return None

        first, last = levels[0], levels[-1]
        best = max(levels[:-1])  # of all levels but the newest, by the mean, a level's first field
        if metric == REWARDS and best.mean <= 0.0:  # half of a negative reward is no limit
            return None
        # Standard errors beyond which the best of several levels is not above the first by chance (Bonferroni).
        errors_of_best = NormalDist().inv_cdf(1.0 - _ONE_TAIL / (len(levels) - 1))
        never_rose = best.mean <= first.mean + errors_of_best * _difference_error(first, best)
        # With `at_once` the limit is only for runs that never rose, without it only for those that did.
        if never_rose != at_once:
            return None

        below_first = first.mean - CHANCE_ERRORS * _difference_error(first, last)
        below_best = best.mean - errors_of_best * _difference_error(best, last)
        lost = max(below_first, below_best)
        return min(lost, COLLAPSED_BELOW * best.mean) if metric == REWARDS else lost

    return limit


def learning_limit(metric: str) -> RunLimit:
    """Return a limit of a metric, below which the policy has learned nothing: the first level plus a standard error.

    Chance alone exceeds that limit in 1 case of 6, and a policy that learns a little stays above it. The limit does not
    apply before LEAST_ITERATIONS, to a policy that has become worse, where nothing is left to learn, and to training
    rewards where evaluations say more. If evaluations are too small to see anything, or training rewards have risen,
    the limit applies only if a setting keeps the run from learning (`why_nothing`).
    """

    def limit(history: MetricHistory, values: Values) -> float | None:
        """Return the value of the metric below which this run has learned nothing; None: no limit applies to it."""
        levels = levels_of(history, metric)
        if len(levels) < 2 or not _is_late(history) or (metric == REWARDS and _evaluations(history) > 1):
            return None

        # Two cases without a limit: another rule says more of a policy that has become worse (`has_fallen`), and an
        # accuracy that began near 1 has no room above it (`is_full`).
        newest, error = levels[-1].mean, _difference_error(levels[0], levels[-1])
        lost_limits = [unlearning_limit(metric, at_once=at_once)(history, values) for at_once in (True, False)]
        has_fallen = any(lost is not None and newest < lost for lost in lost_limits)
        is_accuracy = metric == EVALUATED[0]  # else a mean reward, which may go above 1
        is_full = is_accuracy and levels[0].mean + error >= 1.0
        if has_fallen or is_full:
            return None

        # Coarse evaluations, and risen training rewards, leave open whether anything was learned.
        is_large_share = newest > 0.0 and error > LARGEST_ERROR_SHARE * newest
        is_coarse = is_accuracy and (error > LARGEST_ERROR or is_large_share)
        is_unsure = is_coarse or (metric != REWARDS and _rewards_rise(history))
        # `why_nothing` returns text, "" if no setting keeps the run from learning.
        return None if is_unsure and not why_nothing(history) else levels[0].mean + error

    return limit


def _rewards_rise(history: MetricHistory) -> bool:
    """Tell whether the newest training rewards are above the first by more than chance."""
    levels = levels_of(history, REWARDS)
    return bool(levels) and levels[-1].exceeds(levels[0])


def entropy_limit(history: MetricHistory, values: Values) -> float:
    """Return a low limit of an entropy: a tenth of the entropy at the start, or a twentieth if the policy improved."""
    return (0.05 if _has_risen(history) else 0.1) * at_start(history, values)


def sparse_limit(largest: float) -> RunLimit:
    """Return a limit of a metric that is the share of groups, or of steps, from which nothing can be learned.

    A run whose share is at most `largest` at its start has the limit `largest`. In any other run many groups of a small
    batch may lack a reward by chance; its limit is RARE_REWARDS, and applies only if the mean share over all iterations
    exceeds RARE_REWARDS, the run is past LEAST_ITERATIONS, and the policy has not become better.
    """

    def limit(history: MetricHistory, values: Values) -> float | None:
        """Return the largest healthy share of groups or steps without a signal in this run; None: no limit applies."""
        if at_start(history, values) <= largest:
            return largest
        is_rare = fmean(values) > RARE_REWARDS and _is_late(history) and not _has_risen(history)
        return RARE_REWARDS if is_rare else None

    return limit


def unless_risen(limit: float) -> RunLimit:
    """Restrict `limit` to runs in which the policy has not become better; no limit applies to other runs."""
    return lambda history, values: None if _has_risen(history) else limit


def unless_rewards_fell(limit: Limit) -> RunLimit:
    """Return a limit that applies only if the newest training rewards are at least as high as the first ones."""

    def limit_of_run(history: MetricHistory, values: Values) -> float | None:
        """Return the limit that `limit` gives for this run; None if training rewards fell, or are not known."""
        rewards = [value for _, value in history.series(REWARDS)]
        if not (rewards and history.recent(REWARDS) >= rewards[0]):  # fell, or the newest is NaN
            return None
        return limit(history, values) if callable(limit) else limit

    return limit_of_run


def unlearning_limit_if_rewards_rose(metric: str, *, at_once: bool) -> RunLimit:
    """Return `unlearning_limit`, restricted to runs whose training rewards rose from the first to the newest."""
    limit = unlearning_limit(metric, at_once=at_once)
    return lambda history, values: limit(history, values) if _rewards_rise(history) else None


def equal_rewards_limit(history: MetricHistory, values: Values) -> float | None:
    """Return a low limit of the spread of the iterations' mean rewards if all of these are equal; else None.

    The limit is just above 0, so that the spread of equal rewards, 0, is below it.
    """
    return math.ulp(1.0) if max(values) == min(values) else None


def paid_length_limit(history: MetricHistory, values: Values) -> float | None:
    """Return 1.3 times the response length at the start, if the reward pays for length and the policy got no better."""
    pays = history.recent("saved/length_reward") > 0.5 and not _has_risen(history)
    return 1.3 * at_start(history, values) if pays else None


def cut_limit_from_start(history: MetricHistory, values: Values) -> float | None:
    """Return `cut_limit` if more than CUT_SHARE of responses were cut at the length limit at the start, else None."""
    return cut_limit(history, values) if at_start(history, values) > CUT_SHARE else None


def cut_limit(history: MetricHistory, values: Values) -> float | None:
    """Return a limit of the share of responses cut at the length limit: CUT_SHARE, if cut responses earn nothing.

    The limit does not apply if the share was above CUT_SHARE from the start and the policy has become better anyway.
    """
    is_harmless = at_start(history, values) > CUT_SHARE and _has_risen(history)
    return CUT_SHARE if history.recent("saved/cut_earn") <= 0.0 and not is_harmless else None


def swapped_models_limit(history: MetricHistory, values: Values) -> float | None:
    """Return the policy's first accuracy as a limit of the rollout model's accuracy, if the two seem swapped.

    The models seem swapped if the first accuracy of the rollout model is above that of the policy by more than
    chance, and a pass of the rollout model costs more FLOPs than one of the policy. Else the result is None.
    """
    policy, rollout_model = (levels_of(history, f"eval/{role}_accuracy") for role in ("policy", "rollout_model"))
    rollout_model_is_better = policy and rollout_model and rollout_model[0].exceeds(policy[0])

    # Training costs as much as three forward passes of each of the two models. So if both models cost the same,
    # training takes six times the FLOPs of the rollouts in each epoch, and less if the rollout model costs more.
    flops_if_equal = 6.0 * history.recent("flops/rollout") * history.config.batch.ppo_epochs
    rollout_model_costs_more = history.recent("flops/train") < flops_if_equal
    return policy[0].mean if rollout_model_is_better and rollout_model_costs_more else None


def why_nothing(history: MetricHistory) -> str:
    """Return a sentence, to append to another, on the setting that keeps a run from learning; "" if none does."""
    optimizer, batch = history.config.policy.optimizer, history.config.batch
    steps = history.iteration * batch.steps_per_iteration
    if optimizer and optimizer.learning_rate * steps < LEAST_MOVE:
        return f". The learning rate is too low: {steps} steps of {optimizer.learning_rate:g} move no weight"
    return ". Each group is one response, which is compared with none" if batch.group_size == 1 else ""


def why_unknown(history: MetricHistory) -> str:
    """Return text that says why it is not known whether the policy learns; "" for a policy that is known to learn."""
    evaluations = _evaluations(history)
    if _has_risen(history):
        return ""
    if evaluations < 2:
        return f"the run has {evaluations} evaluation{'' if evaluations == 1 else 's'}, and 2 are needed"
    if not _is_late(history):
        return f"the newest evaluation is within chance of the first, and {LEAST_ITERATIONS} iterations are needed"
    # Late in a run, with a newest evaluation that is not above the first by more than chance (`_has_risen`).
    return "the newest evaluation is above the first by less than two standard errors"


def _evaluations(history: MetricHistory) -> int:
    """Return the number of evaluations of the policy in a run."""
    return max(len(levels_of(history, metric)) for metric in EVALUATED)


def _has_risen(history: MetricHistory) -> bool:
    """Tell whether the policy has become better: its newest evaluation is above the first by more than chance.

    False without evaluations. Accuracies count, and mean rewards only where there are none.
    """
    levels = next(filter(None, (levels_of(history, metric) for metric in EVALUATED)), None)
    return levels is not None and levels[-1].exceeds(levels[0])


def _is_late(history: MetricHistory) -> bool:
    """Tell whether LEAST_ITERATIONS have passed since the warm-up of the learning rate."""
    optimizer = history.config.policy.optimizer
    warm_up = optimizer.warmup_steps / history.config.batch.steps_per_iteration if optimizer else 0.0
    return history.iteration >= warm_up + LEAST_ITERATIONS


def _difference_error(first: Level, second: Level) -> float:
    """Return the standard error of the difference of two levels, taken as independent."""
    return math.hypot(first.error, second.error)
