"""Which correction to use on a run: the rule and its sentence (docs/replay.md). Layer 6, pure.

Among the corrections that put at most LIMIT of the probability on other tokens than the policy would, the one that
leaves most tokens effective; where a simpler one leaves nearly as many, the simpler one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jackpot.lab.replay.settings import Setting
from jackpot.lab.replay.tally import Tally
from jackpot.ops.reduce import Sums

LIMIT = 0.01  # of the probability may be misplaced
NEARLY = 0.95  # of the most effective tokens, for a simpler correction
FEW_TOKENS = 1_000
TOO_FAR = 0.3  # effective tokens; below it no correction mends the run
OFF = 0.03  # the mean ratio must be 1 within this and five standard errors
TAME = 10.0  # where 99 % of the ratios are below this, their mean can be trusted
SURE = 5.0  # standard errors
KNOWN = 0.5  # of the tokens; with whole distributions for fewer the rule goes by the sampled tokens
SHORT_SEQUENCES = 0.2  # effective responses; below it a weight of whole responses is no use
_ORDER = ("none", "tis", "tis_adjusted", "icepop", "drop", "obrs", "is")  # simple and tame first

Verdict = Literal["none needed", "correct", "too far", "cannot tell"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """What the rule looks at."""

    setting: Setting
    misplaced: float
    effective: float
    is_exact: bool  # summed over the vocabulary and not sampled


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    verdict: Verdict
    correction: str | None  # the label of the setting
    settings: dict[str, object]  # as a recipe takes them
    sentence: str
    halves_agree: bool
    judged: tuple[Judged, ...]


Part = tuple[Setting, Tally, Sequence[Tally]]


def answer(run: Sums, parts: Sequence[Part]) -> Answer:
    """Ask the rule of all responses, and of either half of them."""
    judged = tuple(one for setting, whole, _ in parts if (one := judge(setting, whole)))
    if problem := _why_not(run):
        return _cannot(problem, judged)
    candidates = [one for one in judged if _may_be_advised(one.setting, is_stale(run))]
    if not candidates:
        return _cannot("none of the corrections that could be advised was replayed", judged)
    chosen = choose(candidates)
    halves = _of_halves(parts, is_stale(run))
    agree = all(half.setting.label == chosen.setting.label for half in halves)
    verdict: Verdict = "correct"
    if chosen.setting.name == "none":
        verdict = "none needed"
    elif chosen.effective < TOO_FAR:
        verdict = "too far"
    return Answer(
        verdict=verdict,
        correction=chosen.setting.label,
        settings={"name": chosen.setting.name, **dict(chosen.setting.numbers)},
        sentence=_sentence(verdict, chosen, candidates, run, halves, agree),
        halves_agree=agree,
        judged=judged,
    )


def judge(setting: Setting, tally: Tally) -> Judged | None:
    """The two numbers, exact where whole distributions are known, else sampled; None where nothing was measured."""
    if not tally.sums:
        return None
    if tally.states is not None and tally.states.mean.count >= KNOWN * tally.sums["factor"].count:
        return Judged(
            setting=setting,
            misplaced=tally.states.misplaced_share,
            effective=tally.states.effective,
            is_exact=True,
        )
    factor, square = tally.sums["factor"].value, tally.sums["square"].value
    return Judged(
        setting=setting,
        misplaced=float(tally.sums["apart"].value),
        effective=float(factor.square() / square) if square > 0 else 0.0,
        is_exact=False,
    )


def choose(candidates: Sequence[Judged]) -> Judged:
    """The rule itself. Where none keeps within LIMIT, the one that misplaces least."""
    allowed = [one for one in candidates if one.misplaced <= LIMIT]
    if not allowed:
        return min(candidates, key=lambda one: one.misplaced)
    most = max(one.effective for one in allowed)
    return min((one for one in allowed if one.effective >= NEARLY * most), key=_simplicity)


def is_stale(run: Sums) -> bool:
    """Whether the policy had moved since the batch came in where it was saved."""
    return float(run["stale_max"].value) > 1e-3


def _simplicity(one: Judged) -> tuple[int, bool, bool]:
    """The order of _ORDER; then defaults before other numbers."""
    return _ORDER.index(one.setting.name), bool(one.setting.numbers) and one.setting.name != "obrs", one.setting.is_own


def _may_be_advised(setting: Setting, stale: bool) -> bool:
    """Not the parts of OBRS, not its coin, which only adds noise, and nothing that whole responses decide. Where the
    policy has moved, what aligns to it; where not, that is the same correction under another name."""
    if setting.name not in _ORDER:
        return False
    if setting.name == "obrs" and dict(setting.numbers).get("mask") != "expected":
        return False
    if setting.name in ("none", "is"):
        return setting.objective.proximal == "old"
    return setting.aligns_to_new == stale


def _of_halves(parts: Sequence[Part], stale: bool) -> list[Judged]:
    """The choice of either half; none where a half has no response."""
    chosen = []
    for number in range(len(parts[0][2])):
        judged = [one for setting, _, halves in parts if (one := judge(setting, halves[number]))]
        if candidates := [one for one in judged if _may_be_advised(one.setting, stale)]:
            chosen.append(choose(candidates))
    return chosen


def _why_not(run: Sums) -> str | None:
    """What forbids an answer."""
    tokens = int(run["apart"].count)
    if tokens < FEW_TOKENS:
        return f"there are {tokens} sampled tokens and {FEW_TOKENS:,} are needed; save more rollouts"
    ratio = run["ratio"]
    away = abs(float(ratio.value) - 1.0)
    is_tame = float(run["mismatch/log_ratio"].quantile(0.99).exp()) < TAME
    if is_tame and away > max(OFF, SURE * float(ratio.standard_error)):
        return (
            f"the mean of p_policy / p_rollout is {float(ratio.value):.3f} +- {float(ratio.standard_error):.3f} and "
            f"must be 1, so the log-probs are not of the distributions they are said to be: look for top-p or top-k "
            f"sampling, another temperature, other weights, or another tokenizer; correct nothing before that is mended"
        )
    gap = run.get("acceptance_minus_z")
    if gap is not None and abs(float(gap.value)) > max(OFF, SURE * float(gap.standard_error)):
        return (
            f"tokens are accepted {float(gap.value):+.3f} more often than the saved top-k lists allow, so lists and "
            f"sampled log-probs are not of one distribution; correct nothing before that is mended"
        )
    return None


def _cannot(why: str, judged: tuple[Judged, ...]) -> Answer:
    return Answer(
        verdict="cannot tell",
        correction=None,
        settings={},
        sentence=f"It cannot be told which correction to use: {why}.",
        halves_agree=True,
        judged=judged,
    )


def _sentence(
    verdict: Verdict, chosen: Judged, candidates: Sequence[Judged], run: Sums, halves: Sequence[Judged], agree: bool
) -> str:
    apart, stale = float(run["apart"].value), is_stale(run)
    where = "the policy that is updated" if stale else "the policy"
    tokens = f"total variation over {int(run['apart'].count):,} tokens"
    facts = f"the writer and {where} are {_percent(apart)} apart ({tokens})"
    left = f"misplaces {_percent(chosen.misplaced)} of the probability and leaves {chosen.effective:.0%} of tokens effective"
    none = next((one for one in candidates if one.setting.name == "none"), None)
    if verdict == "none needed":
        by = " with PPO's clip" if stale else ""
        text = f"Use none{by}: {facts}, and without a correction training {left}."
    else:
        text = f"Use {chosen.setting.label}: {facts}; it {left}{_against(chosen, none, candidates)}."
    if verdict == "too far":
        text += (
            f" But that is fewer than {TOO_FAR:.0%}: no correction mends a gap of this size. Take a closer writer, "
            f"bring it new weights more often, or distil the policy into it."
        )
    if chosen.misplaced > LIMIT:
        text += f" None keeps within {LIMIT:.0%} misplaced; this is the one that misplaces least."
    sequences = float(run["mismatch/sequence_ess"].value)
    if sequences < SHORT_SEQUENCES:
        text += (
            f" Nothing that weighs whole responses: at {float(run['length'].value):.0f} tokens their ratio leaves "
            f"{sequences:.1%} of them effective."
        )
    if not agree:
        names = " and ".join(half.setting.label for half in halves)
        text += f" Not sure: the two halves of the data say {names}."
    if not chosen.is_exact:
        text += " Sampled, not summed over the vocabulary; log top-k lists of both models to be surer."
    return text


def _against(chosen: Judged, none: Judged | None, candidates: Sequence[Judged]) -> str:
    """The runner-up of another name, and what happens without a correction."""
    parts = []
    if none and none is not chosen:
        parts.append(f"without a correction {_percent(none.misplaced)} is misplaced")
    others = [one for one in candidates if one.setting.name not in (chosen.setting.name, "none")]
    allowed = [one for one in others if one.misplaced <= LIMIT] or others
    if allowed:
        next_best = max(allowed, key=lambda one: one.effective)
        parts.append(
            f"{next_best.setting.label} leaves {next_best.effective:.0%} and misplaces {_percent(next_best.misplaced)}"
        )
    return f" ({'; '.join(parts)})" if parts else ""


def _percent(share: float) -> str:
    return f"{100.0 * share:.2g} %" if share >= 5e-5 else "less than 0.01 %"
