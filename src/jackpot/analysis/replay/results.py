"""A replay as plain numbers, for JSON and tables."""

from dataclasses import asdict, dataclass
from typing import Any

from jackpot.analysis.replay.recommend import Judged
from jackpot.analysis.replay.replay import Replay, Replayed
from jackpot.analysis.replay.sums import Tally
from jackpot.core.metrics import Histogram, Sums

QUANTILES = (0.01, 0.5, 0.99)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One correction. Shares are of sampled tokens; what is None could not be computed."""

    label: str
    is_own: bool
    accepted: float
    capped: float
    clipped: float
    dropped_responses: float  # share of responses of which no token is left
    weight_mean: float
    weight_p1: float
    weight_p50: float
    weight_p99: float
    weight_max: float
    effective: float  # (E F)^2 / E F^2 of the sampled tokens
    apart: float  # what is misplaced, of the sampled tokens
    states: int  # whose whole distributions are known
    exact_effective: float | None
    misplaced: float | None
    bias: float | None
    variance: float | None
    drift: float | None
    state_spread: float | None
    rejected_by_band: dict[str, float]  # share rejected, by position and by entropy
    rejected_tokens: tuple[tuple[str, float], ...]  # the most, and how many
    most_changed: tuple[dict[str, Any], ...]

    @property
    def same(self) -> tuple[float | None, ...]:
        """What two corrections that do the same on this data have in common."""
        found = (self.accepted, self.capped, self.clipped, self.weight_max, self.effective, self.apart, self.misplaced)
        return tuple(None if value is None else round(value, 9) for value in found)


def measured(one: Replayed) -> Measured:
    tally = one.whole
    sums = tally.sums
    low, middle, high = (_weight(float(sums["log_weight"].quantile(share).exp())) for share in QUANTILES)
    tokens = sums["accepted"].count
    responses = sums["responses"].total
    return Measured(
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
        apart=tally.apart,
        rejected_by_band=_bands(sums),
        rejected_tokens=one.changed.rejected,
        most_changed=tuple(asdict(place) for place in one.changed.worst),
        **_exact(tally),
    )


def as_numbers(found: Replay) -> dict[str, Any]:
    """Everything, as JSON can have it once what is not finite is null."""
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
        | {"tokens": int(run["apart"].count)},
        "corrections": [asdict(measured(one)) for one in found.corrections],
        "answer": {
            "verdict": found.answer.verdict,
            "correction": found.answer.correction,
            "settings": found.answer.settings,
            "sentence": found.answer.sentence,
            "halves_agree": found.answer.halves_agree,
            "judged": [_judged(one) for one in found.answer.judged],
        },
    }


def _judged(one: Judged) -> dict[str, Any]:
    return {
        "label": one.setting.label,
        "misplaced": one.misplaced,
        "effective": one.effective,
        "known": one.known,
    }


def _weight(quantile: float) -> float:
    """Bins of the histogram near 0 are millionths wide; its lowest, e^-40, holds the weights that are 0."""
    return round(quantile, 5)


def _bands(sums: Sums) -> dict[str, float]:
    return {
        name.removeprefix("lost "): float(entry.value)
        for name, entry in sums.items()
        if name.startswith("lost ") and entry.count > 0
    }


def _exact(tally: Tally) -> dict[str, Any]:
    states = tally.states
    if states is None:
        names = ("exact_effective", "misplaced", "bias", "variance", "drift", "state_spread")
        return {"states": 0} | dict.fromkeys(names)
    return {
        "states": int(states.mean.count),
        "exact_effective": states.effective,
        "misplaced": states.misplaced_share,
        "bias": states.gradient.bias,
        "variance": states.gradient.variance,
        "drift": states.gradient.drift_size,
        "state_spread": states.state_spread,
    }
