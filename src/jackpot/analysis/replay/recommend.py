"""Recommends a correction for a run, by a rule (docs/replay.md) on two numbers of each candidate.

The numbers are the total variation (TV) that is left after the correction, and the share of tokens left effective.

1. Of the corrections that leave at most LIMIT of TV and at least ENOUGH of the tokens effective, the rule takes the one
   that leaves most tokens effective, or a simpler one that leaves nearly as many.
2. Where there is none: of those that leave ENOUGH effective and at most half of the TV without a correction, the rule
   takes the one that leaves the least TV, or a simpler one that leaves nearly as little.
3. Where there is none either, no correction closes the gap.

Both numbers are summed over whole distributions at the tokens where those are known and sampled at the others. Every
candidate was replayed on all tokens of the run; a correction that was replayed on some of them only is no candidate.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jackpot.analysis.replay.settings import CorrectionSetting
from jackpot.analysis.replay.stats import CorrectionStats
from jackpot.core.metrics import Sums


@dataclass(frozen=True, kw_only=True, slots=True)
class CorrectionCandidate:
    """The two numbers of one correction, on all responses or on half of them."""

    setting: CorrectionSetting
    tv_after_correction: float  # total variation between the corrected distribution and the policy
    effective: float  # effective share of tokens
    known: float  # share of tokens whose whole distributions are summed over; 0: sampled tokens only


FEW_SEQUENCES = 0.2  # share of effective responses, below which weights of whole responses are of no use
_ALL = 0.99  # share of known tokens that counts as all


def use(
    chosen: CorrectionCandidate, candidates: Sequence[CorrectionCandidate], run: Sums, limit: float, stale: bool
) -> str:
    """Say which correction to use, with its numbers."""
    none = next((one for one in candidates if one.setting.name == "none"), None)
    if chosen.setting.name == "none":
        clip = ", with PPO's clip as it is" if stale else ""
        text = f"No correction is needed{clip}: {_gap(run, stale)}; training without one {_what(chosen)}."
    else:
        text = (
            f"Use {chosen.setting.label}: {_gap(run, stale)}; it {_what(chosen)}{_against(chosen, none, candidates)}."
        )
    if chosen.tv_after_correction > limit:
        text += f" No correction that leaves enough tokens effective gets below {limit:.0%}; this one leaves least."
    return text + _sequences(run) + _known(chosen)


def too_far(candidates: Sequence[CorrectionCandidate], run: Sums) -> str:
    """Say that no correction closes the gap, with the numbers of the two best ones."""
    least = min(candidates, key=lambda one: one.tv_after_correction)
    most = max((one for one in candidates if one.setting.name != "none"), key=lambda one: one.effective, default=least)
    text = (
        f"No correction closes this gap: {_gap(run, False)}; {least.setting.label} {_what(least)}, "
        f"{most.setting.label} {_what(most)}. Take a closer rollout model, update its weights more often, or "
        f"distil the policy into it."
    )
    return text + _known(least)


def doubts(halves: Sequence[str], expected: int, label: str) -> str:
    """Say where the recommendation is uncertain, from the labels that the halves with a response give."""
    if len(halves) < expected:
        return " Not checked on two halves of the responses: one of them is empty."
    if set(halves) <= {label}:
        return ""
    return f" Not sure: of the two halves of the responses one says {halves[0]} and the other {halves[-1]}."


def _gap(run: Sums, stale: bool) -> str:
    where = "the policy that is updated" if stale else "the policy"
    gap = run["total_variation"]
    measured = f"total variation, {int(gap.count):,} tokens"
    return f"the rollout model is {_percent(float(gap.value))} away from {where} ({measured})"


def _what(one: CorrectionCandidate) -> str:
    return f"leaves {_percent(one.tv_after_correction)} total variation and {one.effective:.0%} of the tokens effective"


def _against(
    chosen: CorrectionCandidate, none: CorrectionCandidate | None, candidates: Sequence[CorrectionCandidate]
) -> str:
    """Compare with no correction, and with the best one of another name."""
    compared = [] if none is None else [none]
    others = [one for one in candidates if one.setting.name not in (chosen.setting.name, "none")]
    near = [one for one in others if one.tv_after_correction <= 2.0 * max(chosen.tv_after_correction, 0.005)] or others
    if near:
        compared.append(max(near, key=lambda one: one.effective))
    parts = [f"{one.setting.label}: {_percent(one.tv_after_correction)} and {one.effective:.0%}" for one in compared]
    return f" ({'; '.join(parts)})" if parts else ""


def _sequences(run: Sums) -> str:
    effective = float(run["mismatch/sequence_ess"].value)
    if effective >= FEW_SEQUENCES:
        return ""
    return (
        f" Do not weigh whole responses: over {float(run['length'].value):.0f} tokens their ratios leave "
        f"{effective:.1%} of them effective."
    )


def _known(chosen: CorrectionCandidate) -> str:
    if chosen.known >= _ALL:
        return ""
    if chosen.known > 0.0:
        known = f"for {chosen.known:.0%} of the tokens"
        return f" Summed over both distributions where the top-k lists hold them, {known}, and sampled at the others."
    return (
        " Sampled, not summed over the vocabulary: a tail that was not sampled is missing; top-k lists would show it."
    )


def _percent(share: float) -> str:
    return "less than 0.01 %" if share < 5e-5 else f"{100.0 * share:.2g} %"


LIMIT = 0.01  # total variation that may be left after the correction
ENOUGH = 0.3  # share of effective tokens that must be left
NEARLY = 0.95  # share of the best number at which a simpler correction is preferred
FEW_TOKENS = 1_000  # sampled tokens, below which there is no recommendation
OFF = 0.03  # largest deviation of the mean ratio from 1, unless SURE standard errors are more
TAME = 10.0  # largest 99 % quantile of the ratios at which their mean is reliable
SURE = 5.0  # standard errors of a significant deviation
_ORDER = ("none", "tis", "tis_adjusted", "obrs", "icepop", "drop", "is")  # simple corrections with small weights first

ReplayVerdict = Literal["none needed", "correct", "too far", "cannot tell"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """The rule's result."""

    verdict: ReplayVerdict
    correction: str | None  # label of the setting; None where no correction is recommended
    settings: dict[str, object]  # of `objective.correction` in a recipe
    sentence: str
    split_halves_agree: bool | None  # None where one half has no response
    candidates: tuple[CorrectionCandidate, ...]


ReplayedPart = tuple[CorrectionSetting, CorrectionStats, Sequence[CorrectionStats]]  # all responses, each half


def recommend(
    run: Sums, run_halves: Sequence[Sums], parts: Sequence[ReplayedPart], problem: str | None = None
) -> Recommendation:
    """Apply the rule to all responses, and check it on either half of them.

    Args:
        run: sums of the run before any correction; `run_halves` those of each half.
        parts: sums of every replayed correction.
        problem: reason against any recommendation, found before the numbers are looked at.
    """
    candidates = tuple(one for setting, whole, _ in parts if (one := candidate_of(setting, whole, run)))
    advisable = [one for one in candidates if may_be_advised(one.setting, is_stale(run))]
    if problem := problem or _not_finite(run, advisable) or _why_not(run):
        return _nothing("cannot tell", f"No correction can be recommended: {problem}.", candidates)
    if not advisable:
        why = "none of the corrections that the rule may recommend was replayed"
        return _nothing("cannot tell", f"No correction can be recommended: {why}.", candidates)
    chosen = choose(advisable, _without(candidates, run))
    if chosen is None:
        return _nothing("too far", too_far(advisable, run), candidates)
    halves = _of_halves(parts, run_halves, is_stale(run))
    names = [half.setting.label if half else "none of them" for half in halves]
    return Recommendation(
        verdict="none needed" if chosen.setting.name == "none" else "correct",
        correction=chosen.setting.label,
        settings={"name": chosen.setting.name, **dict(chosen.setting.numbers)},
        sentence=use(chosen, advisable, run, LIMIT, is_stale(run))
        + doubts(names, len(run_halves), chosen.setting.label),
        split_halves_agree=set(names) == {chosen.setting.label} if len(names) == len(run_halves) else None,
        candidates=candidates,
    )


def candidate_of(setting: CorrectionSetting, stats: CorrectionStats, run: Sums) -> CorrectionCandidate | None:
    """Return the two numbers; None where the correction was not replayed on all tokens of the run."""
    tokens = int(run["total_variation"].count) if run else 0
    if not stats.sums or stats.tokens != tokens:
        return None
    return CorrectionCandidate(
        setting=setting,
        tv_after_correction=stats.tv_after_correction,
        effective=stats.effective,
        known=stats.known / tokens,
    )


def choose(candidates: Sequence[CorrectionCandidate], without: float) -> CorrectionCandidate | None:
    """Apply the rule to the candidates; None where no correction closes the gap.

    Args:
        without: total variation without a correction.
    """
    enough = [one for one in candidates if one.effective >= ENOUGH]
    if allowed := [one for one in enough if one.tv_after_correction <= LIMIT]:
        most = max(one.effective for one in allowed)
        return min((one for one in allowed if one.effective >= NEARLY * most), key=_simplicity)
    corrected = [one for one in enough if one.setting.name != "none"]
    if halved := [one for one in corrected if one.tv_after_correction <= without / 2.0]:
        least = min(one.tv_after_correction for one in halved)
        return min((one for one in halved if one.tv_after_correction <= least / NEARLY), key=_simplicity)
    return None


def _without(candidates: Sequence[CorrectionCandidate], run: Sums) -> float:
    """Return the total variation without a correction: that of `none`, or where it was not replayed that of the run."""
    none = [
        one.tv_after_correction
        for one in candidates
        if one.setting.name == "none" and one.setting.objective.proximal == "old"
    ]
    return none[0] if none else float(run["total_variation"].value)


def is_stale(run: Sums) -> bool:
    """Tell whether the saved policy had been updated since it received the batch."""
    return float(run["stale_max"].value) > 1e-3


def _simplicity(one: CorrectionCandidate) -> tuple[int, bool, bool]:
    """Return a sort key: the order of _ORDER, then defaults before other settings."""
    return _ORDER.index(one.setting.name), bool(one.setting.numbers) and one.setting.name != "obrs", one.setting.is_own


def may_be_advised(setting: CorrectionSetting, stale: bool) -> bool:
    """Tell whether the rule may recommend a correction.

    Excluded are single parts of OBRS, its sampled mask (which only adds noise), and weights of whole responses. Where
    the policy has not been updated, corrections aligned to the updated policy are duplicates and excluded too.
    """
    if setting.name not in _ORDER:
        return False
    if setting.name == "obrs" and dict(setting.numbers).get("mask") != "expected":
        return False
    if setting.name in ("none", "is"):
        return setting.objective.proximal == "old"
    return stale or not setting.aligns_to_new


def _of_halves(parts: Sequence[ReplayedPart], runs: Sequence[Sums], stale: bool) -> list[CorrectionCandidate | None]:
    """Apply the rule to each half that has responses."""
    chosen = []
    for number, run in enumerate(runs):
        candidates = [one for setting, _, halves in parts if (one := candidate_of(setting, halves[number], run))]
        if advisable := [one for one in candidates if may_be_advised(one.setting, stale)]:
            chosen.append(choose(advisable, _without(candidates, run)))
    return chosen


def _not_finite(run: Sums, candidates: Sequence[CorrectionCandidate]) -> str | None:
    run_numbers = {"the run's gap": float(run["total_variation"].value), "the mean of rho": float(run["ratio"].value)}
    of_candidates = {one.setting.label: one.tv_after_correction + one.effective for one in candidates}
    names = [name for name, value in (run_numbers | of_candidates).items() if not math.isfinite(value)]
    if not names:
        return None
    return (
        f"{', '.join(names)}: the result is not a finite number. Look for log-probs of sampled tokens that are "
        f"hundreds below 0, and set sampled_mask to false there"
    )


def _why_not(run: Sums) -> str | None:
    """Return a reason against any recommendation, or None."""
    tokens = int(run["total_variation"].count)
    if tokens < FEW_TOKENS:
        return f"there are {tokens} sampled tokens and {FEW_TOKENS:,} are needed; save more rollouts"
    if "z" in run and (problem := _lists_do_not_fit(run)):
        return problem
    return _mean_is_not_1(run)


def _mean_is_not_1(run: Sums) -> str | None:
    """Check that the ratios of tokens without known distributions have mean 1; elsewhere the lists are checked."""
    ratio, tame = run["sampled_only_ratio"], float(run["sampled_only_log_ratio"].quantile(0.99).exp()) < TAME
    if ratio.count == 0:
        return None
    away = abs(float(ratio.value) - 1.0)
    if tame and away > max(OFF, SURE * float(ratio.standard_error)):
        return (
            f"the mean of p_policy / p_rollout is {float(ratio.value):.3f} +- {float(ratio.standard_error):.3f} and "
            f"must be 1. {_LOOK_FOR} Or the policy prefers tokens that the rollout model hardly ever samples; top-k "
            f"lists of both models would show it"
        )
    return None


def _lists_do_not_fit(run: Sums) -> str | None:
    gap, unreachable = run["acceptance_minus_z"], run["unreachable"]
    if float(unreachable.value) > max(OFF, SURE * float(unreachable.standard_error)):
        return (
            f"{float(unreachable.value):.1%} of the policy's probability is on tokens that the rollout model "
            f"could not sample, by its own lists. {_LOOK_FOR} No correction brings back tokens that are never sampled"
        )
    if abs(float(gap.value)) > max(OFF, SURE * float(gap.standard_error)):
        return (
            f"of 100 sampled tokens {100.0 * float(gap.value):+.1f} more overlap than the top-k lists allow, so the "
            f"lists and the log-probs of the sampled tokens are not of one distribution. {_LOOK_FOR}"
        )
    return None


_LOOK_FOR = (
    "Look for top-p or top-k sampling, another temperature, other weights or another tokenizer, and fix that first."
)


def _nothing(verdict: ReplayVerdict, sentence: str, candidates: tuple[CorrectionCandidate, ...]) -> Recommendation:
    return Recommendation(
        verdict=verdict, correction=None, settings={}, sentence=sentence, split_halves_agree=None, candidates=candidates
    )
