"""Checks what an engine reports, without a forward pass: its top-k lists, and whether it samples as it reports.

Shapes: `N` sampled tokens, `K` top log-probs. Log-probs are in nats.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from jackpot.core.errors import EngineError
from jackpot.core.types import Rollout

LISTED_TOKENS = 65536  # tokens of a batch whose lists are read, in whole rollouts
LARGEST_MASS = 1.0 + 1e-3  # of a top-k list; more than rounding makes it
FALSE_ALARM = 1e-9  # probability that a sound engine is ever refused by `SamplingEvidence`, in a run of any length
TILTS = (-0.25, -0.09, -0.03, 0.03, 0.09, 0.25)  # d: the engine would sample at 1 / (1 + d) of its temperature
FLOOR = -10.0  # log-prob below which all tokens count alike
ROUNDING = 1e-5  # how far the sampled distribution may be from the reported one, total variation for each token


class ReportedLists(NamedTuple):
    """Holds what an engine reports about its sampled tokens."""

    token_ids: Tensor  # [N] int64, as drawn
    top_ids: Tensor  # [N, K] int64, most probable first
    top_log_probs: Tensor  # [N, K] float64, -inf outside the support of a truncated distribution

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> "ReportedLists":
        """Join the sampled tokens of the first rollouts, up to the one with which they are LISTED_TOKENS."""
        before = accumulate((len(rollout.token_ids) for rollout in rollouts), initial=0)
        rollouts = [rollout for rollout, tokens in zip(rollouts, before, strict=False) if tokens < LISTED_TOKENS]
        sampled = torch.cat([rollout.sampled_mask for rollout in rollouts])
        return cls(
            token_ids=torch.cat([rollout.token_ids for rollout in rollouts])[sampled],
            top_ids=torch.cat([rollout.top_ids for rollout in rollouts])[sampled],
            top_log_probs=torch.cat([rollout.top_log_probs for rollout in rollouts])[sampled].double(),
        )


def check_ids(rollouts: Sequence[Rollout], vocab_size: int) -> None:
    """Refuse ids that the model does not know, of tokens and of top-k lists: the learner takes them as they are.

    Raises:
        EngineError: an id outside the vocabulary.
    """
    for name in ("token_ids", "top_ids"):
        ids = torch.cat([getattr(rollout, name).flatten() for rollout in rollouts])
        if ids.numel() and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise EngineError(
                f"the rollouts' {name} go from {int(ids.min())} to {int(ids.max())}, and the model knows 0 to "
                f"{vocab_size - 1}; look at how the engine, or the environment, fills {name}"
            )


def check_lists(lists: ReportedLists) -> None:
    """Refuse top-k lists that no distribution has.

    Raises:
        EngineError: an id twice in a list, or probabilities that sum to more than 1.
    """
    if not lists.top_ids.numel():
        return

    ids = lists.top_ids.sort(dim=-1).values
    twice = int((ids[:, 1:] == ids[:, :-1]).any(-1).sum())
    mass = lists.top_log_probs.exp().sum(-1)

    problems = {
        f"{twice} of {len(ids)} name a token twice": twice > 0,
        f"the probabilities of one sum to {float(mass.max()):.6g}": not bool((mass <= LARGEST_MASS).all()),
    }
    if found := [problem for problem, is_so in problems.items() if is_so]:
        raise EngineError(
            f"the engine's top-k lists are no part of a distribution: {'; '.join(found)}. Z is made of them, so "
            f"nothing can be corrected with them; look at how the engine fills top_ids and top_log_probs"
        )


class SamplingEvidence:
    """Accumulates evidence that an engine samples from another distribution than it reports.

    Of a token x let f(x) be its reported log-prob, at least FLOOR, and outside the list the smallest f in it. For every
    tilt d the factor

        exp(d f(x)) / E[exp(d f)],        E over the reported distribution

    has mean 1 where x was drawn as reported, whatever came before it. Products of such factors are a martingale, which
    by Ville's inequality ever exceeds 1 / FALSE_ALARM with probability FALSE_ALARM at most. Where the engine samples at
    another temperature, the product with the tilt next to it grows exponentially: it is the likelihood ratio of both.
    The expectation is raised by what rounding can add (ROUNDING).

    The products of all tilts are averaged. Those that begin with the first batch have the weight 0.9, and with every
    later batch j new ones begin with 0.1 / (j (j - 1)), which sums to 0.1: so an engine that breaks late is found
    nearly as quickly as one that is broken from the start.
    """

    def __init__(self) -> None:
        self._products = torch.full((len(TILTS),), -math.inf, dtype=torch.float64)  # log of each tilt's
        self._batches = self._tokens = 0
        self._drawn = self._expected = 0.0  # sums of f as drawn, and as the reported distributions expect it

    def add(self, lists: ReportedLists) -> float:
        """Take in the sampled tokens of one more batch; return the evidence as a share of what ends a run.

        It is below 0 where the tokens speak for the report; 1 is FALSE_ALARM.

        Raises:
            EngineError: the engine samples from another distribution than it reports.
        """
        if lists.top_ids.numel():
            self._batches += 1
            begun = 0.9 if self._batches == 1 else 0.1 / (self._batches * (self._batches - 1.0))
            self._products = torch.logaddexp(self._products, torch.tensor(math.log(begun), dtype=torch.float64))
            self._products += self._factors(lists)

        needed = -math.log(FALSE_ALARM)
        share = (float(self._products.logsumexp(0)) - math.log(len(TILTS))) / needed if self._batches else 0.0

        if share >= 1.0:
            drawn, expected = self._drawn / self._tokens, self._expected / self._tokens
            raise EngineError(
                f"the engine reports one distribution and samples from another: over {self._tokens} tokens since the "
                f"start, the drawn ones have a log-prob of {drawn:.3f} on average, and by the reported probabilities "
                f"it would be {expected:.3f}. Have it return processed log-probs, of the temperature, top_p and top_k "
                f"that it samples with"
            )
        return share

    def _factors(self, lists: ReportedLists) -> Tensor:
        """Return the log of each tilt's product over the tokens, [tilts]; add up f."""
        probs, f = lists.top_log_probs.exp(), lists.top_log_probs.clamp(min=FLOOR)
        outside, rest = f.min(-1).values, (1.0 - probs.sum(-1)).clamp(min=0.0)
        at = lists.top_ids == lists.token_ids[:, None]
        drawn = torch.where(at.any(-1), torch.where(at, f, 0.0).sum(-1), outside)
        self._tokens += len(drawn)
        self._drawn += float(drawn.sum())
        self._expected += float((probs * f).sum() + (rest * outside).sum())
        logs = []
        for tilt in TILTS:
            mean = (probs * (tilt * f).exp()).sum(-1) + rest * (tilt * outside).exp()
            logs.append((tilt * drawn - (mean + ROUNDING * max(1.0, math.exp(tilt * FLOOR))).log()).sum())
        return torch.stack(logs)
