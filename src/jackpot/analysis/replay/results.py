"""The results of a replay, and their plain numbers for JSON and tables."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jackpot.analysis.advice.rule import Recommendation
from jackpot.analysis.replay.rejected import TopRejected
from jackpot.analysis.replay.settings import CorrectionSetting
from jackpot.analysis.replay.stats import CorrectionStats
from jackpot.core.metrics import Histogram, Sums

QUANTILES = (0.01, 0.5, 0.99)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedCorrection:
    """The sums of one correction over all responses."""

    setting: CorrectionSetting
    stats: CorrectionStats
    changed: TopRejected


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayResult:
    """The result of one pass over all files."""

    path: Path
    format: str
    files: int
    policy: str  # source of the policy's log-probs
    run: Sums  # before any correction
    ends: tuple[tuple[str, float], ...]  # the first and the last file or iteration, each with its total variation
    corrections: tuple[ReplayedCorrection, ...]
    left_out: tuple[str, ...]  # corrections and numbers that could not be computed, and why
    unreadable: int  # records and files that could not be read
    problems: tuple[str, ...]  # the first of each kind of reason why records could not be read, at most MOST_WARNINGS
    answer: Recommendation


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectionResult:
    """The numbers of one correction. Shares are of sampled tokens; None where a number could not be computed."""

    label: str
    is_own: bool
    accepted: float
    capped: float
    clipped: float
    dropped_responses: float  # share of responses whose tokens are all rejected
    weight_mean: float
    weight_p1: float
    weight_p50: float
    weight_p99: float
    weight_max: float
    effective: float  # effective share of the sampled tokens, (E F)^2 / E F^2
    sampled_tv_after_correction: float  # total variation after the correction, from sampled tokens
    states: int  # tokens whose whole distributions are known; the next numbers are exact sums over these
    exact_effective: float | None
    tv_after_correction: float | None
    bias: float | None
    variance: float | None
    drift: float | None
    state_spread: float | None
    rejected_by_band: dict[str, float]  # share rejected, by position and by entropy
    rejected_tokens: tuple[tuple[str, float], ...]  # tokens rejected most often, with the expected number
    most_changed: tuple[dict[str, Any], ...]

    @property
    def same(self) -> tuple[float | None, ...]:
        """Return the rounded numbers by which corrections with the same effect on this data are grouped."""
        found = (self.accepted, self.capped, self.clipped, self.weight_max, self.effective)
        found += (self.sampled_tv_after_correction, self.tv_after_correction)
        return tuple(None if value is None else round(value, 9) for value in found)


def correction_result(one: ReplayedCorrection) -> CorrectionResult:
    """Compute the numbers of a replayed correction from its sums."""
    stats = one.stats
    sums = stats.sums
    low, middle, high = (_weight(float(sums["log_weight"].quantile(share).exp())) for share in QUANTILES)
    tokens = sums["accepted"].count
    responses = sums["responses"].total
    return CorrectionResult(
        label=one.setting.label,
        is_own=one.setting.is_own,
        accepted=float(sums["accepted"].value),
        capped=float(sums["capped"].value),
        clipped=float(sums["clipped"].value),
        dropped_responses=float(sums["dropped"].total / responses),
        weight_mean=float(sums["weight_mean"].value),
        weight_p1=low,
        weight_p50=middle,
        weight_p99=high,
        weight_max=float(sums["weight_max"].value),
        effective=float(sums["factor"].total.square() / (sums["square"].total * tokens)),
        sampled_tv_after_correction=stats.sampled_tv_after_correction,
        rejected_by_band=_bands(sums),
        rejected_tokens=one.changed.rejected,
        most_changed=tuple(asdict(place) for place in one.changed.worst),
        **_exact(stats),
    )


def result_numbers(found: ReplayResult) -> dict[str, Any]:
    """Return all numbers of a replay as plain values; those that are not finite must become null in JSON."""
    run = found.run
    return {
        "path": str(found.path),
        "format": found.format,
        "files": found.files,
        "policy": found.policy,
        "unreadable": found.unreadable,
        "ends": dict(found.ends),
        "problems": list(found.problems),
        "left_out": list(found.left_out),
        "run": {name: float(entry.value) for name, entry in run.items() if not isinstance(entry, Histogram)}
        | {f"ratio_p{share * 100:g}": float(run["mismatch/log_ratio"].quantile(share).exp()) for share in QUANTILES}
        | {"tokens": int(run["total_variation"].count)},
        "corrections": [asdict(correction_result(one)) for one in found.corrections],
        "answer": found.answer.numbers(),
    }


def _weight(quantile: float) -> float:
    """Round a quantile of the histogram: bins near 0 are millionths wide, and the lowest, e^-40, stands for 0."""
    return round(quantile, 5)


def _bands(sums: Sums) -> dict[str, float]:
    return {
        name.removeprefix("rejected "): float(entry.value)
        for name, entry in sums.items()
        if name.startswith("rejected ") and entry.count > 0
    }


def _exact(stats: CorrectionStats) -> dict[str, Any]:
    states = stats.states
    if states is None:
        names = ("exact_effective", "tv_after_correction", "bias", "variance", "drift", "state_spread")
        return {"states": 0} | dict.fromkeys(names)
    return {
        "states": int(states.mean.count),
        "exact_effective": states.effective,
        "tv_after_correction": states.tv_after_correction,
        "bias": states.gradient.bias,
        "variance": states.gradient.variance,
        "drift": states.gradient.drift_size,
        "state_spread": states.state_spread,
    }
