"""Sums of the gaps between sampler and learner over responses, and the numbers of a comparison that they give."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor

from jackpot.analysis.mismatch.tokens import TokenMismatch
from jackpot.core.bands import POSITIONS, band_masks
from jackpot.core.errors import DataError
from jackpot.core.metrics import ClusteredMean
from jackpot.core.statistics import Estimate, Sample

ENTROPY_BANDS = (0.0, 0.01, 0.1, 0.5, 1.0, 2.0, 4.0)  # nats, the starts of the bands of entropy
QUANTILES = (0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999, 1.0)
HIGH_GAP = 0.5  # gap |p - q| above which a response is counted as high, as in the TIS post that docs/mismatch.md links
FAR = 2.0  # ratio q/p above which, or below 1 / FAR, the two probabilities of a token count as far apart
DRAWN_TOKENS = 2_000  # most tokens that are kept for the picture of p against q


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseGap:
    """The gaps |p - q| at the tokens of one response, with p of the sampler and q of the learner."""

    uid: str
    tokens: int  # number of sampled tokens
    max_gap: float  # largest |p - q|
    mean_gap: float  # mean |p - q|


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBand:
    """The mismatch at all tokens in one band of response length, position or entropy.

    A field means the same as the field of that name in `MismatchNumbers`.
    """

    name: str
    tokens: int  # number of tokens
    gap: Estimate
    max_gap: float
    k1: Estimate
    k3: Estimate
    kl: tuple[Estimate, Estimate] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class MismatchNumbers:
    """The mismatch between a sampler, with probabilities p, and a learner, with probabilities q.

    Means are over sampled tokens unless noted, with standard errors clustered by response. KLs are in nats.
    """

    responses: int
    tokens: int
    max_gap: float  # largest |p - q| of all tokens
    gap: Estimate  # mean |p - q|
    response_max_gap: Estimate  # mean over responses of their largest gap
    response_mean_gap: Estimate  # mean over responses of their mean gap
    high: int  # number of responses whose largest gap is above HIGH_GAP
    log_gap: Estimate  # mean |log p - log q|, nats
    other_token: Estimate | None  # share of tokens where p and q are greatest at different tokens; None: unknown
    other_experts: Estimate | None  # share of tokens with other experts in the learner, in any layer; None: unknown
    k1: Estimate  # mean of log p/q: KL(sampler || learner), noisy, can be below 0
    k3: Estimate  # mean of q/p - 1 - log q/p: the same KL, never below 0
    kl: tuple[Estimate, Estimate] | None  # lower and upper bound of KL(sampler || learner); None if unknown
    kl_is_exact: bool  # whether the two bounds are equal
    variation: tuple[Estimate, Estimate] | None  # bounds of the total variation, the share OBRS rejects at lam = 1
    ratio: Estimate  # mean q/p: the learner's mass on tokens that the sampler can draw; 1 where it can draw all
    quantiles: dict[str, float]  # share of tokens -> quantile of q/p
    above: float  # share of tokens with q/p above FAR
    below: float  # share of tokens with q/p below 1 / FAR
    support: Estimate | None  # the learner's mass on a truncated sampler's support; None without truncation
    bands: dict[str, tuple[TokenBand, ...]]  # by kind: length, position, and the learner's entropy if that is known
    each: tuple[ResponseGap, ...]  # gaps of every response
    drawn: tuple[tuple[float, float], ...]  # (p, q) of tokens spread evenly over all, at most DRAWN_TOKENS


def mismatch_numbers(responses: Iterable[tuple[str, TokenMismatch]]) -> MismatchNumbers:
    """Return the mismatch over all responses, each with its uid; a response without a sampled token is ignored.

    Raises:
        DataError: no response has a sampled token.
    """
    named = [(uid, tokens) for uid, tokens in responses if len(tokens.position)]
    if not named:
        raise DataError("no token was sampled, so there is nothing to compare; ask for more responses or tokens")

    gaps = [(uid, tokens.gap) for uid, tokens in named]
    each = tuple(
        ResponseGap(uid=uid, tokens=len(gap), max_gap=float(gap.max()), mean_gap=float(gap.mean())) for uid, gap in gaps
    )
    log_ratios = torch.cat([tokens.log_ratio for _, tokens in named])
    # [tokens, 2]: the sampler's and the learner's probability of each token.
    probabilities = torch.cat([torch.stack([tokens.sampler, tokens.learner], dim=-1).float() for _, tokens in named])

    # The first band has all tokens: `means` and `whole` are the numbers of the whole comparison.
    (_, means, whole), *parts = _bands([tokens for _, tokens in named])
    bands: dict[str, tuple[TokenBand, ...]] = {}
    for kind, _, band in parts:
        bands[kind] = (*bands.get(kind, ()), band)

    return MismatchNumbers(
        responses=len(each),
        tokens=len(log_ratios),
        max_gap=whole.max_gap,
        gap=means["gap"],
        response_max_gap=Sample(tuple(response.max_gap for response in each)).estimate,
        response_mean_gap=Sample(tuple(response.mean_gap for response in each)).estimate,
        high=sum(response.max_gap > HIGH_GAP for response in each),
        log_gap=means["log_gap"],
        other_token=means.get("other_token"),
        other_experts=means.get("other_experts"),
        k1=means["k1"],
        k3=means["k3"],
        kl=_bounds(means, "kl"),
        kl_is_exact=all(tokens.is_exact for _, tokens in named),
        variation=_bounds(means, "variation"),
        ratio=means["ratio"],
        quantiles=_quantiles(log_ratios),
        # Shares of the tokens whose ratio q/p is above FAR, or below 1 / FAR.
        above=float((log_ratios > math.log(FAR)).double().mean()),
        below=float((log_ratios < -math.log(FAR)).double().mean()),
        support=means.get("support"),
        bands=bands,
        each=each,
        drawn=_drawn(probabilities),
    )


def _bands(responses: Sequence[TokenMismatch]) -> Iterator[tuple[str, dict[str, Estimate], TokenBand]]:
    """Yield every band that has tokens, the first of which has all: its kind, its means, and the band itself.

    The means are those of the quantities in `_averaged`, by name.
    """
    bands, quantities = _masks(responses[0]), _averaged(responses[0])
    all_sums, all_gaps = zip(*map(_response_sums, responses), strict=True)
    sums, max_gaps = reduce(add, all_sums), torch.stack(all_gaps).amax(0)

    for row, (kind, name) in enumerate(bands):
        # A `ClusteredMean` for each quantity, made of the entries [row, quantity] of all fields of the sums.
        by_name = zip(quantities, *(field[row] for field in sums), strict=True)
        means = {quantity: mean for quantity, *values in by_name if (mean := ClusteredMean(*values).estimate)}
        if means:
            band = TokenBand(
                name=name,
                tokens=int(sums.count[row, 0]),  # every quantity has the same count
                gap=means["gap"],
                max_gap=float(max_gaps[row]),
                k1=means["k1"],
                k3=means["k3"],
                kl=_bounds(means, "kl"),
            )
            yield kind, means, band


def _response_sums(tokens: TokenMismatch) -> tuple[ClusteredMean, Tensor]:
    """Return what a response adds to the means of each quantity over the tokens of each band, and its largest gaps.

    A band is a range of lengths, positions or entropies. The first is [bands, quantities], the second [bands], in the
    order of `_masks` and `_averaged`.
    """
    masks, values = torch.stack([*_masks(tokens).values()]), torch.stack([*_averaged(tokens).values()])
    totals = torch.where(masks[:, None], values, 0.0).sum(-1)
    counts = masks.sum(-1, keepdim=True).double().expand_as(totals)
    sums = ClusteredMean(
        total=totals,
        count=counts,
        squares=totals.square(),
        products=totals * counts,
        counts=counts.square(),
        responses=(counts > 0).double(),
    )
    return sums, torch.where(masks, tokens.gap, -math.inf).amax(-1)


def _bounds(means: Mapping[str, Estimate], name: str) -> tuple[Estimate, Estimate] | None:
    """Return the means of the lower and the upper bound of a quantity, such as `kl`; None where they are unknown."""
    return (means[f"{name}_low"], means[f"{name}_high"]) if f"{name}_low" in means else None


def _masks(tokens: TokenMismatch) -> dict[tuple[str, str], Tensor]:
    """Return which tokens lie in each band, [N] bool, by the band's kind and name; the first band has all tokens."""
    count = len(tokens.gap)
    # For each kind the value of every token, and the values at which the bands start.
    kinds: dict[str, tuple[Tensor, Sequence[float]]] = {
        "length": (torch.full_like(tokens.position, count), POSITIONS),
        "position": (tokens.position, POSITIONS),
    }
    if tokens.entropy is not None:
        kinds["entropy"] = (tokens.entropy.clamp(min=0.0), ENTROPY_BANDS)  # rounding can leave a little less than 0

    whole = {("all", ""): torch.ones(count, dtype=torch.bool)}
    return whole | {
        (kind, name): mask
        for kind, (values, starts) in kinds.items()
        for name, mask in band_masks(values, starts).items()
    }


def _averaged(tokens: TokenMismatch) -> dict[str, Tensor]:
    """Return the quantities to average over tokens, [N] each, by name; p is the sampler's probability, q the learner's.

    Quantities that are None in `tokens` are left out.
    """
    quantities = {
        "gap": tokens.gap,
        "log_gap": tokens.log_ratio.abs(),
        # k1 and k3 estimate KL(p || q) from sampled tokens alone.
        "k1": -tokens.log_ratio,
        "k3": torch.expm1(tokens.log_ratio) - tokens.log_ratio,
        "ratio": tokens.log_ratio.exp(),
    }

    # Unknown for some pairs of engines. `other_token` and `other_experts`: 1 where the most probable tokens, or the
    # experts, of the two sides differ. `support`: the learner's mass on the tokens that a truncated sampler can draw.
    for name, bounds in (("kl", tokens.kl), ("variation", tokens.variation)):
        if bounds is not None:
            quantities |= {f"{name}_low": bounds[0], f"{name}_high": bounds[1]}
    for name in ("support", "other_token", "other_experts"):
        if (values := getattr(tokens, name)) is not None:
            quantities[name] = values
    return quantities


def _quantiles(log_ratios: Tensor) -> dict[str, float]:
    """Return quantiles of q/p by share of tokens: the smallest ratio that this share of the tokens does not exceed.

    q is the learner's probability of a token, p the sampler's.
    """
    ordered = log_ratios.sort().values
    indices = [max(0, math.ceil(share * len(ordered)) - 1) for share in QUANTILES]
    return {f"{share:g}": math.exp(float(ordered[index])) for share, index in zip(QUANTILES, indices, strict=True)}


def _drawn(pairs: Tensor) -> tuple[tuple[float, float], ...]:
    """Pick at most DRAWN_TOKENS of N tokens for the picture of p against q: every n-th, and that of the largest gap.

    p is the sampler's probability of a token, q the learner's; `pairs` is [N, 2].
    """
    step = max(1, math.ceil(len(pairs) / (DRAWN_TOKENS - 1)))  # - 1: a place is left for the largest gap
    worst = int((pairs[:, 0] - pairs[:, 1]).abs().argmax())
    rows = sorted({*range(0, len(pairs), step), worst})
    return tuple((float(p), float(q)) for p, q in pairs[rows].tolist())
