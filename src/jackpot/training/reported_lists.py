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
FALSE_ALARM = 1e-9  # probability that `Bets` ever refuse a sound engine, in a run of any length
TILTS = (-0.25, -0.09, -0.03, 0.03, 0.09, 0.25)  # d: the engine would sample at 1 / (1 + d) of its temperature
ANOTHER_PASS = 0.02  # nats of a token by which its log-prob may be another in another batch
REPEATS = (0.02, 0.5)  # shares of responses that are copies of earlier ones
BIASES = (-0.5, -0.1, 0.1, 0.5)  # of one token: the engine would draw it so much more readily
WATCHED = 32  # tokens that such bets are made on
SHARES = ((0.8, len(TILTS)), (0.1, len(REPEATS)), (0.1, WATCHED * len(BIASES)))  # of all bets, by their kind
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


class Bets:
    """Products of factors that have mean 1 at most where an engine is sound, whatever came before them.

    Averages of such products are supermartingales, which by Ville's inequality ever exceed 1 / FALSE_ALARM with
    probability FALSE_ALARM at most. Those that begin with the first batch have the weight 0.9, and with every later
    batch j new ones begin with 0.1 / (j (j - 1)), which sums to 0.1: so an engine that breaks late is found nearly as
    quickly as one that is broken from the start.

    Args:
        shares: weight of each bet, [bets] float64, which sum to 1.
    """

    def __init__(self, shares: Tensor) -> None:
        self._weights, self._batches = shares.log(), 0
        self.products = torch.full_like(shares, -math.inf)  # log of each bet's

    def add(self, logs: Tensor) -> float:
        """Take in the log of each bet's factors in one more batch, [bets]; return `share`."""
        self._batches += 1
        begun = 0.9 if self._batches == 1 else 0.1 / (self._batches * (self._batches - 1.0))
        self.products = torch.logaddexp(self.products, self._weights + math.log(begun)) + logs
        return self.share

    @property
    def share(self) -> float:
        """Return the evidence as a share of what ends a run: 1 is FALSE_ALARM, below 0 speaks for the engine."""
        return float(self.products.logsumexp(0)) / -math.log(FALSE_ALARM) if self._batches else 0.0


class SamplingEvidence:
    """Accumulates evidence that an engine samples from another distribution than it reports.

    Each of its bets (`Bets`) is a factor for every token or response that has mean 1 where that was drawn as reported:

    - Another temperature. Of a token x let f(x) be its reported log-prob, at least FLOOR, and outside the list the
      smallest f in it. For every tilt d the factor is exp(d f(x)) / E[exp(d f)], E over the reported distribution: the
      likelihood ratio of an engine at 1 / (1 + d) of its temperature.
    - Equal responses, as of one seed for all. That a response equals one before it in its group has a probability p of
      at most the sum of their reported ones; the factor is 1 - b, plus b / p where it does, for every share b.
    - One token too often or too rarely. Of a token v that the first batch had most reason to draw, the factor is
      (1 + d [x = v]) / (1 + d p(v)) for every bias d, where the list has v: the likelihood ratio of an engine that
      draws it 1 + d times as readily.

    Expectations are raised by what rounding can add (ROUNDING). The products of all bets are averaged by SHARES.
    """

    def __init__(self) -> None:
        shares = [share / count for share, count in SHARES for _ in range(count)]
        self._bets = Bets(torch.tensor(shares, dtype=torch.float64))
        self._watched: Tensor | None = None  # [WATCHED] ids in ascending order, -1 where there were fewer
        self._tokens = 0
        self._drawn = self._expected = 0.0  # sums of f as drawn, and as the reported distributions expect it

    def add(self, lists: ReportedLists, rollouts: Sequence[Rollout] = ()) -> float:
        """Take in the sampled tokens of one more batch; return the evidence, as `Bets.share`.

        Args:
            rollouts: whole responses of the batch, whose equality is looked at.

        Raises:
            EngineError: the engine samples from another distribution than it reports.
        """
        if lists.top_ids.numel():
            self._bets.add(torch.cat([self._tilted(lists), _repeated(rollouts), self._biased(lists)]))

        if (share := self._bets.share) >= 1.0:
            raise EngineError(
                f"the engine reports one distribution and samples from another: over {self._tokens} tokens since the "
                f"start, {self._most()}"
            )
        return share

    def _most(self) -> str:
        """Say what the largest product bets on."""
        largest = int(self._bets.products.argmax()) - len(TILTS)
        if largest < 0:
            drawn, expected = self._drawn / self._tokens, self._expected / self._tokens
            return (
                f"the drawn ones have a log-prob of {drawn:.3f} on average, and by the reported probabilities it would "
                f"be {expected:.3f}. Have it return processed log-probs, of the temperature, top_p and top_k that it "
                f"samples with"
            )

        if (largest := largest - len(REPEATS)) < 0:
            return (
                "responses to one prompt are equal far more often than their reported probabilities allow. Does it "
                "have one seed for all requests, or a cache of answers?"
            )

        assert self._watched is not None
        token, bias = divmod(largest, len(BIASES))
        often = "more often" if BIASES[bias] > 0 else "less often"
        return (
            f"the token {int(self._watched[token])} is drawn {often} than by its reported probability. Does it add a "
            f"bias to logits, or a penalty, after it has computed log-probs?"
        )

    def _tilted(self, lists: ReportedLists) -> Tensor:
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

    def _biased(self, lists: ReportedLists) -> Tensor:
        """Return the log of each product over the tokens that bets on one token, [WATCHED * biases]; 0 at first."""
        probs = lists.top_log_probs.exp()
        logs = torch.zeros(WATCHED, len(BIASES), dtype=torch.float64)
        if self._watched is None:
            expected = lists.top_ids.flatten().bincount(probs.flatten())
            likely = expected.topk(min(WATCHED, len(expected))).indices
            self._watched = torch.cat([likely, likely.new_full((WATCHED - len(likely),), -1)]).sort().values
            return logs.flatten()

        index = torch.searchsorted(self._watched, lists.top_ids.contiguous()).clamp(max=WATCHED - 1)
        at = self._watched[index] == lists.top_ids
        drawn, chance = (lists.top_ids == lists.token_ids[:, None])[at].double(), probs[at]
        for column, bias in enumerate(BIASES):
            factors = (bias * drawn).log1p() - (bias * chance + abs(bias) * ROUNDING).log1p()
            logs[:, column].index_add_(0, index[at], factors)
        return logs.flatten()


def _repeated(rollouts: Sequence[Rollout]) -> Tensor:
    """Return the log of each product over responses that bets on equal ones, [shares]."""
    before: dict[
        tuple[str, tuple[int, ...]], dict[bytes, float]
    ] = {}  # by prompt: responses so far, with probabilities
    logs = torch.zeros(len(REPEATS), dtype=torch.float64)

    for rollout in rollouts:
        earlier = before.setdefault((rollout.prompt.uid, rollout.prompt.token_ids), {})
        response = rollout.token_ids.numpy().tobytes()
        if earlier:
            chance = min(1.0, sum(earlier.values()))
            logs += torch.tensor(
                [math.log(1.0 - bet + (bet / max(chance, 1e-300) if response in earlier else 0.0)) for bet in REPEATS]
            )
        log_probs = rollout.rollout_log_probs[rollout.sampled_mask].double()
        earlier[response] = math.exp(min(0.0, float((log_probs + ANOTHER_PASS).sum())))
    return logs
