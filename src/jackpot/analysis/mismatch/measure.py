"""Sums the gaps between sampler and learner over responses, and turns the sums into the numbers of a comparison.

Of each token its log-ratio and its two probabilities are kept (16 bytes), for quantiles and the picture; the rest are
sums, and a few numbers of each response.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jackpot.analysis.mismatch.tokens import TokenMismatch
from jackpot.core.bands import POSITIONS, band_masks, band_names
from jackpot.core.errors import DataError
from jackpot.core.metrics import ClusteredMean
from jackpot.core.statistics import Estimate, Sample

ENTROPY_BANDS = (0.0, 0.01, 0.1, 0.5, 1.0, 2.0, 4.0)  # nats, the starts of the bands of entropy
QUANTILES = (0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999, 1.0)
HIGH_GAP = 0.5  # gap above which the TIS post counts a response
FAR = 2.0  # ratio above which, or below whose inverse, a token is counted
DRAWN_TOKENS = 2_000  # tokens kept for the picture


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseGap:
    """The gaps of one response."""

    uid: str
    tokens: int  # number of sampled tokens
    max_gap: float  # largest |p - q|
    mean_gap: float  # mean |p - q|


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBand:
    """The numbers of tokens in one band of positions or entropies."""

    name: str
    tokens: int
    gap: Estimate
    max_gap: float
    k1: Estimate
    k3: Estimate
    kl: tuple[Estimate, Estimate] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthBand:
    """The numbers of responses in one band of lengths; means and errors over responses."""

    name: str
    responses: int
    max_gap: Estimate
    mean_gap: Estimate
    high: int  # responses whose largest gap is above HIGH_GAP


@dataclass(frozen=True, kw_only=True, slots=True)
class MismatchNumbers:
    """The mismatch between sampler and learner. Means are over sampled tokens unless noted, with errors clustered by
    response."""

    responses: int
    tokens: int
    max_gap: float  # largest |p - q| of all tokens
    gap: Estimate  # mean |p - q|
    response_max_gap: Estimate  # mean over responses of their largest gap
    response_mean_gap: Estimate  # mean over responses of their mean gap
    high: int  # responses whose largest gap is above HIGH_GAP
    log_gap: Estimate  # mean |log p - log q|, nats
    other_token: Estimate | None  # share of tokens where the two most probable tokens differ; None if unknown
    other_experts: Estimate | None  # share of tokens sent to other experts in any layer; None if unknown
    k1: Estimate  # mean of log p/q: KL(sampler || learner), noisy, can be below 0
    k3: Estimate  # mean of q/p - 1 - log q/p: the same KL, never below 0
    kl: tuple[Estimate, Estimate] | None  # KL of whole distributions between two bounds; None if unknown
    kl_is_exact: bool
    variation: tuple[Estimate, Estimate] | None  # total variation, which is the share OBRS rejects at lam = 1
    ratio: Estimate  # mean q/p: the learner's mass on tokens that the sampler can draw; 1 where it can draw all
    quantiles: dict[str, float]  # of q/p
    above: float  # share of tokens with q/p above FAR
    below: float  # share of tokens with q/p below 1 / FAR
    support: Estimate | None  # the learner's mass on a truncated sampler's support; None without truncation
    by_length: tuple[LengthBand, ...]
    by_position: tuple[TokenBand, ...]
    by_entropy: tuple[TokenBand, ...]  # by the entropy of the learner's distribution; empty where it is unknown
    each: tuple[ResponseGap, ...]
    drawn: tuple[tuple[float, float], ...]  # (p, q) of tokens spread evenly over all, at most DRAWN_TOKENS


class _BandSums:
    """The sums of one band of tokens."""

    def __init__(self) -> None:
        self.columns: dict[str, ClusteredMean] = {}
        self.largest = -math.inf

    def add(self, columns: dict[str, Tensor], here: Tensor) -> None:
        """Add the tokens of one response that lie in the band, where `here` [N] is True."""
        if bool(here.any()):
            for name, values in columns.items():
                added = ClusteredMean.of(values[here], here[here])
                self.columns[name] = self.columns[name] + added if name in self.columns else added
            self.largest = max(self.largest, float(columns["gap"][here].max()))

    def band(self, name: str) -> TokenBand:
        """Return the means of the band."""
        means = {key: sums.estimate for key, sums in self.columns.items()}
        return TokenBand(
            name=name,
            tokens=int(self.columns["gap"].count),
            gap=means["gap"],
            max_gap=self.largest,
            k1=means["k1"],
            k3=means["k3"],
            kl=(means["kl_low"], means["kl_high"]) if "kl_low" in means else None,
        )


class MismatchSums:
    """Sums the gaps of responses, in any order, and returns the numbers of all."""

    def __init__(self) -> None:
        self._all = _BandSums()
        self._positions = [_BandSums() for _ in POSITIONS]
        self._entropies = [_BandSums() for _ in ENTROPY_BANDS]
        self._responses: list[ResponseGap] = []
        self._log_ratios: list[Tensor] = []
        self._pairs: list[Tensor] = []
        self._is_exact = True

    def add(self, uid: str, tokens: TokenMismatch) -> None:
        """Add one response; a response without a sampled token is ignored."""
        if not len(tokens.gap):
            return
        columns = _columns(tokens)
        self._all.add(columns, torch.ones(len(tokens.gap), dtype=torch.bool))
        for sums, here in zip(self._positions, band_masks(tokens.position, POSITIONS).values(), strict=True):
            sums.add(columns, here)
        if tokens.entropy is not None:
            entropy = tokens.entropy.clamp(min=0.0)  # rounding can leave a little less than 0
            for sums, here in zip(self._entropies, band_masks(entropy, ENTROPY_BANDS).values(), strict=True):
                sums.add(columns, here)
        gap = tokens.gap
        self._responses.append(
            ResponseGap(uid=uid, tokens=len(gap), max_gap=float(gap.max()), mean_gap=float(gap.mean()))
        )
        self._log_ratios.append(tokens.log_ratio)
        self._pairs.append(torch.stack([tokens.sampler, tokens.learner], dim=-1).float())
        self._is_exact &= tokens.is_exact

    def numbers(self) -> MismatchNumbers:
        """Return the numbers of all responses that were added.

        Raises:
            DataError: no response had a sampled token.
        """
        if not self._responses:
            raise DataError("no token was sampled, so there is nothing to compare; ask for more responses or tokens")
        means = {name: sums.estimate for name, sums in self._all.columns.items()}
        ratios = torch.cat(self._log_ratios)
        return MismatchNumbers(
            responses=len(self._responses),
            tokens=len(ratios),
            max_gap=self._all.largest,
            gap=means["gap"],
            response_max_gap=over_responses(self._responses, lambda one: one.max_gap),
            response_mean_gap=over_responses(self._responses, lambda one: one.mean_gap),
            high=sum(one.max_gap > HIGH_GAP for one in self._responses),
            log_gap=means["log_gap"],
            other_token=means.get("other_token"),
            other_experts=means.get("other_experts"),
            k1=means["k1"],
            k3=means["k3"],
            kl=(means["kl_low"], means["kl_high"]) if "kl_low" in means else None,
            kl_is_exact=self._is_exact,
            variation=(means["variation_low"], means["variation_high"]) if "variation_low" in means else None,
            ratio=means["ratio"],
            quantiles=_quantiles(ratios),
            above=float((ratios > math.log(FAR)).double().mean()),
            below=float((ratios < -math.log(FAR)).double().mean()),
            support=means.get("support"),
            by_length=_by_length(self._responses),
            by_position=_bands(self._positions, band_names(POSITIONS)),
            by_entropy=_bands(self._entropies, band_names(ENTROPY_BANDS)),
            each=tuple(self._responses),
            drawn=_drawn(torch.cat(self._pairs)),
        )


def _columns(tokens: TokenMismatch) -> dict[str, Tensor]:
    """Return the columns to average, [N] each."""
    ratio = tokens.log_ratio.exp()
    columns = {
        "gap": tokens.gap,
        "log_gap": tokens.log_ratio.abs(),
        "k1": -tokens.log_ratio,
        "k3": torch.expm1(tokens.log_ratio) - tokens.log_ratio,
        "ratio": ratio,
    }
    if tokens.kl is not None:
        columns |= {"kl_low": tokens.kl[0], "kl_high": tokens.kl[1]}
        columns |= {"variation_low": tokens.variation[0], "variation_high": tokens.variation[1]}
    others = {"support": tokens.support, "other_token": tokens.other_token, "other_experts": tokens.other_experts}
    return columns | {name: values for name, values in others.items() if values is not None}


def _bands(sums: Sequence[_BandSums], names: Sequence[str]) -> tuple[TokenBand, ...]:
    """Return the bands that have a token."""
    return tuple(one.band(name) for one, name in zip(sums, names, strict=True) if one.columns)


def over_responses(responses: Sequence[ResponseGap], read: Callable[[ResponseGap], float]) -> Estimate:
    """Average a number over responses, each counting once."""
    return Sample(tuple(map(read, responses))).estimate


def _by_length(responses: Sequence[ResponseGap]) -> tuple[LengthBand, ...]:
    lengths = torch.tensor([one.tokens for one in responses])
    bands = []
    for name, here in band_masks(lengths, POSITIONS).items():
        if chosen := [responses[row] for row in here.nonzero()[:, 0].tolist()]:
            bands.append(
                LengthBand(
                    name=name,
                    responses=len(chosen),
                    max_gap=over_responses(chosen, lambda one: one.max_gap),
                    mean_gap=over_responses(chosen, lambda one: one.mean_gap),
                    high=sum(one.max_gap > HIGH_GAP for one in chosen),
                )
            )
    return tuple(bands)


def _quantiles(log_ratios: Tensor) -> dict[str, float]:
    """Return quantiles of the ratio: the smallest value that at least this share of the tokens does not exceed."""
    ordered = log_ratios.sort().values
    places = [max(0, math.ceil(share * len(ordered)) - 1) for share in QUANTILES]
    return {f"{share:g}": math.exp(float(ordered[place])) for share, place in zip(QUANTILES, places, strict=True)}


def _drawn(pairs: Tensor) -> tuple[tuple[float, float], ...]:
    """Pick at most DRAWN_TOKENS rows of [N, 2] at equal distances, and always the row with the largest gap."""
    step = max(1, math.ceil(len(pairs) / (DRAWN_TOKENS - 1)))
    worst = int((pairs[:, 0] - pairs[:, 1]).abs().argmax())
    rows = sorted({*range(0, len(pairs), step), worst})
    return tuple((float(p), float(q)) for p, q in pairs[rows].tolist())
