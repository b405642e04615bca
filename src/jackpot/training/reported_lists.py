"""Checks of an engine's report that need no forward pass: of top-k lists, and whether tokens are sampled as reported.

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

LISTED_TOKENS = 65536  # rollouts of a batch are read until they have this many tokens
LARGEST_MASS = 1.0 + 1e-3  # largest sum of the probabilities of a top-k list, with room for rounding
FALSE_ALARM = 1e-9  # probability that `Bets` ever refuse a sound engine, in a run of any length
TILTS = (-0.25, -0.09, -0.03, 0.03, 0.09, 0.25)  # for each d, a bet that the engine samples at temperature / (1 + d)
ANOTHER_PASS = 0.02  # most nats by which a token's log-prob may differ when another batch computes it
REPEATS = (0.02, 0.5)  # for each b, a bet that this share of the responses are copies of earlier ones
BIASES = (-0.5, -0.1, 0.1, 0.5)  # for each d, bets that the engine multiplies one token's probability by 1 + d
WATCHED = 32  # number of tokens on which the bets of BIASES are made
# For each kind of bet, its weight in the average of all bets, and how many bets are of this kind.
SHARES = ((0.8, len(TILTS)), (0.1, len(REPEATS)), (0.1, WATCHED * len(BIASES)))
FLOOR = -10.0  # nats; lower log-probs count as this number
ROUNDING = 1e-5  # largest total variation that rounding makes between sampled and reported distribution of a token


class ReportedLists(NamedTuple):
    """What an engine reported of N sampled tokens: their ids, and the top-k list at each token's position."""

    token_ids: Tensor  # [N] int64, as drawn
    top_ids: Tensor  # [N, K] int64, most probable first
    top_log_probs: Tensor  # [N, K] float64, -inf outside the support of a truncated distribution

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> "ReportedLists":
        """Join what is reported of the sampled tokens of a batch's first rollouts.

        Rollouts are taken until they have LISTED_TOKENS tokens together, sampled or not, or until none is left.
        """
        # Number of tokens in the rollouts before each rollout; a last number, of all rollouts, is left out by the zip.
        before = accumulate((len(rollout.token_ids) for rollout in rollouts), initial=0)
        rollouts = [rollout for rollout, tokens in zip(rollouts, before, strict=False) if tokens < LISTED_TOKENS]
        sampled = torch.cat([rollout.sampled_mask for rollout in rollouts])
        return cls(
            token_ids=torch.cat([rollout.token_ids for rollout in rollouts])[sampled],
            top_ids=torch.cat([rollout.top_ids for rollout in rollouts])[sampled],
            top_log_probs=torch.cat([rollout.top_log_probs for rollout in rollouts])[sampled].double(),
        )


def check_ids(rollouts: Sequence[Rollout], vocab_size: int) -> None:
    """Refuse token ids outside the vocabulary, of responses and of top-k lists, since the learner does not check ids.

    Raises:
        EngineError: an id lies outside the vocabulary.
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
        EngineError: a list has an id twice, or probabilities that sum to more than 1.
    """
    if not lists.top_ids.numel():
        return

    ids = lists.top_ids.sort(dim=-1).values  # equal ids are now neighbours
    twice = int((ids[:, 1:] == ids[:, :-1]).any(-1).sum())
    mass = lists.top_log_probs.exp().sum(-1)

    # Each problem with whether the lists have it; a sum that is NaN counts as too large.
    problems = {
        f"{twice} of {len(ids)} name a token twice": twice > 0,
        f"the probabilities of one sum to {float(mass.max()):.6g}": not bool((mass <= LARGEST_MASS).all()),
    }
    if named := [problem for problem, is_so in problems.items() if is_so]:
        raise EngineError(
            f"the engine's top-k lists are no part of a distribution: {'; '.join(named)}. Z is made of them, so "
            f"nothing can be corrected with them; look at how the engine fills top_ids and top_log_probs"
        )


class Bets:
    """A test of an engine by bets: a bet multiplies factors, one for each batch, into a running product.

    If the engine is sound, the mean of a factor must be at most 1 whatever came before. The weighted average of all
    products is then a supermartingale, which by Ville's inequality ever exceeds 1 / FALSE_ALARM with probability
    FALSE_ALARM at most. Every bet begins a new product with every batch, so that an engine that breaks late is found
    nearly as quickly as one that is broken from the start. The products that begin with the first batch have the weight
    0.9, those that begin with a later batch j have 0.1 / (j (j - 1)), which sums to 0.1 over all j.

    Args:
        shares: weight of each bet in the average, [bets] float64; they sum to 1.
    """

    def __init__(self, shares: Tensor) -> None:
        self._weights, self._batches = shares.log(), 0
        self.products = torch.full_like(shares, -math.inf)  # [bets], log of the weighted sum of each bet's products

    def add(self, log_factors: Tensor) -> float:
        """Multiply the running products of every bet by the bet's factor in a new batch; return `share`, the evidence.

        Before that, every bet begins one more product, which is 1.

        Args:
            log_factors: log of each bet's factor in the batch, [bets].
        """
        self._batches += 1
        # The new product's weight in the average of a bet's products: 0.9 for the first, all later ones sum to 0.1.
        new_weight = 0.9 if self._batches == 1 else 0.1 / (self._batches * (self._batches - 1.0))
        # All in logs: add the new product, 1 times its weight and the bet's, to each bet's weighted sum; then multiply
        # the sum by the factor.
        self.products = torch.logaddexp(self.products, self._weights + math.log(new_weight)) + log_factors
        return self.share

    @property
    def share(self) -> float:
        """Return the evidence against the engine, as a share of the evidence at which a run ends.

        The evidence is the log of the weighted average of the products of all bets, and a run ends at
        log(1 / FALSE_ALARM). A share below 0 is no evidence against the engine.
        """
        return float(self.products.logsumexp(0)) / -math.log(FALSE_ALARM) if self._batches else 0.0


class SamplingEvidence:
    """The evidence in a run that an engine samples from another distribution than it reports.

    A bet (`Bets`) has a factor for every token or response, whose mean is 1 if the engine draws as it reports. Kinds:

    - Another temperature. For a token x let f(x) be its reported log-prob, at least FLOOR; for a token outside the
      top-k list, f is the smallest f in the list. For every d in TILTS the factor is exp(d f(x)) / E[exp(d f)], with E
      over the reported distribution. It is the likelihood ratio of an engine whose temperature is divided by 1 + d.
    - Equal responses, as if all had one seed. The probability p that a response equals an earlier one of its group
      is at most the sum of the probabilities reported for the earlier ones. For every b in REPEATS the factor is 1 - b,
      plus b / p where the response does equal an earlier one.
    - One token too often or too rarely. For each of the tokens v that the first batch should have drawn most, and every
      d in BIASES, the factor is 1 / (1 + d p(v)) where the list has v, times 1 + d where v is drawn. It is the
      likelihood ratio of an engine that multiplies the weight of v by 1 + d.

    The divisors E and 1 + d p(v) are raised by the most that rounding can add (ROUNDING). The average of all bets
    weighs the kinds by SHARES.
    """

    def __init__(self) -> None:
        # The weight of each kind of bet, divided equally among the bets of the kind.
        shares = [share / count for share, count in SHARES for _ in range(count)]
        self._bets = Bets(torch.tensor(shares, dtype=torch.float64))
        self._watched: Tensor | None = None  # [WATCHED] ascending ids, -1 for a missing one; None at first
        self._tokens = 0
        self._drawn = self._expected = 0.0  # sums over tokens: f of the drawn token, and E[f]

    def add(self, lists: ReportedLists, rollouts: Sequence[Rollout] = ()) -> float:
        """Add the sampled tokens of a batch to the evidence; return the evidence so far (`Bets.share`).

        Args:
            lists: the sampled tokens with their top-k lists.
            rollouts: whole responses of the batch, for the bets on equal responses.

        Raises:
            EngineError: the engine samples from another distribution than it reports.
        """
        if lists.top_ids.numel():
            # The three kinds of bets, on temperatures, equal responses and single tokens, in the order of SHARES.
            by_kind = (
                self._temperature_log_factors(lists),
                _repeat_log_factors(rollouts),
                self._token_log_factors(lists),
            )
            self._bets.add(torch.cat(by_kind))

        if (share := self._bets.share) >= 1.0:
            raise EngineError(
                f"the engine reports one distribution and samples from another: over {self._tokens} tokens since the "
                f"start, {self._strongest_bet()}"
            )
        return share

    def _strongest_bet(self) -> str:
        """Describe, for the error, what is wrong with the engine if the bet with the largest product is right."""
        # The bets stand in the order of SHARES: on the temperature, on equal responses, on single tokens. Subtract the
        # number of bets of each kind in turn: the index becomes negative at the kind of the strongest bet.
        index = int(self._bets.products.argmax()) - len(TILTS)
        if index < 0:  # a bet on another temperature
            drawn, expected = self._drawn / self._tokens, self._expected / self._tokens
            return (
                f"the drawn ones have a log-prob of {drawn:.3f} on average, and by the reported probabilities it would "
                f"be {expected:.3f}. Have it return processed log-probs, of the temperature, top_p and top_k that it "
                f"samples with"
            )

        if (index := index - len(REPEATS)) < 0:  # a bet on equal responses
            return (
                "responses to one prompt are equal far more often than their reported probabilities allow. Does it "
                "have one seed for all requests, or a cache of answers?"
            )

        assert self._watched is not None  # the first batch has chosen the tokens
        # A bet on a single token. The bets of one token stand together, one for each of BIASES.
        token, bias = divmod(index, len(BIASES))
        often = "more often" if BIASES[bias] > 0 else "less often"
        return (
            f"the token {int(self._watched[token])} is drawn {often} than by its reported probability. Does it add a "
            f"bias to logits, or a penalty, after it has computed log-probs?"
        )

    def _temperature_log_factors(self, lists: ReportedLists) -> Tensor:
        """Return the log of the factor by which a batch multiplies each bet on another temperature, [tilts].

        The factor of a bet with the tilt d, one of TILTS, is the product of exp(d f) / E[exp(d f)] over the tokens,
        where f is a token's reported log-prob, at least FLOOR, and E the mean over the reported distribution. For the
        error's text, f of the drawn tokens and E[f] are added up, too.
        """
        probs, f = lists.top_log_probs.exp(), lists.top_log_probs.clamp(min=FLOOR)  # [N, K], of the tokens in the lists
        # Tokens outside the list, taken together: their f, and the probability that is left for them, [N].
        f_outside, prob_outside = f.min(-1).values, (1.0 - probs.sum(-1)).clamp(min=0.0)
        is_drawn = lists.top_ids == lists.token_ids[:, None]  # [N, K]
        f_drawn = torch.where(is_drawn.any(-1), torch.where(is_drawn, f, 0.0).sum(-1), f_outside)

        self._tokens += len(f_drawn)
        self._drawn += float(f_drawn.sum())
        self._expected += float((probs * f).sum() + (prob_outside * f_outside).sum())

        logs = []
        for tilt in TILTS:
            mean = (probs * (tilt * f).exp()).sum(-1) + prob_outside * (tilt * f_outside).exp()  # E[exp(d f)], [N]
            # d is `tilt`. Rounding raises the mean at most by ROUNDING times the largest exp(d f), at f = 0 or FLOOR.
            highest_mean = mean + ROUNDING * max(1.0, math.exp(tilt * FLOOR))
            logs.append((tilt * f_drawn - highest_mean.log()).sum())
        return torch.stack(logs)

    def _token_log_factors(self, lists: ReportedLists) -> Tensor:
        """Return the log of the factor by which a batch multiplies each bet that a token comes too often or too rarely.

        [WATCHED * len(BIASES)]; the bets of one token stand together. The first batch only chooses the tokens to bet
        on, those that are to be expected most often by its reported probabilities; all of its factors are 1.
        """
        probs = lists.top_log_probs.exp()
        logs = torch.zeros(WATCHED, len(BIASES), dtype=torch.float64)  # a bet in each entry; log 1 to begin with
        if self._watched is None:
            # How often each id is drawn on average, if the report is true: the sum of its reported probabilities.
            expected = lists.top_ids.flatten().bincount(probs.flatten())
            frequent = expected.topk(min(WATCHED, len(expected))).indices
            # Ascending, for `searchsorted`; -1, which is no id, fills up where there are fewer ids than WATCHED.
            self._watched = torch.cat([frequent, frequent.new_full((WATCHED - len(frequent),), -1)]).sort().values
            return logs.flatten()

        # For each listed id, [N, K]: its place among the watched tokens, and whether it is one of them.
        place = torch.searchsorted(self._watched, lists.top_ids.contiguous()).clamp(max=WATCHED - 1)
        is_watched = self._watched[place] == lists.top_ids
        # For each listed id that is watched: whether it was drawn (1 or 0), and its reported probability.
        drawn, chance = (lists.top_ids == lists.token_ids[:, None])[is_watched].double(), probs[is_watched]
        # Add the log of the factor (`SamplingEvidence`) of each listed id that is watched to the bets on that id.
        for column, bias in enumerate(BIASES):
            log_factors = (bias * drawn).log1p() - (bias * chance + abs(bias) * ROUNDING).log1p()
            logs[:, column].index_add_(0, place[is_watched], log_factors)
        return logs.flatten()


def _repeat_log_factors(rollouts: Sequence[Rollout]) -> Tensor:
    """Return the log of the factor by which a batch multiplies each bet on equal responses to a prompt, [REPEATS].

    `SamplingEvidence` explains the bets. The first response to a prompt in the batch changes none of them.
    """
    # For each prompt, its earlier responses (bytes of the token ids) with their probabilities.
    before: dict[tuple[str, tuple[int, ...]], dict[bytes, float]] = {}
    logs = torch.zeros(len(REPEATS), dtype=torch.float64)

    for rollout in rollouts:
        earlier = before.setdefault((rollout.prompt.uid, rollout.prompt.token_ids), {})
        response = rollout.token_ids.numpy().tobytes()
        if earlier:
            chance = min(1.0, sum(earlier.values()))  # upper bound of the chance that it equals an earlier one
            # The factor of the bet on a share b is 1 - b or, for a copy of an earlier response, 1 - b + b / chance. A
            # chance too small for a float counts as 1e-300.
            logs += torch.tensor(
                [math.log(1.0 - b + (b / max(chance, 1e-300) if response in earlier else 0.0)) for b in REPEATS]
            )
        # The highest probability that another forward pass may give the response: ANOTHER_PASS nats more a token.
        log_probs = rollout.rollout_log_probs[rollout.sampled_mask].double()
        earlier[response] = math.exp(min(0.0, float((log_probs + ANOTHER_PASS).sum())))
    return logs
