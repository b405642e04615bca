"""The advice of `jackpot replay` and `jackpot simulate`: what a rollout of another model is worth, and how to use it.

docs/replay.md has the formulas and the rule.

Status: experimental.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from jackpot.core.statistics import Estimate, student_t
from jackpot.models.cost import forward_cost
from jackpot.models.drafts import MOST_DRAFTS, tokens_per_verification

GROUPS = 20  # number of groups of prompts; for standard errors, the jackknife leaves out one group at a time
# Names of the sums over tokens, in their order in a tensor, with the symbols of docs/replay.md, which defines them.
COLUMNS = (
    "tokens",  # number of sampled tokens
    "factor",  # F, the correction's factor on the gradient
    "square",  # F^2, the square of that factor
    "wrong",  # F_s (next line) times the total variation that the correction leaves
    "trained",  # F_s, the mean of F over all tokens that the sampler could have sampled in the state
    # max(0, h / E h - R): by how much a state has too much weight, where the policy visits it less often than the
    # sampler. h is the state's weight under the correction, R the policy's probability of the state over the sampler's.
    "elsewhere",
    "overlap",  # Z at lam = 1: the probability that a draft is accepted
)
TOKENS, OVERLAP = COLUMNS.index("tokens"), COLUMNS.index("overlap")  # indices of two of these sums
# A correction is recommended only if its effective share of tokens, and the best one's worth, are at least this.
LEAST_WORTH = 0.3
TIE_SHARE = 0.95  # a correction ties with the best one if it is worth at least this share of the best one's worth
TIE_ERRORS = 2.0  # standard errors of a difference within which two corrections tie
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # compared shares of the rollout model in the rollouts
_SIMPLICITY = {  # rank by name, or by name and setting `proximal`: simple corrections with small weights first
    name: rank
    for rank, name in enumerate(
        ("none", "tis", "tis new", "obrs", "icepop", "drop", "is", "none rollout", "dppo", "ipo")
    )
}


class Worth(NamedTuple):
    """The worth of a rollout of another model, in rollouts of the policy's own, and three numbers that determine it.

    These are the effective sample size (`effective`), the gap that a correction leaves (`gap`), and the excess weight
    of states that the policy visits less often than the sampler (`elsewhere`): worth =
    effective (1 - 2 gap)^2 (1 - elsewhere)^2 (docs/replay.md). F is the factor of the correction on a token's
    gradient. The fields are tensors of one shape.

    Why: the best step along an estimate g of the gradient G gains <E g, G>^2 / E|g|^2. Noise of single rollouts makes
    up nearly all of E|g|^2, which is then proportional to E F^2. Of E g, the share 1 - elsewhere is in states that the
    policy visits. There the share 1 - gap is on the policy's tokens; the share gap is on others and
    pushes the other way.
    """

    effective: Tensor  # effective sample size as a share of the tokens: (E F)^2 / E F^2, with F as in COLUMNS
    gap: Tensor  # mean over states of the total variation that the correction leaves
    elsewhere: Tensor  # excess weight of states that the policy visits less often, as a share of all states' weight

    @property
    def of_tokens(self) -> Tensor:
        """Return the worth by tokens alone, as if no state had too much weight (`elsewhere` were 0)."""
        return self.effective * (1.0 - 2.0 * self.gap).clamp(min=0.0).square()

    @property
    def value(self) -> Tensor:
        """Return the worth if nothing is learned in states that the policy visits less often than the sampler."""
        return self.of_tokens * (1.0 - self.elsewhere).clamp(min=0.0).square()


def worth_of(sums: Tensor, fraction: float | Tensor = 1.0) -> Worth:
    """Compute the worth of a rollout in a mixture of corrected rollouts of the rollout model and the policy's own.

    F is the correction's factor on a token's gradient, and 1 on the policy's own tokens. With s for `fraction`, m for
    the mean of F and q for that of F^2, `effective` is (s m + 1 - s)^2 / (s q + 1 - s). `gap` and `elsewhere` are those
    of the rollout model's tokens, times these tokens' share of the weight, s m / (s m + 1 - s).

    Args:
        sums: [..., 7] sums over tokens of the rollout model, the COLUMNS.
        fraction: share of the rollout model in the rollouts, from 0 to 1.

    Returns:
        The worth, [...].
    """
    # The sums by their names in COLUMNS, where `wrong` and `trained` are explained; `overlap`, the last, is not needed.
    tokens, factor, square, wrong, trained, elsewhere, _ = sums.unbind(-1)
    mean_factor, mean_square = factor / tokens, square / tokens

    # Means over all tokens of the mixture: of the factor, and below (`noise`) of its square. `weight_share` is the
    # share of the rollout model's tokens in the sum of all factors.
    total = fraction * mean_factor + 1.0 - fraction
    weight_share = fraction * mean_factor / torch.where(total > 0, total, 1.0)
    noise = fraction * mean_square + 1.0 - fraction

    return Worth(
        effective=torch.where(noise > 0, total.square() / noise, 0.0),
        # The mean total variation over states, weighted by F_s of COLUMNS; 1, the largest, if all tokens are dropped.
        gap=weight_share * torch.where(trained > 0, wrong / trained, 1.0),
        elsewhere=weight_share * elsewhere / tokens,
    )


def estimate(function: Callable[..., Tensor], *groups: Tensor) -> Estimate:
    """Evaluate a function at the sums over all groups of prompts, with the jackknife's standard error over groups.

    The jackknife leaves out whole prompts, so tokens of a response and responses to a prompt may depend on each other.

    Args:
        function: takes sums over tokens (COLUMNS), [..., 7] for each of `groups`, and returns [...].
        groups: the 7 sums of each of G groups of prompts, [G, 7]; with several tensors, row g of each is of the same
            prompts. Groups without a token do not count.
    """
    used = [rows[groups[0][:, TOKENS] > 0] for rows in groups]
    totals = [rows.sum(0) for rows in used]
    count = len(used[0])
    value = float(function(*totals))
    if count < 2:
        return Estimate(value, None)

    # The jackknife: the function of all groups but one, for each group.
    without_one = function(*(total - rows for total, rows in zip(totals, used, strict=True)))
    variance = (without_one - without_one.mean()).square().sum() * (count - 1) / count
    return Estimate(value, float(variance.sqrt()))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class JudgedCorrection:
    """A correction with the sums over tokens from which its worth is computed."""

    name: str  # key of CORRECTIONS, or custom
    label: str  # the name, with the settings that differ from the defaults
    settings: dict[str, object]  # settings of `objective.correction` that differ from the defaults
    advisable: bool  # whether the rule may recommend the correction
    is_whole: bool  # whether a token's factor depends on other tokens of the response
    known: float  # share of tokens at which both models' whole distributions are known; 0: sampled tokens only
    groups: Tensor  # [G, 7] sums over the tokens of each group of prompts, the COLUMNS

    @property
    def kind(self) -> str:
        """Return "NAME PROXIMAL" if _SIMPLICITY ranks the correction with its `proximal`, else its name alone."""
        name_and_proximal = f"{self.name} {self.settings.get('proximal')}"
        return name_and_proximal if name_and_proximal in _SIMPLICITY else self.name

    @property
    def simplicity(self) -> tuple[int, bool, int]:
        """Return a sort key that is smallest for the simplest correction.

        The key is (rank of its kind, whether its mask is sampled and so noisy, number of its other settings).
        """
        rank = _SIMPLICITY.get(self.kind, len(_SIMPLICITY))
        # A sampled mask has the mean of the expected mask, and more noise.
        is_noisy = self.name == "obrs" and self.settings.get("mask") != "expected"
        other_settings = self.settings.keys() - {"mask", "target", "proximal"}
        return rank, is_noisy, len(other_settings)

    @property
    def worth(self) -> Estimate:
        """Return the worth of a rollout with this correction, in rollouts of the policy's own."""
        return estimate(lambda sums: worth_of(sums).value, self.groups)

    @property
    def of_tokens(self) -> Estimate:
        """Return the worth without `elsewhere`, as if no state had more weight than the policy's visits to it give."""
        return estimate(lambda sums: worth_of(sums).of_tokens, self.groups)

    @property
    def effective(self) -> Estimate:
        """Return the effective sample size as a share of the tokens; unequal factors of the correction lower it."""
        return estimate(lambda sums: worth_of(sums).effective, self.groups)

    @property
    def tv_after_correction(self) -> Estimate:
        """Return the total variation between corrected distribution and policy, as a mean over states."""
        return estimate(lambda sums: worth_of(sums).gap, self.groups)

    @property
    def elsewhere(self) -> Estimate:
        """Return the excess weight of states that the policy visits less often, as a share of all states' weight."""
        return estimate(lambda sums: worth_of(sums).elsewhere, self.groups)


def relative_worth(first: JudgedCorrection, second: JudgedCorrection) -> Estimate:
    """Return the worth of one correction over that of another on the same tokens, so that shared noise drops out."""
    return estimate(lambda a, b: worth_of(a).value / worth_of(b).value, first.groups, second.groups)


def ties(correction: JudgedCorrection, best: JudgedCorrection) -> bool:
    """Tell whether a correction is worth TIE_SHARE of the best, or is within TIE_ERRORS standard errors of it."""
    share = relative_worth(correction, best)
    is_near = share.error is not None and 1.0 - share.value <= TIE_ERRORS * share.error
    return share.value >= TIE_SHARE or is_near


def choose(candidates: Sequence[JudgedCorrection]) -> JudgedCorrection | None:
    """Return the simplest correction that ties with the best one; None if the best one is worth too little.

    A correction is eligible if it is advisable and leaves at least a share LEAST_WORTH of the tokens effective. The
    best correction must be worth at least LEAST_WORTH by its tokens alone.
    """
    eligible = [
        candidate for candidate in candidates if candidate.advisable and candidate.effective.value >= LEAST_WORTH
    ]
    best = max(eligible, key=lambda candidate: candidate.worth.value, default=None)
    if best is None or best.of_tokens.value < LEAST_WORTH:
        return None

    tied = [candidate for candidate in eligible if ties(candidate, best)]
    return min(tied, key=lambda candidate: candidate.simplicity)  # the key is smallest for the simplest correction


class Costs(NamedTuple):
    """The costs of a token of the rollout model, each divided by the same cost of a token of the policy."""

    flops: float
    weights: float  # number of weights read in a forward pass, which decides how long decoding a small batch takes

    @classmethod
    def of(cls, policy: PreTrainedModel, rollout_model: PreTrainedModel) -> "Costs":
        """Compute the costs from the shapes of both models, which may be on the meta device."""
        return cls(
            flops=forward_cost(rollout_model).per_token / forward_cost(policy).per_token,
            weights=rollout_model.num_parameters() / policy.num_parameters(),
        )


class Generation(NamedTuple):
    """A way to generate rollouts with its worth and its costs.

    A cost is what this way spends for the progress that one rollout of the policy's own makes; that rollout costs 1.
    """

    label: str
    share: float  # share of the rollouts that the rollout model generates
    drafts: int  # drafts before each pass of the policy; 0: none
    worth: Estimate  # how many rollouts of the policy's own make as much progress as one that is generated this way
    flops: Estimate  # cost in FLOPs, relative to a rollout of the policy's own
    flops_any_state: Estimate  # the same cost if every state counts as visited by the policy
    weights: Estimate  # cost in readings of the weights, relative to a rollout of the policy's own


def mixed_generation(share: float, groups: Tensor, costs: Costs) -> Generation:
    """Compute what a rollout of a mixture is worth and costs: the rollout model generates a share, the policy the rest.

    Args:
        share: share of the rollouts that the rollout model generates, from 0 to 1.
        groups: [G, 7] sums over the tokens of each group of prompts (COLUMNS), under the correction that is applied to
            the rollout model's tokens.
        costs: costs of a token of the rollout model; a token of the policy costs 1.
    """
    # Costs of a token, averaged over both models: FLOPs, and readings of model weights.
    flops, weight_reads = (share * cost + 1.0 - share for cost in costs)

    # A rollout's cost is divided by its worth: how many rollouts of the policy's own make as much progress as it does.
    return Generation(
        label="the policy alone" if share == 0.0 else f"share {share:g}",
        share=share,
        drafts=0,
        worth=estimate(lambda sums: worth_of(sums, share).value, groups),
        flops=estimate(lambda sums: flops / worth_of(sums, share).value, groups),
        flops_any_state=estimate(lambda sums: flops / worth_of(sums, share).of_tokens, groups),
        weights=estimate(lambda sums: weight_reads / worth_of(sums, share).value, groups),
    )


def drafted_generation(groups: Tensor, costs: Costs) -> Generation:
    """Judge drafting by the rollout model, with the number of drafts a pass at which the fewest weights are read.

    The policy verifies the drafts, so the rollout is the policy's own and worth 1. With k drafts before each pass, each
    accepted with probability alpha (the mean of Z), a pass gives n = (1 - alpha^(k+1)) / (1 - alpha) tokens. A token
    costs (k + 1) (1 + c) / n FLOPs and (1 + k c) / n readings of the weights; c is the rollout model's cost over the
    policy's.
    """

    def per_token(cost: float, drafts: int) -> Estimate:
        """Divide the cost of a pass with its drafts by the number of tokens that the pass gives.

        The number follows from alpha, the mean of Z over tokens: the sum `overlap` over the number of tokens.
        """
        return estimate(
            lambda sums: cost / tokens_per_verification(sums[..., OVERLAP] / sums[..., TOKENS], drafts),
            groups,
        )

    weights = {drafts: per_token(1.0 + drafts * costs.weights, drafts) for drafts in range(1, MOST_DRAFTS + 1)}
    best = min(weights, key=lambda drafts: weights[drafts].value)
    flops = per_token((best + 1.0) * (1.0 + costs.flops), best)

    return Generation(
        label=f"{best} draft{'s' * (best > 1)} a pass",
        share=0.0,
        drafts=best,
        worth=Estimate(1.0, 0.0),
        flops=flops,
        flops_any_state=flops,
        weights=weights[best],
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recommendation:
    """The advice of the rule, with everything from which it was derived."""

    verdict: Literal["none needed", "correct", "too far", "cannot tell"]
    correction: str | None  # label of the correction; None where none is recommended
    settings: dict[str, object]  # settings of `objective.correction` for a recipe; empty without a recommendation
    lines: Mapping[str, str]  # the advice: a label and its text for each line, at most five lines
    measured_on: str  # text that says which tokens of which weights were judged
    candidates: tuple[JudgedCorrection, ...]
    generation: tuple[Generation, ...]  # empty if the models' costs are not known

    @property
    def sentence(self) -> str:
        """Return the whole advice as one text."""
        return " ".join(f"{label}: {text}." for label, text in self.lines.items())

    def numbers(self) -> dict[str, Any]:
        """Return the advice as plain values, for JSON."""
        estimates = ("worth", "of_tokens", "effective", "tv_after_correction", "elsewhere")

        return {
            "verdict": self.verdict,
            "correction": self.correction,
            "settings": self.settings,
            "lines": dict(self.lines),
            "sentence": self.sentence,
            "measured_on": self.measured_on,
            "candidates": [
                {
                    "label": candidate.label,
                    "name": candidate.name,
                    "advisable": candidate.advisable,
                    "is_whole": candidate.is_whole,
                    "known": candidate.known,
                    **_plain({name: getattr(candidate, name) for name in estimates}),
                }
                for candidate in self.candidates
            ],
            "generation": [_plain(generation._asdict()) for generation in self.generation],
        }


def _plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the fields in which every Estimate is a dict, for JSON."""
    return {name: asdict(value) if isinstance(value, Estimate) else value for name, value in fields.items()}


def judge(
    candidates: Sequence[JudgedCorrection], measured_on: str, costs: Costs | None = None, problem: str | None = None
) -> Recommendation:
    """Recommend a correction, and the cheapest way to generate rollouts with it.

    Args:
        candidates: all corrections with their sums over the same tokens.
        measured_on: text that says which tokens of which weights were judged; it ends the advice.
        costs: costs of a token of the rollout model; None: not known, so no way to generate is judged.
        problem: a reason against any recommendation; None: there is none.
    """
    chosen = None if problem else choose(candidates)
    # If no correction is worth enough, the advice describes the best one.
    advisable = [candidate for candidate in candidates if candidate.advisable]
    best = chosen or max(advisable, key=lambda candidate: candidate.of_tokens.value, default=None)
    if best is None and problem is None:
        problem = "none of the corrections that the rule may recommend could be judged"

    settings, generation = {}, ()
    if problem or best is None:
        verdict, lines = "cannot tell", {"Use": "no correction can be recommended", "Fix first": str(problem)}
    elif chosen is None:
        verdict, lines = "too far", _too_far_lines(best)
    else:
        verdict = "none needed" if chosen.kind == "none" else "correct"
        settings = {"name": chosen.name, **chosen.settings}
        lines = {"Use": _use_text(chosen, candidates), f"After {chosen.label}": _after_text(chosen)}
        if costs:
            mixtures = [mixed_generation(share, chosen.groups, costs) for share in SHARES]
            generation = (*mixtures, drafted_generation(chosen.groups, costs))
            lines |= _generation_lines(generation)

    if best and not problem:
        lines["Judged on"] = f"{measured_on}{_known_text(best)}"

    return Recommendation(
        verdict=verdict,
        correction=chosen.label if chosen else None,
        settings=settings,
        lines=lines,
        measured_on=measured_on,
        candidates=tuple(candidates),
        generation=generation,
    )


def interval_text(mean: Estimate, form: str = ".2f") -> str:
    """Format a number with its 95 % interval by Student's t over the groups; without an error, say why there is none.

    Args:
        mean: the number with its standard error over GROUPS groups.
        form: format of the numbers.
    """
    value, error = mean.value, mean.error
    if error is None:
        return f"{value:{form}} (too few prompts for an interval)"

    half = student_t(GROUPS - 1) * error
    return f"{value:{form}} (95 % CI {value - half:{form}} to {value + half:{form}})"


def _after_text(correction: JudgedCorrection) -> str:
    """Return text on what a correction leaves: total variation, effective sample size, and prefix drift from 1 % on.

    The total variation is between the corrected distribution and the policy. With prefix drift (`elsewhere`) the text
    also has the worth of a rollout by its tokens alone.
    """
    gap = 100.0 * correction.tv_after_correction.value  # in percent; what would round to 0.00 is not given as a number
    percent = "below 0.01" if gap < 0.005 else f"{gap:.2g}"
    text = f"residual gap {percent} % (TV), {correction.effective.value:.0%} effective sample size"
    elsewhere = correction.elsewhere.value
    if elsewhere < 0.01:
        return text

    drift = f"the policy reaches {elsewhere:.0%} of the prefixes less often, which no weight of a token corrects"
    return f"{text}; {drift}. Prefixes aside, a rollout is worth {interval_text(correction.of_tokens)}"


def _use_text(chosen: JudgedCorrection, candidates: Sequence[JudgedCorrection]) -> str:
    """Return the advice which correction to use, with the worth of a rollout under that correction (`Worth`).

    For comparison the text has the worth under the correction named `none` and under the best of the others.
    """
    advice = "no correction is needed" if chosen.kind == "none" else chosen.label
    text = f"{advice}; a rollout is then worth {interval_text(chosen.worth)} of the policy's own"

    # For comparison: `none`, and the best of the corrections that might have been recommended.
    rivals = [rival for rival in candidates if rival.kind != chosen.kind and rival.effective.value >= LEAST_WORTH]
    none = [rival for rival in rivals if rival.advisable and rival.kind == "none"][:1]
    corrected = [rival for rival in rivals if rival.advisable and rival.kind != "none"]
    best = sorted(corrected, key=lambda rival: rival.worth.value, reverse=True)[:1]
    worths = [f"{rival.label} {rival.worth.value:.2f}" for rival in (*none, *best)]
    if best and best[0].worth.value > chosen.worth.value:  # `choose` took a simpler correction, whose worth ties
        worths[-1] += ", a tie"
    if worths:
        text += f"; {', '.join(worths)}"

    # Corrections that weigh whole responses are only mentioned: sampled tokens show too few of their largest weights.
    better = [rival for rival in rivals if rival.is_whole and _is_better(rival, chosen)]
    if whole := max(better, key=lambda rival: rival.worth.value, default=None):
        text += f". {whole.label} reads whole responses: {whole.worth.value:.2f}, if its sampled tokens miss nothing"
    return text


def _is_better(first: JudgedCorrection, second: JudgedCorrection) -> bool:
    """Tell whether a correction is worth more than another by over TIE_ERRORS standard errors."""
    share = relative_worth(first, second)
    return share.error is not None and share.value - 1.0 > TIE_ERRORS * share.error


def _too_far_lines(best: JudgedCorrection) -> dict[str, str]:
    """Return the lines of advice for rollouts that no correction makes worth LEAST_WORTH of the policy's own rollouts.

    The lines say how much the best correction makes a rollout worth, what error it leaves, and what to do instead.
    """
    return {
        "Use": f"no correction closes this gap; with {best.label}, the best, a rollout is worth "
        f"{interval_text(best.of_tokens)} of the policy's own, prefixes aside",
        f"After {best.label}": _after_text(best),
        "Fix first": "take a closer rollout model, update its weights more often, or distil the policy into it",
    }


def _known_text(chosen: JudgedCorrection) -> str:
    """Return text on how total variation was found if some distributions are unknown; "" if at least 99 % are known.

    It follows the sentence that ends in the total variation before the correction.
    """
    if chosen.known >= 0.99:
        return ""

    if chosen.known > 0.0:
        known = f"{chosen.known:.0%} of the tokens, whose top-k lists hold both distributions"
        return f". It is summed over the vocabulary at {known}, and estimated from the sampled tokens elsewhere"
    return ". It is estimated from the sampled tokens: a tail that none of them hit is missing, which top-k lists show"


def _generation_lines(generation: Sequence[Generation]) -> dict[str, str]:
    """Return lines of advice on the way to generate that takes the fewest FLOPs, and on what drafts cost or save."""
    cheapest = min(generation, key=lambda way: way.flops.value)
    text = f"{_instruction(cheapest)}; equal progress takes {interval_text(cheapest.flops, '.0%')} of the rollout FLOPs"

    any_state = min(generation, key=lambda way: way.flops_any_state.value)
    if any_state.label != cheapest.label:
        share = f"{any_state.flops_any_state.value:.0%}"
        text += f". If prefixes that the policy reaches less often counted fully: {_instruction(any_state)}, {share}"

    drafts = generation[-1]  # `judge` lists speculative decoding as the last way to generate
    costs = {"weight reads": drafts.weights.value - 1.0, "FLOPs": drafts.flops.value - 1.0}
    changes = [f"{abs(change):.0%} {'more' if change > 0 else 'fewer'} {name}" for name, change in costs.items()]
    drafting = f"speculative decoding takes {' and '.join(changes)}, without bias"
    return {"Cheapest mix": text, f"With {drafts.label}": drafting}


def _instruction(generation: Generation) -> str:
    """Return an instruction that says which model shall generate the rollouts."""
    if generation.drafts:
        return "let the rollout model draft for the policy"
    if generation.share in (0.0, 1.0):
        return f"let the {'rollout model' if generation.share else 'policy'} generate everything"
    return f"let the rollout model generate {generation.share:.0%}"
