"""Judges what rollouts of another model are worth: with which correction, with which share of them, or as drafts.

`replay` and `simulate` both take their advice from here. The unit is a rollout that the policy generates itself. One
of another model is worth, with a correction,

    worth = effective (1 - 2 gap)^2 (1 - elsewhere)^2                      0 where gap is 1/2 or more

of three means over sampled tokens. F is the factor of the correction on a token's gradient, with Z; E F and E F^2 are
over the tokens of a state and over a Bernoulli mask. f(x) = p_inf(x) E F(x) of a token x, F_s is its sum over the
state, h the same where nothing is capped (kappa Z for OBRS, 1 for TIS, R_t for prefixes), and R_t the product of rho
over the tokens before t.

    effective = (E F)^2 / E F^2                      effective sample size (ESS): as F has Z, it counts what rejection
                                                     costs in states
    gap       = E sum_x |f - F_s p_new| / 2 / E F_s  TV of the weighted tokens of a state and the policy's
    elsewhere = E (h / E h - R_t)+                   share of the weighted states that the policy visits less often

Why: the best step along an estimate g of the gradient G gains <E g, G>^2 / E|g|^2, up to one constant. The noise of
single rollouts makes up nearly all of E|g|^2, which is then proportional to E F^2. Of the signal E F, the share 1 -
elsewhere is in states of the policy's own; there 1 - gap is on tokens of the policy, and gap is on others and pushes
the other way (`drift` of docs/replay.md). Three assumptions: noise dominates, what is wrong pushes as hard as what is
right, and what is learned in states that the policy visits less often counts as nothing. Without the third, the worth
is that at elsewhere = 0 (`of_tokens`).

With a share s of such rollouts, m = E F, q = E F^2, and the policy's own with F = 1, all three are those of the
mixture:

    effective = (s m + 1 - s)^2 / (s q + 1 - s)        gap, elsewhere: times s m / (s m + 1 - s)

and a token costs s c + 1 - s, where c is the rollout model's cost over the policy's. With k drafts a pass, accepted
with probability alpha = mean Z, rollouts are the policy's own, worth 1. A pass gives n = (1 - alpha^(k+1)) / (1 -
alpha) tokens, so that a token costs (k + 1) (1 + c) / n FLOPs and (1 + k c) / n passes over weights.

Standard errors are of the jackknife over GROUPS groups of prompts, so that the tokens of a response and the responses
to a prompt may depend on each other, and of a quotient on the same tokens, so that what two corrections share drops
out.

The rule: of the corrections that leave ENOUGH effective, take the one of the greatest worth; among those that tie
with it (within SURE standard errors of the quotient, or NEARLY as much), the simplest. `mask: sampled` has the mean
of `mask: expected` with more noise, and stands behind it. A correction that reads other tokens of the response is
judged and not recommended: its gap is known from sampled tokens alone, which miss a tail, and what it gains it gains
by the third assumption. Pure: sums and settings in, a result out.

Status: experimental.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from jackpot.core.statistics import Estimate, student_t
from jackpot.models.drafts import MOST_DRAFTS, tokens_per_verification

GROUPS = 20  # of prompts, over which standard errors are taken
COLUMNS = ("tokens", "factor", "square", "wrong", "trained", "elsewhere", "overlap")  # of sums, in this order
OVERLAP = COLUMNS.index("overlap")
ENOUGH = 0.3  # share of effective tokens that a correction must leave, and worth without states that it must have
NEARLY = 0.95  # share of the greatest worth that counts as a tie
SURE = 2.0  # standard errors of a difference within which two corrections tie
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the rollout model
_ORDER = {  # simple corrections with small weights first
    name: rank
    for rank, name in enumerate(
        ("none", "tis", "tis new", "obrs", "icepop", "drop", "is", "none rollout", "dppo", "ipo")
    )
}

Conclusion = Literal["none needed", "correct", "too far", "cannot tell"]


class Worth(NamedTuple):
    """The three means of `worth`, tensors of one shape."""

    effective: Tensor
    gap: Tensor
    elsewhere: Tensor

    @property
    def of_tokens(self) -> Tensor:
        """Worth where every state counts as one of the policy's."""
        return self.effective * (1.0 - 2.0 * self.gap).clamp(min=0.0).square()

    @property
    def value(self) -> Tensor:
        """Worth in rollouts of the policy's own."""
        return self.of_tokens * (1.0 - self.elsewhere).clamp(min=0.0).square()


def worth_of(sums: Tensor, fraction: float | Tensor = 1.0) -> Worth:
    """Compute the worth of rollouts, a fraction of which is the rollout model's and the others the policy's own.

    Args:
        sums: [..., 7] sums over tokens, the COLUMNS.
    """
    tokens, factor, square, wrong, trained, elsewhere, _ = sums.unbind(-1)
    mean, second = factor / tokens, square / tokens
    total = fraction * mean + 1.0 - fraction
    part = fraction * mean / torch.where(total > 0, total, 1.0)
    noise = fraction * second + 1.0 - fraction
    return Worth(
        effective=torch.where(noise > 0, total.square() / noise, 0.0),
        gap=part * torch.where(trained > 0, wrong / trained, 1.0),
        elsewhere=part * elsewhere / tokens,
    )


def estimate(of: Callable[..., Tensor], *groups: Tensor) -> Estimate:
    """Evaluate a function of sums at the sums of all groups, with the standard error of the jackknife.

    Args:
        of: takes sums [..., 7], one for each of `groups`, and returns [...].
        groups: [G, 7] each, of the same prompts in the same rows; rows without a token do not count.
    """
    used = [rows[groups[0][:, 0] > 0] for rows in groups]
    totals = [rows.sum(0) for rows in used]
    count = len(used[0])
    if count < 2:
        return Estimate(float(of(*totals)), None)
    without = of(*(total - rows for total, rows in zip(totals, used, strict=True)))
    spread = (without - without.mean()).square().sum() * (count - 1) / count
    return Estimate(float(of(*totals)), float(spread.sqrt()))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class JudgedCorrection:
    """One correction, as it is judged."""

    name: str  # of the correction
    label: str  # the name, with what is not the default
    settings: dict[str, object]  # of `objective.correction`, that are not the default
    advisable: bool
    is_whole: bool  # whether it reads other tokens of the response
    known: float  # share of tokens whose whole distributions are summed over; 0: sampled tokens only
    groups: Tensor  # [G, 7] sums over the tokens of each group, the COLUMNS

    @property
    def kind(self) -> str:
        """Return the name, with the proximal point where that makes another correction of it."""
        at_point = f"{self.name} {self.settings.get('proximal')}"
        return at_point if at_point in _ORDER else self.name

    @property
    def simplicity(self) -> tuple[int, bool, int]:
        """Return a sort key: the order of names, masks without noise, few settings that are not the default."""
        others = [name for name in self.settings if name not in ("mask", "target", "proximal")]
        is_noisy = self.name == "obrs" and self.settings.get("mask") != "expected"
        return _ORDER.get(self.kind, len(_ORDER)), is_noisy, len(others)

    @property
    def worth(self) -> Estimate:
        """Worth in rollouts of the policy's own."""
        return estimate(lambda sums: worth_of(sums).value, self.groups)

    @property
    def of_tokens(self) -> Estimate:
        """Worth where every state counts as one of the policy's."""
        return estimate(lambda sums: worth_of(sums).of_tokens, self.groups)

    @property
    def effective(self) -> Estimate:
        """Effective share of tokens, states included."""
        return estimate(lambda sums: worth_of(sums).effective, self.groups)

    @property
    def tv_after_correction(self) -> Estimate:
        """Total variation that is left after the correction, given the state."""
        return estimate(lambda sums: worth_of(sums).gap, self.groups)

    @property
    def elsewhere(self) -> Estimate:
        """Share of states that the policy visits less often."""
        return estimate(lambda sums: worth_of(sums).elsewhere, self.groups)


def relative(one: JudgedCorrection, other: JudgedCorrection) -> Estimate:
    """Return the worth of the first over that of the other, on the same tokens: what both share drops out."""
    return estimate(lambda a, b: worth_of(a).value / worth_of(b).value, one.groups, other.groups)


def ties(one: JudgedCorrection, best: JudgedCorrection) -> bool:
    """Tell whether a correction is worth as much as a better one: nearly, or but for chance."""
    share = relative(one, best)
    if share.value >= NEARLY:
        return True
    return share.error is not None and 1.0 - share.value <= SURE * share.error


def choose(candidates: Sequence[JudgedCorrection]) -> JudgedCorrection | None:
    """Apply the rule; None where no correction is worth enough, whatever its states are worth."""
    enough = [one for one in candidates if one.advisable and one.effective.value >= ENOUGH]
    if not enough:
        return None
    best = max(enough, key=lambda one: one.worth.value)
    if best.of_tokens.value < ENOUGH:
        return None
    return min((one for one in enough if ties(one, best)), key=lambda one: one.simplicity)


class Costs(NamedTuple):
    """Costs of the rollout model for a token, over the policy's."""

    flops: float
    weights: float  # numbers read in a pass: what the time of decoding a small batch goes by


class Generation(NamedTuple):
    """One way to generate rollouts. Costs are for the progress of one rollout of the policy's own, over its cost."""

    label: str
    share: float  # of the rollout model
    drafts: int  # before each pass of the policy; 0: none
    worth: Estimate
    flops: Estimate
    flops_any_state: Estimate  # where every state counts as one of the policy's
    weights: Estimate


def of_share(share: float, groups: Tensor, costs: Costs) -> Generation:
    """Judge a share of the rollout model, with the correction whose sums these are."""
    flops, weights = (share * cost + 1.0 - share for cost in costs)

    def over(cost: float, is_any: bool = False) -> Estimate:
        def of(sums: Tensor) -> Tensor:
            found = worth_of(sums, share)
            return cost / (found.of_tokens if is_any else found.value)

        return estimate(of, groups)

    return Generation(
        label="the policy alone" if share == 0.0 else f"share {share:g}",
        share=share,
        drafts=0,
        worth=estimate(lambda sums: worth_of(sums, share).value, groups),
        flops=over(flops),
        flops_any_state=over(flops, is_any=True),
        weights=over(weights),
    )


def of_drafts(groups: Tensor, costs: Costs) -> Generation:
    """Judge drafts of the rollout model, which are exact, at the number a pass that reads the fewest weights."""

    def over(sums: Tensor, number: int, cost: float) -> Tensor:
        return cost / tokens_per_verification(sums[..., OVERLAP] / sums[..., 0], number)

    def weights(number: int) -> Estimate:
        return estimate(lambda sums: over(sums, number, 1.0 + number * costs.weights), groups)

    best = min(range(1, MOST_DRAFTS + 1), key=lambda number: weights(number).value)
    flops = estimate(lambda sums: over(sums, best, (best + 1.0) * (1.0 + costs.flops)), groups)
    one = Estimate(1.0, 0.0)
    return Generation(f"{best} draft{'s' * (best > 1)} a pass", 0.0, best, one, flops, flops, weights(best))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recommendation:
    """The result of the rule, and what it was judged on."""

    verdict: Conclusion
    correction: str | None  # label; None where none is recommended
    settings: dict[str, object]  # of `objective.correction` in a recipe
    lines: Mapping[str, str]  # by their labels, at most five
    measured_on: str  # which tokens of which weights
    candidates: tuple[JudgedCorrection, ...]
    generation: tuple[Generation, ...]  # empty where the models' costs are not known

    @property
    def sentence(self) -> str:
        """Return all lines as one text."""
        return " ".join(f"{label}: {text}." for label, text in self.lines.items())

    def numbers(self) -> dict[str, Any]:
        """Return the advice as plain values."""
        names = ("worth", "of_tokens", "effective", "tv_after_correction", "elsewhere")

        return {
            "verdict": self.verdict,
            "correction": self.correction,
            "settings": self.settings,
            "lines": dict(self.lines),
            "sentence": self.sentence,
            "measured_on": self.measured_on,
            "candidates": [
                {
                    "label": one.label,
                    "name": one.name,
                    "advisable": one.advisable,
                    "is_whole": one.is_whole,
                    "known": one.known,
                }
                | {name: asdict(getattr(one, name)) for name in names}
                for one in self.candidates
            ],
            "generation": [
                {name: asdict(value) if isinstance(value, Estimate) else value for name, value in one._asdict().items()}
                for one in self.generation
            ],
        }


def judge(
    candidates: Sequence[JudgedCorrection], measured_on: str, costs: Costs | None = None, problem: str | None = None
) -> Recommendation:
    """Recommend a correction, and a way to generate rollouts with it.

    Args:
        measured_on: which tokens of which weights, for the sentence: two results differ only where this does.
        costs: of the two models; None where they are not known.
        problem: a reason against any recommendation.
    """
    found, settings, generation, label = tuple(candidates), {}, (), None
    chosen = None if problem else choose(found)
    best = chosen or max((one for one in found if one.advisable), key=lambda one: one.of_tokens.value, default=None)
    if problem is None and best is None:
        problem = "none of the corrections that the rule may recommend could be judged"

    if problem or best is None:
        verdict, lines = "cannot tell", {"Use": "no correction can be recommended", "Fix first": str(problem)}
    elif chosen is None:
        verdict, lines = "too far", _too_far(best)
    else:
        verdict, label = ("none needed" if chosen.kind == "none" else "correct"), chosen.label
        settings = {"name": chosen.name, **chosen.settings}
        lines = {"Use": _use(chosen, found), f"After {chosen.label}": _after(chosen)}
        if costs:
            generation = (*(of_share(share, chosen.groups, costs) for share in SHARES), of_drafts(chosen.groups, costs))
            lines |= _generate(generation)
    if best and not problem:
        lines["Judged on"] = f"{measured_on}{_known(best)}"

    return Recommendation(
        verdict=verdict,
        correction=label,
        settings=settings,
        lines=lines,
        measured_on=measured_on,
        candidates=found,
        generation=generation,
    )


def interval_text(one: Estimate, form: str = ".2f") -> str:
    """Return a number with its 95 % interval by Student's t over the groups; the number alone without an error."""
    if one.error is None:
        return f"{one.value:{form}} (too few prompts for an interval)"
    half = student_t(GROUPS - 1) * one.error
    return f"{one.value:{form}} (95 % CI {one.value - half:{form}} to {one.value + half:{form}})"


def _after(one: JudgedCorrection) -> str:
    """Say what a correction leaves, and what it is worth where drift of the prefixes does not count."""
    gap = 100.0 * one.tv_after_correction.value
    left = "below 0.01" if gap < 0.005 else f"{gap:.2g}"
    text = f"residual gap {left} % (TV), {one.effective.value:.0%} effective sample size"
    if one.elsewhere.value < 0.01:
        return text
    drift = f"{one.elsewhere.value:.0%} of prefixes are under-visited by the policy"
    return f"{text}; {drift}. Ignoring prefix drift a rollout is worth {interval_text(one.of_tokens)}"


def _use(chosen: JudgedCorrection, candidates: Sequence[JudgedCorrection]) -> str:
    """Say which correction to use, beside none and the best one of another name."""
    advice = "no correction is needed" if chosen.kind == "none" else chosen.label

    others = [one for one in candidates if one.kind != chosen.kind and one.effective.value >= ENOUGH]
    none = [one for one in others if one.advisable and one.kind == "none"][:1]
    rest = [one for one in others if one.advisable and one.kind != "none"]
    best = [max(rest, key=lambda one: one.worth.value)] if rest else []
    against = [f"{one.label} {one.worth.value:.2f}" for one in (*none, *best)]
    if best and best[0].worth.value > chosen.worth.value:
        against[-1] += ", a tie"

    text = f"{advice}; a rollout is then worth {interval_text(chosen.worth)} of the policy's own"
    text += f"; {', '.join(against)}" if against else ""
    better = [one for one in others if one.is_whole and _is_better(one, chosen)]
    if better:
        whole = max(better, key=lambda one: one.worth.value)
        text += f". {whole.label} reads whole responses: {whole.worth.value:.2f}, if its sampled tokens miss nothing"
    return text


def _is_better(one: JudgedCorrection, other: JudgedCorrection) -> bool:
    """Tell whether a correction is worth more than another but for chance."""
    share = relative(one, other)
    return share.error is not None and share.value - 1.0 > SURE * share.error


def _too_far(best: JudgedCorrection) -> dict[str, str]:
    return {
        "Use": f"no correction closes this gap; with {best.label}, the best, a rollout is worth "
        f"{interval_text(best.of_tokens)} of the policy's own, prefix drift ignored",
        f"After {best.label}": _after(best),
        "Fix first": "take a closer rollout model, update its weights more often, or distil the policy into it",
    }


def _known(chosen: JudgedCorrection) -> str:
    if chosen.known >= 0.99:
        return ""
    if chosen.known > 0.0:
        known = f"for {chosen.known:.0%} of the tokens"
        return f". Summed over both distributions where the top-k lists hold them, {known}, and sampled at the others"
    return (
        ". Sampled, not summed over the vocabulary: a tail that was not sampled is missing; top-k lists would show it"
    )


def _generate(generation: Sequence[Generation]) -> dict[str, str]:
    """Say which way to generate takes the fewest FLOPs for the same progress, and what drafts cost."""
    by = {name: min(generation, key=lambda one: getattr(one, name).value) for name in ("flops", "flops_any_state")}
    least, any_state = by["flops"], by["flops_any_state"]
    text = f"{_way(least)}; same progress for {interval_text(least.flops, '.0%')} of the rollout FLOPs"
    if any_state.label != least.label:
        text += f". If under-visited prefixes counted fully: {_way(any_state)}, {any_state.flops_any_state.value:.0%}"
    drafts = generation[-1]
    costs = {"weight reads": drafts.weights.value - 1.0, "FLOPs": drafts.flops.value - 1.0}
    changes = [f"{abs(change):.0%} {'more' if change > 0 else 'fewer'} {name}" for name, change in costs.items()]
    return {"Cheapest mix": text, f"With {drafts.label}": f"speculative decoding: {', '.join(changes)}, no bias"}


def _way(one: Generation) -> str:
    """Return who generates."""
    if one.drafts:
        return "let the rollout model draft for the policy"
    if one.share in (0.0, 1.0):
        return f"let the {'rollout model' if one.share else 'policy'} generate everything"
    return f"let the rollout model generate {one.share:.0%}"
