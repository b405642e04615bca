"""From responses, one at a time, to everything that is told of two sides.

What is kept of a token is its log-ratio and its two probabilities (16 bytes), for quantiles and the picture; everything
else is sums, and a few numbers of each response.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from jackpot.analysis.mismatch.tokens import TokenNumbers
from jackpot.core.bands import POSITIONS, band_masks, band_names
from jackpot.core.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean and its standard error; None where there is only one response."""

    value: float
    error: float | None


def mean_of(values: Sequence[float]) -> Estimate:
    """The mean of independent numbers, one at least."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(value=statistics.fmean(values), error=error)


class Clustered(NamedTuple):
    """A mean over tokens, as sums over responses; float64."""

    total: float = 0.0  # sum y
    count: float = 0.0  # sum n
    squares: float = 0.0  # sum y^2
    products: float = 0.0  # sum y n
    counts: float = 0.0  # sum n^2
    responses: int = 0

    @classmethod
    def of(cls, values: Tensor) -> "Clustered":
        """The tokens of one response, [N]; nothing where N is 0."""
        if not (n := len(values)):
            return cls()
        total = float(values.double().sum())
        return cls(total, n, total * total, total * n, n * n, 1)

    def __add__(self, other: "Clustered") -> "Clustered":
        return Clustered(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))

    @property
    def estimate(self) -> Estimate | None:
        """None where nothing was counted."""
        if not self.count:
            return None
        mean = self.total / self.count
        if self.responses < 2:
            return Estimate(value=mean, error=None)
        spread = max(0.0, self.squares - 2.0 * mean * self.products + mean * mean * self.counts)
        scale = self.responses / (self.responses - 1)
        return Estimate(value=mean, error=math.sqrt(scale * spread) / self.count)


ENTROPIES = (0.0, 0.01, 0.1, 0.5, 1.0, 2.0, 4.0)  # nats, the starts of the bands of entropy
QUANTILES = (0.0, 0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999, 1.0)
HIGH_GAP = 0.5  # the post counts responses whose largest gap is above it
FAR = 2.0  # a ratio beyond it, either way
DRAWN_TOKENS = 2_000  # kept of all, for the picture


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """One response."""

    uid: str
    tokens: int  # sampled ones
    max_gap: float  # |p - q|
    mean_gap: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """The tokens of one band of positions or entropies."""

    name: str
    tokens: int
    gap: Estimate
    max_gap: float
    k1: Estimate
    k3: Estimate
    kl: tuple[Estimate, Estimate] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthBand:
    """The responses of one band of lengths; means and errors over responses."""

    name: str
    responses: int
    max_gap: Estimate
    mean_gap: Estimate
    high: int  # responses whose largest gap is above HIGH_GAP


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """How far the learner is from the sampler. Means are over sampled tokens, with errors clustered by response, unless
    something else is said."""

    responses: int
    tokens: int
    max_gap: float  # of all tokens
    gap: Estimate  # |p - q|
    response_max_gap: Estimate  # mean over responses of their largest gap
    response_mean_gap: Estimate  # mean over responses of their mean gap
    high: int  # responses whose largest gap is above HIGH_GAP
    k1: Estimate  # mean of log p/q: KL(sampler || learner), noisy, can be below 0
    k3: Estimate  # mean of q/p - 1 - log q/p: the same, never below 0
    kl: tuple[Estimate, Estimate] | None  # exact, or its two bounds; None where no distribution is at hand
    kl_is_exact: bool
    variation: tuple[Estimate, Estimate] | None  # total variation; what OBRS rejects at lam = 1
    ratio: Estimate  # mean q/p: the learner's mass on what the sampler can draw; 1 where it can draw everything
    quantiles: dict[str, float]  # of q/p
    above: float  # share of tokens with q/p above FAR: so much of the sampler's mass is there
    below: float  # and below 1 / FAR
    support: Estimate | None  # the learner's mass on the support of a truncated sampler; None where it is all
    by_length: tuple[LengthBand, ...]
    by_position: tuple[Band, ...]
    by_entropy: tuple[Band, ...]  # of the learner's distribution; empty where it is not known
    each: tuple[Response, ...]
    drawn: tuple[tuple[float, float], ...]  # (p, q) of tokens spread evenly over all, at most DRAWN_TOKENS


class _BandSums:
    """What adds up of one band."""

    def __init__(self) -> None:
        self.columns: dict[str, Clustered] = {}
        self.largest = -math.inf

    def add(self, columns: dict[str, Tensor], here: Tensor) -> None:
        if bool(here.any()):
            for name, values in columns.items():
                self.columns[name] = self.columns.get(name, Clustered()) + Clustered.of(values[here])
            self.largest = max(self.largest, float(columns["gap"][here].max()))

    def band(self, name: str) -> Band:
        means = {key: sums.estimate for key, sums in self.columns.items()}
        return Band(
            name=name,
            tokens=int(self.columns["gap"].count),
            gap=means["gap"],
            max_gap=self.largest,
            k1=means["k1"],
            k3=means["k3"],
            kl=(means["kl_low"], means["kl_high"]) if "kl_low" in means else None,
        )


class Measure:
    """Takes responses in any order."""

    def __init__(self) -> None:
        self._all = _BandSums()
        self._positions = [_BandSums() for _ in POSITIONS]
        self._entropies = [_BandSums() for _ in ENTROPIES]
        self._responses: list[Response] = []
        self._log_ratios: list[Tensor] = []
        self._pairs: list[Tensor] = []
        self._is_exact = True

    def add(self, uid: str, tokens: TokenNumbers) -> None:
        """One response; one without a sampled token says nothing."""
        if not len(tokens.gap):
            return
        columns = _columns(tokens)
        self._all.add(columns, torch.ones(len(tokens.gap), dtype=torch.bool))
        for sums, here in zip(self._positions, band_masks(tokens.position, POSITIONS).values(), strict=True):
            sums.add(columns, here)
        if tokens.entropy is not None:
            entropy = tokens.entropy.clamp(min=0.0)  # of a certain token rounding can leave a little less
            for sums, here in zip(self._entropies, band_masks(entropy, ENTROPIES).values(), strict=True):
                sums.add(columns, here)
        gap = tokens.gap
        self._responses.append(Response(uid=uid, tokens=len(gap), max_gap=float(gap.max()), mean_gap=float(gap.mean())))
        self._log_ratios.append(tokens.log_ratio)
        self._pairs.append(torch.stack([tokens.sampler, tokens.learner], dim=-1).float())
        self._is_exact &= tokens.is_exact

    def numbers(self) -> Numbers:
        """Of everything that was added.

        Raises:
            DataError: there was no sampled token.
        """
        if not self._responses:
            raise DataError("no token was sampled, so there is nothing to compare; ask for more responses or tokens")
        means = {name: sums.estimate for name, sums in self._all.columns.items()}
        ratios = torch.cat(self._log_ratios)
        return Numbers(
            responses=len(self._responses),
            tokens=len(ratios),
            max_gap=self._all.largest,
            gap=means["gap"],
            response_max_gap=over_responses(self._responses, lambda one: one.max_gap),
            response_mean_gap=over_responses(self._responses, lambda one: one.mean_gap),
            high=sum(one.max_gap > HIGH_GAP for one in self._responses),
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
            by_entropy=_bands(self._entropies, band_names(ENTROPIES)),
            each=tuple(self._responses),
            drawn=_drawn(torch.cat(self._pairs)),
        )


def _columns(tokens: TokenNumbers) -> dict[str, Tensor]:
    """What is averaged, [N] each."""
    ratio = tokens.log_ratio.exp()
    columns = {
        "gap": tokens.gap,
        "k1": -tokens.log_ratio,
        "k3": torch.expm1(tokens.log_ratio) - tokens.log_ratio,
        "ratio": ratio,
    }
    if tokens.kl is not None:
        columns |= {"kl_low": tokens.kl[0], "kl_high": tokens.kl[1]}
        columns |= {"variation_low": tokens.variation[0], "variation_high": tokens.variation[1]}
    return columns if tokens.support is None else columns | {"support": tokens.support}


def _bands(sums: Sequence[_BandSums], names: Sequence[str]) -> tuple[Band, ...]:
    """Those in which a token is."""
    return tuple(one.band(name) for one, name in zip(sums, names, strict=True) if one.columns)


def over_responses(responses: Sequence[Response], read: Callable[[Response], float]) -> Estimate:
    """The mean over responses, each counting once."""
    return mean_of([read(one) for one in responses])


def _by_length(responses: Sequence[Response]) -> tuple[LengthBand, ...]:
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
    """Of the ratio: the smallest value that at least this share of the tokens does not exceed."""
    ordered = log_ratios.sort().values
    places = [max(0, math.ceil(share * len(ordered)) - 1) for share in QUANTILES]
    return {f"{share:g}": math.exp(float(ordered[place])) for share, place in zip(QUANTILES, places, strict=True)}


def _drawn(pairs: Tensor) -> tuple[tuple[float, float], ...]:
    """At most DRAWN_TOKENS rows of [N, 2], at equal distances, the row with the largest gap always among them."""
    step = max(1, math.ceil(len(pairs) / (DRAWN_TOKENS - 1)))
    worst = int((pairs[:, 0] - pairs[:, 1]).abs().argmax())
    rows = sorted({*range(0, len(pairs), step), worst})
    return tuple((float(p), float(q)) for p, q in pairs[rows].tolist())
