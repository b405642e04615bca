"""Checks that stop a run which only looks as if it trained."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from jackpot.config.run import Sampling
from jackpot.core.errors import EngineError, TrainingError
from jackpot.core.prng import stream_key
from jackpot.core.types import Rollout
from jackpot.rollout.engines.base import Capabilities

THOROUGH_CHECKS = 2  # after every start: before and after the first weight update
CHECKED_TOKENS = 4096  # of a thorough check, whole rollouts
GLANCE_TOKENS, GLANCE_ROLLOUTS = (
    256,
    16,
)  # of every later batch: that many tokens at most, of the beginnings of so many rollouts
FALSE_ALARM = 1e-9  # the chance that a sound engine fails the check of what it draws
# Mean |p_engine - p_training| of sampled tokens, beyond which a run stops. That of a quantised engine is what its user
# wants to see and no reason to: 1e-3 to 2e-2 are usual, and a run that drifts apart has more. 0.25 is past all of that.
LARGEST_GAPS = {"fp32": 1e-3, "bf16": 2e-2, "quantised": 0.25}

_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}

Score = Callable[[Sampling], Mapping[str, Tensor]]


def check_engine(
    rollouts: Sequence[Rollout], sampling: Sampling, precisions: Sequence[str], score: Score
) -> dict[str, Any]:
    """Make sure that the engine's log-probs are those of the distribution that it samples from; what was measured.

    Two checks that fail for different bugs. Training scores the same tokens with the weights that wrote them, after
    temperature, top-p and top-k: the mean difference in probability must be rounding. And the most probable token must
    have been drawn as often as its reported probability says, whatever any model thinks: an engine that reports other
    numbers than it samples from is caught even if training agrees with its report.

    Args:
        rollouts: written by the weights that training holds now, with a sampled token in each.
        precisions: of engine and training, keys of `LARGEST_GAPS`; the coarsest rules.
        score: `Learner.score` of the model that wrote them, on these rollouts.

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


def check_gap(rollouts: Sequence[Rollout], sampling: Sampling, precisions: Sequence[str], score: Score) -> float:
    """The first check of `check_engine` alone, which says something of a few tokens already; the `engine_gap`.

    It is what a weight update breaks: an engine that kept its old weights, or some of them.
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
    """The key of `LARGEST_GAPS` for an engine."""
    return "quantised" if capabilities.quantized else _NAMES[capabilities.dtype]


def engine_gap(rollouts: Sequence[Rollout], scores: Mapping[str, Tensor]) -> float:
    """Mean |p_engine - p_training| over the sampled tokens of some rollouts; NaN where there are none.

    Args:
        scores: by rollout uid, [T] log-probs as training computes them.
    """
    gaps = [
        (scores[rollout.uid].double().exp() - rollout.rollout_log_probs.double().exp())[rollout.sampled_mask].abs()
        for rollout in rollouts
    ]
    return float(torch.cat(gaps).mean()) if gaps else math.nan


def top_token_surplus(rollouts: Sequence[Rollout]) -> tuple[float, float]:
    """How many times more often than reported the most probable token was drawn, and the variance of that number;
    zeros without top log-probs."""
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
    """What such a surplus exceeds, either way, in about one of `FALSE_ALARM` cases.

    Bernstein's inequality in Freedman's form (Ann. Probab. 3, 1975): each draw may depend on those before it, and the
    probabilities may be close to 1, where 6 standard errors would be exceeded often. It holds for a variance fixed
    beforehand; here the observed one stands in, hence "about".
    """
    needed = math.log(2.0 / FALSE_ALARM)
    return needed / 3.0 + math.sqrt((needed / 3.0) ** 2 + 2.0 * needed * variance)


class NonFiniteGuard:
    """Counts optimizer steps in a row whose gradient was not finite; `count` is part of a checkpoint."""

    def __init__(self, most: int, count: int = 0) -> None:
        self._most, self.count = most, count

    def see(self, is_bad: bool, iteration: int) -> None:
        """Raises TrainingError when it was once too often; no such step has touched the weights."""
        self.count = self.count + 1 if is_bad else 0
        if self.count >= self._most:
            raise TrainingError(
                f"the last {self.count} optimizer steps, up to iteration {iteration}, had a non-finite loss or "
                f"gradient. All were skipped, so the weights and every checkpoint are those of before. Look at "
                f"policy/grad_norm and mismatch/ratio_max before them; lower the learning rate or max_grad_norm, or "
                f"cap the weights. guard.max_non_finite_steps is {self._most}"
            )


def some_rollouts(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The first ones, until they have CHECKED_TOKENS sampled tokens."""
    taken, tokens = [], 0
    for rollout in rollouts:
        if tokens >= CHECKED_TOKENS:
            break
        taken.append(rollout)
        tokens += int(rollout.sampled_mask.sum())
    return taken


def glance(rollouts: Sequence[Rollout], seed: int) -> list[Rollout]:
    """The beginnings of a few rollouts, one from each of so many equal parts of the batch.

    Which one of its part, the seed decides: at equal distances all could come from one of several servers that take
    turns.
    """
    count = min(GLANCE_ROLLOUTS, len(rollouts))
    edges = [len(rollouts) * part // count for part in range(count + 1)] if count else []
    taken = [start + stream_key(seed, start) % (end - start) for start, end in pairwise(edges)]
    return [_beginning(rollouts[place], GLANCE_TOKENS // count) for place in taken]


def _beginning(rollout: Rollout, length: int) -> Rollout:
    names = ("token_ids", "rollout_log_probs", "sampled_mask", "top_ids", "top_log_probs", "versions")
    return replace(rollout, **{name: getattr(rollout, name)[:length] for name in names})


def _suspicion(rollouts: Sequence[Rollout], reported: Tensor, sampling: Sampling, score: Score, allowed: float) -> str:
    """What the reported numbers are, if they are something we know."""
    plain = {"top_p": 1.0, "top_k": 0}
    known = {
        "of the model before temperature, top_p and top_k": plain | {"temperature": 1.0},
        "of the model before top_p and top_k": plain,
        "of the model before the temperature": {"temperature": 1.0},
    }
    for what, changes in known.items():
        other = sampling.model_copy(update=changes)
        if other != sampling and engine_gap(rollouts, score(other)) <= allowed:
            return f"They are the log-probs {what}; have the engine return processed log-probs"
    hint = "they are no distribution over tokens" if reported.max() > 1e-3 else "other weights, or another tokenizer"
    return f"Likely causes: {hint}; a temperature or filter that one side does not apply; a broken weight update"
