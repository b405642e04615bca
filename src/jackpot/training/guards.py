"""Guards stop a run whose engine or gradients are broken, instead of letting it train on."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from jackpot.config.run import Config, Sampling
from jackpot.core.errors import EngineError, JackpotError, TrainingError
from jackpot.core.prng import fold_in
from jackpot.core.types import Role, Rollout
from jackpot.rollout.engines.base import Capabilities, Engine
from jackpot.rollout.sampler import discard_reason
from jackpot.training.batching import plain_batches
from jackpot.training.learner import Learner, StepResult

THOROUGH_CHECKS = 2  # thorough checks after every start of a run: before and after the first weight update
CHECKED_TOKENS = 4096  # sampled tokens that a thorough check reads, in whole rollouts
QUICK_TOKENS, QUICK_ROLLOUTS = 256, 16  # the most tokens and rollouts that a quick check reads
FALSE_ALARM = 1e-9  # probability that a sound engine fails the check of what it samples
# Mean |p_engine - p_training| of sampled tokens beyond which a run stops. The gap of a quantized engine is what its
# user wants to see and no reason to stop: 1e-3 to 2e-2 are usual, more in a run that drifts. 0.25 is past all of that.
LARGEST_GAPS = {"fp32": 1e-3, "bf16": 2e-2, "quantized": 0.25}

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}

ScoreFn = Callable[[Sampling], Mapping[str, Tensor]]  # log-probs by rollout uid, under the distribution of `Sampling`
RecordEvent = Callable[[int, dict[str, Any]], None]  # iteration, event


class EngineCheck:
    """Compares an engine's log-probs with training's while a run goes on, and stops the run where they disagree.

    Every rollout batch is checked before it is trained on: the first two after a start thoroughly, the others quickly.
    `guard.check_engine` turns these checks off.

    Args:
        learner: holds the weights that the engine should hold.
        record: called with every event: what a thorough check found, why the run stops.
    """

    def __init__(self, config: Config, learner: Learner, record: RecordEvent) -> None:
        self._config, self._learner, self._record = config, learner, record
        self._thorough_checks = 0  # done since the start

    def check_batch(self, engine: Engine, rollouts: Sequence[Rollout], iteration: int) -> None:
        """Check the rollout batch of an iteration on a few of its rollouts.

        A rollout generated with older weights than the learner holds cannot be checked and is passed over.

        Raises:
            EngineError: the engine's log-probs are not those of the distribution that it samples from.
        """
        config = self._config
        if not config.guard.check_engine:
            return
        is_thorough = self._thorough_checks < THOROUGH_CHECKS
        seed = fold_in(config.seed, "glance", iteration)
        chosen = first_rollouts(rollouts) if is_thorough else sample_rollouts(rollouts, seed)
        now = self._learner.version.rollout_model
        chosen = [one for one in chosen if one.sampled_mask.any() and bool((one.versions[:, 1] == now).all())]
        if not chosen:
            return
        score = self._score("rollout_model", chosen)
        check = check_engine if is_thorough else check_gap
        with _recorded(self._record, iteration):
            found = check(chosen, config.sampling, self._precisions(engine), score)
        if is_thorough:
            self._thorough_checks += 1
            self._record(iteration, found)

    def gap(self, role: Role, engine: Engine, rollouts: Sequence[Rollout], iteration: int) -> float:
        """Return the mean |p_engine - p_training| of rollouts just generated; NaN where none of them can be used.

        Raises:
            EngineError: the gap is more than rounding and `guard.check_engine` is on; an event of `iteration` says so.
        """
        config = self._config
        chosen = first_rollouts([one for one in rollouts if one.sampled_mask.any() and not discard_reason(one)])
        if not chosen:
            return math.nan
        score = self._score(role, chosen)
        if not config.guard.check_engine:
            return engine_gap(chosen, score(config.sampling))
        with _recorded(self._record, iteration):
            return check_gap(chosen, config.sampling, self._precisions(engine), score)

    def _score(self, role: Role, rollouts: Sequence[Rollout]) -> ScoreFn:
        batches = plain_batches(rollouts, self._config.batch.micro_batch_tokens, self._config.seed)
        return lambda sampling: self._learner.score(role, batches, sampling)

    def _precisions(self, engine: Engine) -> list[str]:
        return [precision_of(engine.capabilities), self._config.precision]


class NonFiniteGuard:
    """Counts consecutive optimizer steps with a non-finite gradient, and stops a run at the limit.

    Args:
        limit: `guard.max_non_finite_steps`.
        record: called with the event that says why the run stops.
        count: consecutive bad steps before this start of the run, from its checkpoint.
    """

    def __init__(self, limit: int, record: RecordEvent, count: int = 0) -> None:
        self._limit, self._record, self.count = limit, record, count

    def check(self, results: Sequence[StepResult], iteration: int) -> None:
        """Take in the optimizer steps of an iteration.

        Raises:
            TrainingError: the limit is reached; none of the bad steps has touched the weights.
        """
        for result in results:
            is_bad = bool(result.metrics["health/non_finite_steps"].value)
            self.count = self.count + 1 if is_bad else 0
            if self.count >= self._limit:
                with _recorded(self._record, iteration):
                    raise TrainingError(
                        f"the last {self.count} optimizer steps, up to iteration {iteration}, had a non-finite loss or "
                        f"gradient. All were skipped, so the weights and every checkpoint are those of before. Look at "
                        f"policy/grad_norm and mismatch/ratio_max before them; lower the learning rate or "
                        f"max_grad_norm, or cap the weights. guard.max_non_finite_steps is {self._limit}"
                    )


@contextmanager
def _recorded(record: RecordEvent, iteration: int) -> Iterator[None]:
    """Record the error that stops a run as an event of `iteration`, and raise it on."""
    try:
        yield
    except JackpotError as error:
        record(iteration, {"event": "stopped", "why": str(error)})
        raise


def check_engine(
    rollouts: Sequence[Rollout], sampling: Sampling, precisions: Sequence[str], score: ScoreFn
) -> dict[str, Any]:
    """Check that the engine reports the log-probs of the distribution that it samples from; return an event.

    Two checks fail for different bugs. Training scores the same tokens with the same weights, after temperature, top-p
    and top-k: the mean difference in probability must be rounding. And the most probable token must be drawn as often
    as its reported probability says: that catches an engine which samples from another distribution than it reports,
    even where training agrees with the report.

    Args:
        rollouts: generated by the weights that training holds now, with a sampled token in each.
        precisions: of engine and training, keys of `LARGEST_GAPS`; the largest of their gaps is allowed.
        score: `Learner.score` of the model that generated them, on these rollouts.

    Raises:
        EngineError: either check fails; names what the reported numbers do agree with, if anything.
    """
    gap, (surplus, variance) = check_gap(rollouts, sampling, precisions, score), top_token_surplus(rollouts)
    tokens = sum(int(rollout.sampled_mask.sum()) for rollout in rollouts)
    allowed = largest_surplus(variance)
    if not abs(surplus) <= allowed:
        often = "more" if surplus > 0 else "less"
        raise EngineError(
            f"the engine reports one distribution and samples from another: over {tokens} tokens the most "
            f"probable one was drawn {abs(surplus):.0f} times {often} often than its reported probabilities say "
            f"(allowed: {allowed:.0f}). Have it return processed log-probs, of the temperature, top_p and top_k that "
            f"it samples with"
        )
    return {"event": "engine_check", "tokens": tokens, "mean_gap": gap, "top_token_surplus": surplus / allowed}


def check_gap(rollouts: Sequence[Rollout], sampling: Sampling, precisions: Sequence[str], score: ScoreFn) -> float:
    """Check only that training agrees with the engine's log-probs, which a few tokens can show; return `engine_gap`.

    It catches a broken weight update: an engine that kept all or some of its old weights.

    Raises:
        EngineError: the gap is larger than the precisions explain.
    """
    reported = torch.cat([rollout.rollout_log_probs[rollout.sampled_mask] for rollout in rollouts])
    gap = engine_gap(rollouts, score(sampling))
    allowed = max(LARGEST_GAPS[precision] for precision in precisions)
    if not gap <= allowed:
        suspicion = _suspicion(rollouts, reported, sampling, score, allowed)
        raise EngineError(
            f"the engine's log-probs are not those of the distribution it was asked to sample from: over "
            f"{len(reported)} tokens they differ from training's by {gap:.2g} in probability on average; at most "
            f"{allowed:g} is allowed in {' and '.join(dict.fromkeys(precisions))}. {suspicion}"
        )
    return gap


def precision_of(capabilities: Capabilities) -> str:
    """Return the key of `LARGEST_GAPS` for an engine."""
    return "quantized" if capabilities.quantized else _NAMES[capabilities.dtype]


def engine_gap(rollouts: Sequence[Rollout], scores: Mapping[str, Tensor]) -> float:
    """Return the mean |p_engine - p_training| over the sampled tokens of rollouts; NaN for no rollouts.

    Args:
        scores: by rollout uid, [T] log-probs as training computes them.
    """
    gaps = [
        (scores[rollout.uid].double().exp() - rollout.rollout_log_probs.double().exp())[rollout.sampled_mask].abs()
        for rollout in rollouts
    ]
    return float(torch.cat(gaps).mean()) if gaps else math.nan


def top_token_surplus(rollouts: Sequence[Rollout]) -> tuple[float, float]:
    """Count how many times more often than reported the most probable token was drawn; return count and variance.

    Both are 0 for rollouts without top log-probs.
    """
    surplus = variance = 0.0
    for rollout in rollouts:
        if rollout.top_ids.shape[-1]:
            here = rollout.sampled_mask
            drawn = (rollout.token_ids == rollout.top_ids[:, 0])[here].double()
            probability = rollout.top_log_probs[:, 0].double().exp()[here].clamp(max=1.0)
            surplus += float((drawn - probability).sum())
            variance += float((probability * (1.0 - probability)).sum())
    return surplus, variance


def largest_surplus(variance: float) -> float:
    """Return the bound that the surplus of a sound engine exceeds, either way, with probability `FALSE_ALARM`.

    Bernstein's inequality in Freedman's form (Ann. Probab. 3, 1975): each draw may depend on those before it, and the
    probabilities may be close to 1, where 6 standard errors would be exceeded often. It holds for a variance fixed
    beforehand; here the observed one stands in, so the probability is approximate.
    """
    needed = math.log(2.0 / FALSE_ALARM)
    return needed / 3.0 + math.sqrt((needed / 3.0) ** 2 + 2.0 * needed * variance)


def first_rollouts(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Take the first rollouts of a batch until they have CHECKED_TOKENS sampled tokens."""
    taken, tokens = [], 0
    for rollout in rollouts:
        if tokens >= CHECKED_TOKENS:
            break
        taken.append(rollout)
        tokens += int(rollout.sampled_mask.sum())
    return taken


def sample_rollouts(rollouts: Sequence[Rollout], seed: int) -> list[Rollout]:
    """Take the beginnings of QUICK_ROLLOUTS rollouts, one from each of as many equal parts of the batch.

    The seed decides which one of its part: at equal distances all could come from one of several servers that take
    turns.
    """
    count = min(QUICK_ROLLOUTS, len(rollouts))
    edges = [len(rollouts) * part // count for part in range(count + 1)] if count else []
    taken = [start + fold_in(seed, start) % (end - start) for start, end in pairwise(edges)]
    return [_beginning(rollouts[place], QUICK_TOKENS // count) for place in taken]


def _beginning(rollout: Rollout, length: int) -> Rollout:
    names = ("token_ids", "rollout_log_probs", "sampled_mask", "top_ids", "top_log_probs", "versions")
    return replace(rollout, **{name: getattr(rollout, name)[:length] for name in names})


def _suspicion(
    rollouts: Sequence[Rollout], reported: Tensor, sampling: Sampling, score: ScoreFn, allowed: float
) -> str:
    """Guess what an engine's wrong log-probs are, as a sentence: a known distribution, or else the likely causes."""
    plain = {"top_p": 1.0, "top_k": 0}
    known = {
        "of the model before temperature, top_p and top_k": plain | {"temperature": 1.0},
        "of the model before top_p and top_k": plain,
        "of the model before the temperature": {"temperature": 1.0},
    }
    for description, changes in known.items():
        other = sampling.model_copy(update=changes)
        if other != sampling and engine_gap(rollouts, score(other)) <= allowed:
            return f"They are the log-probs {description}; have the engine return processed log-probs"
    hint = "they are no distribution over tokens" if reported.max() > 1e-3 else "other weights, or another tokenizer"
    return f"Likely causes: {hint}; a temperature or filter that one side does not apply; a broken weight update"
