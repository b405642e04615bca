"""Which correction to use on a run: the rule (docs/replay.md).

1. Of the corrections that misplace at most LIMIT of the probability and leave at least ENOUGH of the tokens effective,
   the one that leaves most effective; where a simpler one leaves nearly as many, the simpler one.
2. Where there is none: of those that leave ENOUGH effective and misplace at most half of what is misplaced without a
   correction, the one that misplaces least; where a simpler one misplaces nearly as little, the simpler one.
3. Where there is none either: no correction mends the gap.

Both numbers are summed over whole distributions at the tokens where those are known and sampled at the others, for
every correction over all tokens of the run: one that was replayed on some of them alone is not judged.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jackpot.analysis.replay.settings import Setting
from jackpot.analysis.replay.sums import Tally
from jackpot.core.metrics import Sums


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """One correction on all responses, or on half of them."""

    setting: Setting
    misplaced: float  # of what is trained on, the probability on other tokens than the policy's
    effective: float  # share of tokens
    known: float  # share of tokens over whose whole distributions the sums go; 0: sampled tokens alone


FEW_SEQUENCES = 0.2  # effective responses; below it a weight of whole responses is no use
_ALL = 0.99


def use(chosen: Judged, candidates: Sequence[Judged], run: Sums, limit: float, stale: bool) -> str:
    """What to use, and the numbers behind it."""
    none = next((one for one in candidates if one.setting.name == "none"), None)
    if chosen.setting.name == "none":
        clip = ", with PPO's clip as it is" if stale else ""
        text = f"No correction is needed{clip}: {_gap(run, stale)}; without one training {_what(chosen)}."
    else:
        text = (
            f"Use {chosen.setting.label}: {_gap(run, stale)}; it {_what(chosen)}{_against(chosen, none, candidates)}."
        )
    if chosen.misplaced > limit:
        text += f" Nothing that leaves enough tokens effective keeps within {limit:.0%}; this misplaces least."
    return text + _sequences(run) + _known(chosen)


def too_far(candidates: Sequence[Judged], run: Sums) -> str:
    """Where no correction mends the gap."""
    least = min(candidates, key=lambda one: one.misplaced)
    most = max((one for one in candidates if one.setting.name != "none"), key=lambda one: one.effective, default=least)
    text = (
        f"No correction mends this gap: {_gap(run, False)}; {least.setting.label} {_what(least)}, "
        f"{most.setting.label} {_what(most)}. Take a closer writer, bring it new weights more often, or distil the "
        f"policy into it."
    )
    return text + _known(least)


def doubts(halves: Sequence[str], expected: int, label: str) -> str:
    """What speaks against being sure, from what the halves that have a response say."""
    if len(halves) < expected:
        return " Not checked on two halves of the responses: one of them is empty."
    if set(halves) <= {label}:
        return ""
    return f" Not sure: of the two halves of the responses one says {halves[0]} and the other {halves[-1]}."


def _gap(run: Sums, stale: bool) -> str:
    where = "the policy that is updated" if stale else "the policy"
    apart = run["apart"]
    measured = f"total variation, {int(apart.count):,} tokens"
    return f"the writer and {where} are {_percent(float(apart.value))} apart ({measured})"


def _what(one: Judged) -> str:
    return (
        f"misplaces {_percent(one.misplaced)} of the probability and leaves {one.effective:.0%} of the tokens effective"
    )


def _against(chosen: Judged, none: Judged | None, candidates: Sequence[Judged]) -> str:
    """What happens without a correction, and the best one of another name."""
    compared = [] if none is None else [none]
    others = [one for one in candidates if one.setting.name not in (chosen.setting.name, "none")]
    near = [one for one in others if one.misplaced <= 2.0 * max(chosen.misplaced, 0.005)] or others
    if near:
        compared.append(max(near, key=lambda one: one.effective))
    parts = [f"{one.setting.label}: {_percent(one.misplaced)} and {one.effective:.0%}" for one in compared]
    return f" ({'; '.join(parts)})" if parts else ""


def _sequences(run: Sums) -> str:
    effective = float(run["mismatch/sequence_ess"].value)
    if effective >= FEW_SEQUENCES:
        return ""
    return (
        f" Nothing that weighs whole responses: over {float(run['length'].value):.0f} tokens their ratio leaves "
        f"{effective:.1%} of them effective."
    )


def _known(chosen: Judged) -> str:
    if chosen.known >= _ALL:
        return ""
    if chosen.known > 0.0:
        known = f"for {chosen.known:.0%} of the tokens"
        return f" Summed over both distributions where the top-k lists hold them, {known}, and sampled at the others."
    return " Sampled, not summed over the vocabulary: a tail that was not sampled is not in it. Top-k lists would tell."


def _percent(share: float) -> str:
    return "less than 0.01 %" if share < 5e-5 else f"{100.0 * share:.2g} %"


LIMIT = 0.01  # of the probability may be misplaced
ENOUGH = 0.3  # effective tokens
NEARLY = 0.95  # of the best, for a simpler correction
FEW_TOKENS = 1_000
OFF = 0.03  # the mean ratio must be 1 within this and five standard errors
TAME = 10.0  # where 99 % of the ratios are below this, their mean can be trusted
SURE = 5.0  # standard errors
_ORDER = ("none", "tis", "tis_adjusted", "obrs", "icepop", "drop", "is")  # simple and tame first

Verdict = Literal["none needed", "correct", "too far", "cannot tell"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    verdict: Verdict
    correction: str | None  # the label of the setting
    settings: dict[str, object]  # as a recipe takes them
    sentence: str
    halves_agree: bool | None  # None where there is one response, and so one half
    judged: tuple[Judged, ...]


Part = tuple[Setting, Tally, Sequence[Tally]]


def answer(run: Sums, run_halves: Sequence[Sums], parts: Sequence[Part], problem: str | None = None) -> Answer:
    """Ask the rule of all responses, and of either half of them.

    Args:
        problem: what forbids an answer whatever the numbers are.
    """
    judged = tuple(one for setting, whole, _ in parts if (one := judge(setting, whole, run)))
    candidates = [one for one in judged if may_be_advised(one.setting, is_stale(run))]
    if problem := problem or _not_finite(run, candidates) or _why_not(run):
        return _nothing("cannot tell", f"It cannot be told which correction to use: {problem}.", judged)
    if not candidates:
        why = "none of the corrections that could be advised was replayed"
        return _nothing("cannot tell", f"It cannot be told which correction to use: {why}.", judged)
    chosen = choose(candidates, _without(judged, run))
    if chosen is None:
        return _nothing("too far", too_far(candidates, run), judged)
    halves = _of_halves(parts, run_halves, is_stale(run))
    names = [half.setting.label if half else "none of them" for half in halves]
    return Answer(
        verdict="none needed" if chosen.setting.name == "none" else "correct",
        correction=chosen.setting.label,
        settings={"name": chosen.setting.name, **dict(chosen.setting.numbers)},
        sentence=use(chosen, candidates, run, LIMIT, is_stale(run))
        + doubts(names, len(run_halves), chosen.setting.label),
        halves_agree=set(names) == {chosen.setting.label} if len(names) == len(run_halves) else None,
        judged=judged,
    )


def judge(setting: Setting, tally: Tally, run: Sums) -> Judged | None:
    """The two numbers; None where some tokens of the run were not put through this correction."""
    tokens = int(run["apart"].count) if run else 0
    if not tally.sums or tally.tokens != tokens:
        return None
    return Judged(setting=setting, misplaced=tally.misplaced, effective=tally.effective, known=tally.known / tokens)


def choose(candidates: Sequence[Judged], without: float) -> Judged | None:
    """The rule itself; None where no correction mends the gap.

    Args:
        without: what is misplaced without a correction.
    """
    enough = [one for one in candidates if one.effective >= ENOUGH]
    if allowed := [one for one in enough if one.misplaced <= LIMIT]:
        most = max(one.effective for one in allowed)
        return min((one for one in allowed if one.effective >= NEARLY * most), key=_simplicity)
    corrected = [one for one in enough if one.setting.name != "none"]
    if halved := [one for one in corrected if one.misplaced <= without / 2.0]:
        least = min(one.misplaced for one in halved)
        return min((one for one in halved if one.misplaced <= least / NEARLY), key=_simplicity)
    return None


def _without(judged: Sequence[Judged], run: Sums) -> float:
    """What `none` misplaces; where it was not replayed the total variation, which is the same but for PPO's ratio."""
    none = [one.misplaced for one in judged if one.setting.name == "none" and one.setting.objective.proximal == "old"]
    return none[0] if none else float(run["apart"].value)


def is_stale(run: Sums) -> bool:
    """Whether the policy had moved since the batch came in where it was saved."""
    return float(run["stale_max"].value) > 1e-3


def _simplicity(one: Judged) -> tuple[int, bool, bool]:
    """The order of _ORDER; then defaults before other numbers."""
    return _ORDER.index(one.setting.name), bool(one.setting.numbers) and one.setting.name != "obrs", one.setting.is_own


def may_be_advised(setting: Setting, stale: bool) -> bool:
    """Not the parts of OBRS, not its coin, which only adds noise, and nothing that whole responses decide. Where the
    policy has not moved, what aligns to the moved one is the same correction under another name."""
    if setting.name not in _ORDER:
        return False
    if setting.name == "obrs" and dict(setting.numbers).get("mask") != "expected":
        return False
    if setting.name in ("none", "is"):
        return setting.objective.proximal == "old"
    return stale or not setting.aligns_to_new


def _of_halves(parts: Sequence[Part], runs: Sequence[Sums], stale: bool) -> list[Judged | None]:
    """The choice of either half; none where a half has no response."""
    chosen = []
    for number, run in enumerate(runs):
        judged = [one for setting, _, halves in parts if (one := judge(setting, halves[number], run))]
        if candidates := [one for one in judged if may_be_advised(one.setting, stale)]:
            chosen.append(choose(candidates, _without(judged, run)))
    return chosen


def _not_finite(run: Sums, candidates: Sequence[Judged]) -> str | None:
    run_numbers = {"the run's gap": float(run["apart"].value), "the mean of rho": float(run["ratio"].value)}
    of_candidates = {one.setting.label: one.misplaced + one.effective for one in candidates}
    names = [name for name, value in (run_numbers | of_candidates).items() if not math.isfinite(value)]
    if not names:
        return None
    return (
        f"what comes out for {', '.join(names)} is not a finite number. Look for log-probs of sampled tokens that are "
        f"hundreds below 0, and set sampled_mask to false there"
    )


def _why_not(run: Sums) -> str | None:
    """What forbids an answer."""
    tokens = int(run["apart"].count)
    if tokens < FEW_TOKENS:
        return f"there are {tokens} sampled tokens and {FEW_TOKENS:,} are needed; save more rollouts"
    if "z" in run and (problem := _lists_do_not_fit(run)):
        return problem
    return _mean_is_not_1(run)


def _mean_is_not_1(run: Sums) -> str | None:
    """Where whole distributions are known a mean below 1 is a tail that was not sampled, and the lists tell more."""
    ratio, tame = run["alone_ratio"], float(run["alone_log_ratio"].quantile(0.99).exp()) < TAME
    if ratio.count == 0:
        return None
    away = abs(float(ratio.value) - 1.0)
    if tame and away > max(OFF, SURE * float(ratio.standard_error)):
        return (
            f"the mean of p_policy / p_rollout is {float(ratio.value):.3f} +- {float(ratio.standard_error):.3f} and "
            f"must be 1. {_LOOK_FOR} It may also be that the policy likes what the writer hardly ever writes; top-k "
            f"lists of both models would tell"
        )
    return None


def _lists_do_not_fit(run: Sums) -> str | None:
    gap, unreachable = run["acceptance_minus_z"], run["unreachable"]
    if float(unreachable.value) > max(OFF, SURE * float(unreachable.standard_error)):
        return (
            f"{float(unreachable.value):.1%} of the policy's probability is on tokens that the writer could not "
            f"sample, by its own lists. {_LOOK_FOR} No correction brings back what is never written"
        )
    if abs(float(gap.value)) > max(OFF, SURE * float(gap.standard_error)):
        return (
            f"of 100 sampled tokens {100.0 * float(gap.value):+.1f} more overlap than the top-k lists allow, so the "
            f"lists and the log-probs of the sampled tokens are not of one distribution. {_LOOK_FOR}"
        )
    return None


_LOOK_FOR = (
    "Look for top-p or top-k sampling, another temperature, other weights or another tokenizer, and mend that first."
)


def _nothing(verdict: Verdict, sentence: str, judged: tuple[Judged, ...]) -> Answer:
    return Answer(verdict=verdict, correction=None, settings={}, sentence=sentence, halves_agree=None, judged=judged)
