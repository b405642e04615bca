"""The mismatch between the sampler's and the learner's probabilities of one response, token by token.

p is the probability of the sampler, which generated the response; q is that of the learner, which scores it. The tokens
are those that the sampler drew, so a mean over tokens is a mean under p.

Shapes: `T` response tokens, `K` tokens whose p is known, `V` vocabulary, `N` sampled tokens. Log-probs are in nats.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from jackpot.analysis.mismatch.learner import LearnerScores
from jackpot.core.errors import EngineError

_SMALLEST_MASS = 1e-6  # probability of the tail, 1 - sum p, below which it may be float32's rounding of the sum


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerScores:
    """The sampler's log-probs of one response, which the sampler generated."""

    uid: str
    sampled: Tensor  # [T] bool, False at a tool's tokens
    log_probs: Tensor  # [T] log p of the response's tokens
    top_ids: Tensor  # [T, K] int64, the tokens whose p is known
    top_log_probs: Tensor  # [T, K] log p at `top_ids`, -inf outside the support of a truncated distribution
    vocabulary: int  # V
    truncated: bool  # whether p is renormalized after top-p or top-k
    experts: Tensor | None = None  # [T, layers, experts of a token] int64, those the sampler used; None: not known


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenMismatch:
    """The mismatch at the N sampled tokens of one response: [N] float64 unless noted, None for unknown quantities.

    p is the sampler's distribution at a token, and q the learner's. `kl` has a lower and an upper bound of KL(p || q),
    and `variation` those of the total variation; the two are equal where the whole of p is known.
    """

    position: Tensor  # int64, place among all tokens of the response, sampled or not
    sampler: Tensor  # p, the sampler's probability of the token
    learner: Tensor  # q, the learner's; with a truncated sampler renormalized on the sampler's support
    log_ratio: Tensor  # log q/p
    kl: tuple[Tensor, Tensor] | None
    variation: tuple[Tensor, Tensor] | None
    is_exact: bool  # whether the two bounds are equal, of `kl` and of `variation`
    support: Tensor | None  # the learner's mass on tokens that the sampler can draw; None without truncation
    entropy: Tensor | None  # entropy of the learner, or of the sampler where only that is known
    other_token: Tensor | None = None  # 1 where the most probable token differs; None where one side is unknown
    other_experts: Tensor | None = None  # 1 where the experts of any layer differ; None where they are unknown

    @property
    def gap(self) -> Tensor:
        """Return |p - q|, [N], of the sampler's probability p and the learner's probability q of each sampled token."""
        return (self.sampler - self.learner).abs()


def token_mismatch(sampler: SamplerScores, learner: LearnerScores) -> TokenMismatch:
    """Compute the mismatch at every sampled token of one response.

    If the sampler is truncated, the learner's probabilities q are renormalized on the tokens that the sampler can draw,
    as corrections do it.

    Args:
        sampler: the sampler's scores.
        learner: the learner's scores of the same response.

    Raises:
        EngineError: a log-prob is NaN; or the sampler is truncated, and either can draw tokens outside of `top_ids`, or
            meets a learner that scores single tokens only.
    """
    sampled = sampler.sampled
    log_p, log_q = sampler.log_probs[sampled].double(), learner.log_probs[sampled].double()
    if bool(log_p.isnan().any() | log_q.isnan().any()):
        raise EngineError(
            f"{sampler.uid} has log-probs that are NaN; one of the two sides computes no distribution there"
        )

    top_p = sampler.top_log_probs[sampled].double()
    top_q = None if learner.top_log_probs is None else learner.top_log_probs[sampled].double()

    support = None
    if sampler.truncated:
        # log_mass: log of q's probability on the tokens that the sampler can draw, by which q is divided.
        top_q, log_mass = _on_support(sampler, top_p, top_q)
        log_q, support = log_q - log_mass, log_mass.exp()

    kl = variation = None
    # Whether the K tokens whose p is known are all that the sampler can draw.
    is_whole = sampler.truncated or top_p.shape[1] == sampler.vocabulary
    if top_q is not None and top_p.shape[1]:
        lowest = None  # smallest log q outside of the K tokens
        if not is_whole:
            assert learner.lowest is not None  # a learner that gives `top_log_probs` gives `lowest` too
            lowest = learner.lowest[sampled].double()
        kl, variation = _divergences(top_p, top_q, lowest)

    return TokenMismatch(
        position=sampled.nonzero()[:, 0],
        sampler=log_p.exp(),
        learner=log_q.exp(),
        log_ratio=log_q - log_p,
        kl=kl,
        variation=variation,
        is_exact=kl is not None and is_whole,
        support=support,
        entropy=_entropy(sampler, learner, top_p),
        other_token=_top_token_differs(sampler, learner),
        other_experts=_experts_differ(sampler, learner),
    )


def _on_support(sampler: SamplerScores, top_p: Tensor, top_q: Tensor | None) -> tuple[Tensor, Tensor]:
    """Restrict the learner's q to the support of a truncated sampler, the tokens with p > 0, and renormalize q.

    Returns:
        The renormalized log q, [N, K] with -inf outside the support; and the log of q's mass on the support, [N].

    Raises:
        EngineError: the learner scores single tokens only, or the support has more than the K tokens of `top_p`.
    """
    if top_q is None:
        raise EngineError(
            "the sampler leaves out tokens (top_p, top_k), and this learner gives the probability of single tokens "
            "only, not of all that the sampler could draw; use sampling.top_p=1.0 sampling.top_k=0, or a learner with "
            "name=transformers"
        )

    # A list of K tokens that has one with p = 0 holds the whole support.
    possible = top_p > -torch.inf
    if top_p.shape[1] < sampler.vocabulary and not bool((~possible).any(-1).all()):
        raise EngineError(
            f"{sampler.uid}: the sampler could draw more than the {top_p.shape[1]} tokens whose probability it "
            f"reports; raise top_log_probs, or use a smaller sampling.top_k, or sampling.top_p=1.0 sampling.top_k=0"
        )

    top_q = top_q.masked_fill(~possible, -torch.inf)
    log_mass = top_q.logsumexp(-1)
    return top_q - log_mass[:, None], log_mass


def _divergences(log_p: Tensor, log_q: Tensor, lowest: Tensor | None) -> tuple[tuple[Tensor, Tensor], ...]:
    """Return (lower bound, upper bound) of KL(p || q), then those of the total variation between p and q: [N] each.

    KL is summed as p log(p/q) - p + q, which has the same sum over whole distributions. Each term is at least 0, and
    rounding of p enters squared: sums of p log(p/q) would show float32's rounding of the sum of p as a KL of 1e-7.

    The tail is all tokens but the K whose p is known; m_p and m_q are its probabilities under p and q. By the log-sum
    inequality the terms of the tail sum to at least m_p log(m_p/m_q) - m_p + m_q. In the tail p is at most p_K, the
    least p of the K tokens, and q at least `lowest`. So its terms sum to at most m_p log(p_K / lowest) - m_p + m_q,
    which is loose.

    Args:
        log_p, log_q: [N, K] log-probs at the K tokens whose p is known.
        lowest: [N] the smallest log q of all tokens beyond the K; None where the K tokens are the whole support.
    """
    p, q = log_p.exp(), log_q.exp()
    terms = torch.where(p > 0, p * (log_p - log_q), 0.0) - p + q
    kl, variation = terms.sum(-1), 0.5 * (p - q).abs().sum(-1)
    if lowest is None:
        return (kl, kl), (variation, variation)

    # The probabilities m_p and m_q of the tail, all tokens but the K, and the bounds of the sum of the tail's KL terms.
    m_p, m_q = ((1.0 - mass.sum(-1)).clamp(min=0.0) for mass in (p, q))
    is_known = (m_p > _SMALLEST_MASS) & (m_q > _SMALLEST_MASS)
    tail_low = torch.where(is_known, m_p * (m_p / m_q).log() - m_p + m_q, 0.0).clamp(min=0.0)
    log_term_high = torch.where(m_p > 0, m_p * (log_p.amin(-1) - lowest), 0.0)
    tail_high = torch.maximum(tail_low, log_term_high - m_p + m_q)

    variation_low = variation + 0.5 * (m_p - m_q).abs()
    variation_high = variation + 0.5 * (m_p + m_q)
    return (kl + tail_low, kl + tail_high), (variation_low, variation_high)


def _top_token_differs(sampler: SamplerScores, learner: LearnerScores) -> Tensor | None:
    """Return 1 where the most probable tokens of sampler and learner differ, else 0: [N] float64.

    None if one side's most probable token is not known. Of several such tokens of the sampler, the first counts.
    """
    if learner.most_probable is None or not sampler.top_ids.shape[1]:
        return None
    first = sampler.top_log_probs.argmax(-1, keepdim=True)
    differs = sampler.top_ids.gather(1, first)[:, 0] != learner.most_probable
    return differs[sampler.sampled].double()


def _experts_differ(sampler: SamplerScores, learner: LearnerScores) -> Tensor | None:
    """Return 1 where sampler and learner send a token to different experts in any layer, else 0: [N] float64.

    None where the experts of one side are not known, or the two sides' numbers of layers or experts differ.
    """
    if sampler.experts is None or learner.experts is None or sampler.experts.shape != learner.experts.shape:
        return None
    return (sampler.experts != learner.experts)[sampler.sampled].flatten(1).any(1).double()


def _entropy(sampler: SamplerScores, learner: LearnerScores, top_p: Tensor) -> Tensor | None:
    """Return the learner's entropy at the sampled tokens, or else the sampler's: [N] nats; None if neither is known."""
    if learner.entropy is not None:
        return learner.entropy[sampler.sampled].double()
    if top_p.shape[1] < sampler.vocabulary:
        return None
    return -torch.where(top_p > -torch.inf, top_p.exp() * top_p, 0.0).sum(-1)
