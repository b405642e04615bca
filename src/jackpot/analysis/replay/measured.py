"""Applies corrections to batches of responses, and keeps the sums that tables and the rule read."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from jackpot.analysis.advice.rule import (
    GROUPS,
    OVERLAP,
    Costs,
    Estimate,
    JudgedCorrection,
    Recommendation,
    estimate,
    judge,
)
from jackpot.analysis.replay.checks import few_sequences, is_stale, not_finite, why_not
from jackpot.analysis.replay.distributions import SavedDistributions, StateDistributions, saved_distributions, z_of
from jackpot.analysis.replay.factors import GradientFactors, factors, inputs_of, needs_z, prefix_ratio
from jackpot.analysis.replay.gradient import StateValues, state_sums, state_values
from jackpot.analysis.replay.rejected import TopRejected
from jackpot.analysis.replay.responses import ResponseBatch, SavedResponse, collate
from jackpot.analysis.replay.results import ReplayedCorrection
from jackpot.analysis.replay.settings import PARTS, WHOLE_RESPONSE, CorrectionSetting
from jackpot.analysis.replay.stats import (
    CorrectionStats,
    SampledColumns,
    bands_of,
    correction_sums,
    rule_columns,
    run_sums,
)
from jackpot.core.metrics import Sums, add_sums
from jackpot.objectives.corrections import measured
from jackpot.objectives.obrs import acceptance, known_z


class Measured:
    """Sums of the run before any correction, and of every correction."""

    def __init__(self, settings: Sequence[CorrectionSetting]) -> None:
        self.run: Sums = {}
        self._settings = settings
        self._stats = [CorrectionStats() for _ in settings]
        self._changed = [TopRejected() for _ in settings]
        self._left_out: dict[str, dict[str, None]] = {}  # reason -> what is left out for it
        self._prompts = -1  # number of the prompt in its order
        self._last: object = None  # the prompt of the response before

    def add(self, responses: Sequence[SavedResponse]) -> None:
        """Add responses that have log-probs of a policy and a sampled token, those to one prompt after each other."""
        groups = {id(one): self._group(one) for one in responses}
        for alike in _by_lists(responses):
            self._add(collate(alike), torch.tensor([groups[id(one)] for one in alike]))

    @property
    def corrections(self) -> tuple[ReplayedCorrection, ...]:
        """Return the corrections that could be applied to any token."""
        parts = zip(self._settings, self._stats, self._changed, strict=True)
        return tuple(
            ReplayedCorrection(setting=setting, stats=stats, changed=changed)
            for setting, stats, changed in parts
            if stats.sums
        )

    @property
    def left_out(self) -> list[str]:
        """Name what could not be computed, or on some tokens only, so that it is no candidate for the rule."""
        every = int(self.run["total_variation"].count)
        partly: dict[int, list[str]] = {}
        for setting, stats in zip(self._settings, self._stats, strict=True):
            if 0 < stats.tokens < every:
                partly.setdefault(stats.tokens, []).append(setting.label)
        return [
            *(f"{', '.join(names)}: {why}" for why, names in self._left_out.items()),
            *(
                f"{', '.join(some)}: replayed on only {tokens:,} of {every:,} tokens, so the rule leaves them out"
                for tokens, some in partly.items()
            ),
        ]

    def advice(self, weights: str, costs: Costs | None, problem: str | None = None) -> Recommendation:
        """Apply the rule.

        Args:
            weights: whose weights generated and scored the tokens.
            problem: reason against any recommendation, found before the numbers are looked at.
        """
        run, stale = self.run, is_stale(self.run)
        tokens = int(run["total_variation"].count)
        candidates = [
            JudgedCorrection(
                name=one.setting.name,
                label=one.setting.label,
                settings=dict(one.setting.numbers),
                advisable=may_be_advised(one.setting, stale),
                is_whole=one.setting.weighs_whole_responses,
                known=one.stats.known / tokens,
                groups=one.stats.groups,
            )
            for one in self.corrections
            if one.stats.tokens == tokens
        ]
        numbers = {one.label: float(one.groups.sum()) for one in candidates if one.advisable}
        advice_problem = problem or not_finite(run, numbers) or why_not(run)
        found = judge(candidates, self._measured_on(weights, candidates), costs, advice_problem)
        return found if advice_problem else _with_warning(found, few_sequences(run))

    def _measured_on(self, weights: str, candidates: Sequence[JudgedCorrection]) -> str:
        gap, text = self.run["total_variation"], f"{int(self.run['total_variation'].count):,} tokens of {weights}"
        found = Estimate(float(gap.value), None)
        if candidates:
            found = estimate(lambda sums: 1.0 - sums[..., OVERLAP] / sums[..., 0], candidates[0].groups)
        error = f" ± {found.error:.2%}" if found.error is not None else ""
        return f"{text}, with {found.value:.2%}{error} total variation before the correction"

    def _group(self, response: SavedResponse) -> int:
        """Return the group of a response: prompts are dealt to the groups in turn."""
        prompt = response.uid if response.prompt_ids is None else tuple(response.prompt_ids.tolist())
        self._prompts += prompt != self._last
        self._last = prompt
        return self._prompts % GROUPS

    def _add(self, batch: ResponseBatch, groups: Tensor) -> None:
        if any(one.advantages is None for one in batch.responses):
            self._leave_out("the sign of the advantages", _NO_ADVANTAGES)
        lists = saved_distributions(batch)
        states = lists.known if lists else None
        self.run = add_sums(self.run, run_sums(batch, states))
        bands, log_ratio = bands_of(batch, states), torch.where(batch.mask, batch.new - batch.rollout, 0.0)
        ratio, prefixes = log_ratio.exp(), prefix_ratio(log_ratio)
        overlap = acceptance(batch.rollout, batch.new, 1.0)
        if states:
            overlap = overlap.masked_scatter(states.at, states.z(1.0, "new"))
        for setting, stats, changed in zip(self._settings, self._stats, self._changed, strict=True):
            result = self._measured(setting, batch, lists)
            if result is None:
                continue
            found, values = result
            sampled = SampledColumns.of(found, ratio, batch.mask)
            columns = sampled.known(values, states.at) if values else sampled
            stats.add(
                correction_sums(found, sampled, batch.mask, bands),
                state_sums(values, states) if values else None,
                rule_columns(columns, found.scale, prefixes, overlap, batch.mask),
                groups,
            )
            changed.add(batch, found, ratio)

    def _measured(
        self, setting: CorrectionSetting, batch: ResponseBatch, lists: SavedDistributions | None
    ) -> tuple[GradientFactors, StateValues | None] | None:
        """Compute the factors on the sampled tokens, and over whole distributions where those are known."""
        objective = setting.objective
        z = z_of(lists, batch, objective.correction.lam, objective.target)
        if z is None and needs_z(setting):
            self._leave_out(setting.label, _NO_LISTS if lists is None else _NO_OLD)
            return None
        if z is None:
            z = known_z(torch.ones_like(batch.rollout))
        inputs = inputs_of(setting, batch.rollout, batch.old, batch.new, batch.mask, z)
        totals = measured(objective.correction, inputs)
        has_signs = all(one.advantages is not None for one in batch.responses)
        found = factors(setting, inputs, batch.new, batch.advantages if has_signs else None, totals)
        states, values = lists.known if lists else None, None
        if states and not setting.weighs_whole_responses and (states.old is not None or not _reads_old(setting)):
            values = state_values(_of_states(setting, states, totals), states)
        return found, values

    def _leave_out(self, what: str, why: str) -> None:
        self._left_out.setdefault(why, {})[what] = None


def may_be_advised(setting: CorrectionSetting, stale: bool) -> bool:
    """Tell whether the rule may recommend a correction.

    Excluded are single parts of OBRS, and weights of whole responses and prefixes. Where the policy has not been
    updated, corrections aligned to the updated policy are those aligned to the old one, and excluded too.
    """
    if setting.name in (*PARTS, *WHOLE_RESPONSE):
        return False
    if setting.name in ("none", "is"):
        return setting.objective.proximal != "new"
    return stale or not setting.aligns_to_new or setting.name == "dppo"  # which has no other default


def _with_warning(advice: Recommendation, warning: str) -> Recommendation:
    return replace(advice, sentence=advice.sentence + warning)


def _reads_old(setting: CorrectionSetting) -> bool:
    return "old" in (setting.objective.target, setting.objective.proximal)


def _of_states(setting: CorrectionSetting, states: StateDistributions, totals: Sums) -> GradientFactors:
    """Compute the factors of every token of every state, [N, M]."""
    objective = setting.objective
    z = states.z(objective.correction.lam, objective.target)
    value = (torch.ones_like(states.new[:, 0]) if z is None else z).unsqueeze(-1).expand_as(states.new)
    old = states.new if states.old is None else states.old
    everywhere = torch.ones_like(states.new, dtype=torch.bool)
    inputs = inputs_of(setting, states.rollout, old, states.new, everywhere, known_z(value))
    return factors(setting, inputs, states.new, None, totals)


def _by_lists(responses: Sequence[SavedResponse]) -> list[list[SavedResponse]]:
    """Separate responses with top-k lists of both models from those without, as a batch needs the lists of all."""
    parts = ([one for one in responses if one.has_lists == have] for have in (True, False))
    return [part for part in parts if part]


_NO_LISTS = (
    "Z is needed, and there are no top-k lists of both models (log rollout_top_ids, rollout_top_log_probs, "
    "policy_top_ids, policy_top_log_probs)"
)
_NO_OLD = "Z of the old policy is needed, and the top-k lists are those of the policy that is updated"
_NO_ADVANTAGES = "there are no advantages, so both signs count half where one decides what is clipped or rejected"
