"""The results of a replay, and their plain numbers for JSON and tables."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jackpot.analysis.advice.rule import Recommendation
from jackpot.analysis.replay.gradient import exact_numbers, known_states
from jackpot.analysis.replay.replay_sums import ReplayedCorrection
from jackpot.analysis.replay.stats import ratio_quantile
from jackpot.core.metrics import Histogram, Mean, Sums

QUANTILES = (0.01, 0.5, 0.99)
LEAST_GROWTH = 3.0  # growth is reported where the total variation of the last file is more than this times the first's
NOTABLE_GAP = 0.02  # total variation of the last file up to which its growth is not reported


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayResult:
    """The result of a replay: sums and numbers from one pass over all files."""

    path: Path
    format: str  # name of the format
    files: int  # number of files
    policy: str  # text that says where the policy's log-probs come from
    run: Sums  # sums over the rollouts of the run as they were saved, without any correction
    # The names of the first and of the last file or iteration, each with the total variation of its rollouts.
    ends: tuple[tuple[str, float], ...]
    corrections: tuple[ReplayedCorrection, ...]
    left_out: tuple[str, ...]  # corrections and numbers that could not be computed, and why
    unreadable: int  # number of records and files that could not be read
    problems: tuple[str, ...]  # reasons why records could not be read, the first of each kind, at most MOST_WARNINGS
    answer: Recommendation


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectionResult:
    """What one correction does to the saved rollouts of a run: shares of tokens, weights, and errors that it leaves.

    Where a comment names nothing else, a share is of all sampled tokens. None: the number could not be computed.
    """

    label: str
    is_own: bool  # whether the run trains with this correction
    accepted: float  # share of tokens that are accepted
    capped: float  # share of tokens whose weight a cap lowered
    clipped: float  # share of the gradient that PPO's clip removes, or the clip of another surrogate changes
    dropped_responses: float  # share of responses whose tokens are all rejected
    weight_mean: float
    weight_p1: float
    weight_p50: float
    weight_p99: float
    weight_max: float
    effective: float  # effective share of the sampled tokens, (E F)^2 / E F^2, with F the factor on a token's gradient
    # Total variation between the updated policy and the tokens as the correction weights them, estimated from the
    # sampled tokens; 1 if all tokens get weight 0.
    sampled_tv_after_correction: float
    states: int  # tokens whose whole distributions are known; the next six numbers are exact sums over these tokens
    exact_effective: float | None = None  # `exact_numbers` defines these six numbers
    tv_after_correction: float | None = None
    bias: float | None = None
    variance: float | None = None
    drift: float | None = None
    state_spread: float | None = None
    rejected_by_band: dict[str, float]  # share of rejected tokens in each band of position or entropy, by its name

    @property
    def fingerprint(self) -> tuple[float | None, ...]:
        """Return rounded numbers that are equal for two corrections with the same effect on these rollouts."""
        effect = (
            self.accepted,
            self.capped,
            self.clipped,
            self.weight_max,
            self.effective,
            self.sampled_tv_after_correction,
            self.tv_after_correction,
        )
        return tuple(None if value is None else round(value, 9) for value in effect)


def correction_result(replayed: ReplayedCorrection) -> CorrectionResult:
    """Compute the numbers of a replayed correction from its sums."""
    sums, factor = replayed.sums, Mean.named(replayed.sums, "factor")

    # Sums over tokens: `trained` of F_s, the correction's weight on a token's state, `variation` of F_s times the total
    # variation that is left in the state. Their quotient is the mean of that total variation, weighted by F_s.
    variation, trained = Mean.named(sums, "variation").total, Mean.named(sums, "trained").total

    # Quantiles are rounded, as a histogram's bins near 0 are millionths wide, and a weight of 0 is counted as e^-40.
    p1, p50, p99 = (round(ratio_quantile(sums, "log_weight", share), 5) for share in QUANTILES)
    # The names of these sums are those of bands after `rejected`, as `correction_sums` writes them.
    rejected = {name.removeprefix("rejected "): Mean.named(sums, name) for name in sums if name.startswith("rejected ")}

    return CorrectionResult(
        label=replayed.setting.label,
        is_own=replayed.setting.is_own,
        accepted=float(sums["accepted"].value),
        capped=float(sums["capped"].value),
        clipped=float(sums["clipped"].value),
        dropped_responses=float(sums["dropped"].value / sums["responses"].value),
        weight_mean=float(sums["weight_mean"].value),
        weight_p1=p1,
        weight_p50=p50,
        weight_p99=p99,
        weight_max=float(sums["weight_max"].value),
        # F is the factor on a token's gradient; from its sums over n tokens, (E F)^2 / E F^2 = (sum F)^2 / (n sum F^2).
        effective=float(factor.total.square() / (Mean.named(sums, "square").total * factor.count)),
        sampled_tv_after_correction=float(variation / trained) if trained != 0 else 1.0,  # 1: nothing is trained
        states=known_states(sums),
        **exact_numbers(sums),
        rejected_by_band={name: float(mean.value) for name, mean in rejected.items() if mean.count > 0},
    )


def result_numbers(result: ReplayResult) -> dict[str, Any]:
    """Return all numbers of a replay as plain values for JSON; some may be NaN or infinite."""
    run = result.run
    numbers = {name: float(metric.value) for name, metric in run.items() if not isinstance(metric, Histogram)}
    quantiles = {f"ratio_p{share * 100:g}": ratio_quantile(run, "mismatch/log_ratio", share) for share in QUANTILES}

    return {
        "path": str(result.path),
        "format": result.format,
        "files": result.files,
        "policy": result.policy,
        "unreadable": result.unreadable,
        "ends": dict(result.ends),
        "problems": list(result.problems),
        "left_out": list(result.left_out),
        "run": numbers | quantiles | {"tokens": int(Mean.named(run, "total_variation").count)},
        "corrections": [asdict(correction_result(correction)) for correction in result.corrections],
        "answer": result.answer.numbers(),
    }


def dump_findings(result: ReplayResult) -> dict[str, str]:
    """Return faults of saved rollouts that no correction mends, as sentences by label; empty if there are none."""
    lines = result.answer.lines
    findings = {"Precision": lines["Precision"]} if "Precision" in lines else {}
    if result.answer.verdict == "cannot tell":
        findings["Log-probs"] = lines["Fix first"]  # the reason against any recommendation
    if float(result.run["no_advantage"].value) == 1.0:
        findings["Advantages"] = (
            "0 at every token, so nothing is learned: look at the rewards, and at groups that are equal"
        )

    # (name, total variation) of the first and of the last file.
    (first, before), (last, after) = result.ends[0], result.ends[-1]
    if after > max(NOTABLE_GAP, LEAST_GROWTH * before):
        grown = f"from {before:.2%} in {first} to {after:.2%} in {last}"
        findings["Gap"] = f"total variation between engine and policy grew {grown}: does the engine get new weights?"
    return findings
