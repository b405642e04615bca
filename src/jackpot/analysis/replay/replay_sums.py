"""Sums over saved responses for every correction, from which `jackpot replay` makes its tables and its advice."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from jackpot.analysis.advice.rule import (
    COLUMNS,
    GROUPS,
    OVERLAP,
    TOKENS,
    Costs,
    JudgedCorrection,
    Recommendation,
    estimate,
    interval_text,
    judge,
)
from jackpot.analysis.replay.checks import few_sequences, not_finite, why_not
from jackpot.analysis.replay.distributions import StateDistributions, saved_distributions, z_of
from jackpot.analysis.replay.factors import factors, inputs_of, prefix_ratio
from jackpot.analysis.replay.gradient import StateValues, known_states, state_sums, state_values
from jackpot.analysis.replay.responses import ResponseBatch, SavedResponse, collate
from jackpot.analysis.replay.settings import OBRS_PARTS, WHOLE_RESPONSE, CorrectionSetting
from jackpot.analysis.replay.stats import SampledColumns, bands_of, correction_sums, rule_columns, run_sums
from jackpot.core.metrics import Mean, Sums, add_sums
from jackpot.core.statistics import Estimate
from jackpot.objectives.corrections import CorrectionInputs, measured
from jackpot.objectives.obrs import acceptance, exact_z, known_z


@dataclass(slots=True)
class ReplayedCorrection:
    """A correction with sums of what it did to the tokens of all saved responses.

    The sums are empty, or 0, if the correction could not be applied to any response.
    """

    setting: CorrectionSetting
    sums: Sums = field(default_factory=dict)  # sums over sampled tokens, and over states with known distributions
    # [GROUPS, COLUMNS] sums over the tokens of each group of prompts, for the advice
    groups: Tensor = field(default_factory=lambda: torch.zeros(GROUPS, len(COLUMNS), dtype=torch.float64))

    @property
    def tokens(self) -> int:
        """Return the number of tokens on which the correction was replayed."""
        return int(Mean.named(self.sums, "factor").count) if self.sums else 0


class ReplaySums:
    """A collector of sums over saved responses, before any correction and for every correction."""

    def __init__(self, settings: Sequence[CorrectionSetting]) -> None:
        self.run: Sums = {}
        self._corrections = [ReplayedCorrection(setting) for setting in settings]
        self._left_out: dict[str, dict[str, None]] = {}  # reason -> labels of what is left out for that reason
        self._prompts = -1  # index of the newest prompt, from 0; -1: none yet
        self._newest_prompt: object = None

    @property
    def tokens(self) -> int:
        """Return the number of sampled tokens."""
        return int(Mean.named(self.run, "total_variation").count)

    @property
    def corrections(self) -> tuple[ReplayedCorrection, ...]:
        """Return the corrections that could be applied to at least one token."""
        return tuple(correction for correction in self._corrections if correction.sums)

    @property
    def left_out(self) -> list[str]:
        """Return sentences on what could not be computed, and on corrections that were replayed on some tokens only."""
        labels_by_tokens: dict[int, list[str]] = {}  # labels of corrections, by the number of tokens replayed
        for correction in self.corrections:
            if correction.tokens < self.tokens:
                labels_by_tokens.setdefault(correction.tokens, []).append(correction.setting.label)

        return [
            *(f"{', '.join(labels)}: {why}" for why, labels in self._left_out.items()),
            *(
                f"{', '.join(some)}: replayed on only {tokens:,} of {self.tokens:,} tokens, so the rule leaves them out"
                for tokens, some in labels_by_tokens.items()
            ),
        ]

    def add(self, responses: Sequence[SavedResponse]) -> None:
        """Add responses to all sums. Each has log-probs of the policy and at least one sampled token.

        Responses to the same prompt must follow each other.
        """
        groups = {id(response): self._group(response) for response in responses}
        for has_lists in (True, False):  # in a batch either all responses have top-k lists, or none has
            if alike := [response for response in responses if response.has_lists == has_lists]:
                self._add(collate(alike), torch.tensor([groups[id(response)] for response in alike]))

    def advice(
        self, weights: str, costs: Costs | None, problem: str | None = None, rounding: str = ""
    ) -> Recommendation:
        """Recommend one of the corrections that were replayed on all tokens, by the rule in analysis/advice/rule.py.

        Args:
            weights: text that says whose weights generated and scored the tokens.
            costs: costs of a token for the rollout model, as shares of those for the policy; None: not known.
            problem: reason against any recommendation, found before the numbers are looked at.
            rounding: text that says which log-probs are rounded, and what that adds to the total variation; "": none.
        """
        stale = float(self.run["stale_max"].value) > 1e-3  # nats; the policy was updated since it got the batch
        candidates = [
            JudgedCorrection(
                name=correction.setting.name,
                label=correction.setting.label,
                settings=dict(correction.setting.changes),
                advisable=_may_be_advised(correction.setting, stale),
                is_whole=correction.setting.weighs_whole_responses,
                known=known_states(correction.sums) / self.tokens,  # share of tokens with known distributions
                groups=correction.groups,
            )
            for correction in self.corrections
            if correction.tokens == self.tokens
        ]
        # `not_finite` gets one sum over all numbers of a correction, which is finite only if all of them are.
        totals = {candidate.label: float(candidate.groups.sum()) for candidate in candidates if candidate.advisable}
        problem = problem or not_finite(self.run, totals) or why_not(self.run)
        advice = judge(candidates, self._judged_text(weights, candidates), costs, problem)

        # Add two remarks that `judge` does not make: that log-probs are rounded, as a line of its own; and that few
        # responses are effective, at the end of the line that `judge` labels "After" and the name of a correction.
        lines = {"Precision": rounding} if rounding else {}
        for label, text in advice.lines.items():
            lines[label] = text + (few_sequences(self.run) if label.startswith("After") else "")
        return replace(advice, lines=lines)

    def _judged_text(self, weights: str, candidates: Sequence[JudgedCorrection]) -> str:
        """Return text that says which tokens were judged, and their total variation before the correction."""
        gap = Estimate(float(self.run["total_variation"].value), None)
        if candidates:  # all have the same overlap; its standard error is over groups of prompts
            gap = estimate(lambda sums: 1.0 - sums[..., OVERLAP] / sums[..., TOKENS], candidates[0].groups)
        before = f"{gap.value:.2%}" if gap.error is None else interval_text(gap, ".2%")
        return f"{self.tokens:,} tokens of {weights}, with {before} total variation before the correction"

    def _group(self, response: SavedResponse) -> int:
        """Return the index, below GROUPS, of the group of prompts that a response's prompt is in.

        New prompts are assigned to the groups in turn. A prompt is new if it is not that of the response before.
        """
        prompt = response.uid if response.prompt_ids is None else tuple(response.prompt_ids.tolist())
        self._prompts += prompt != self._newest_prompt  # 1 more if the prompt is new
        self._newest_prompt = prompt
        return self._prompts % GROUPS

    def _add(self, batch: ResponseBatch, groups: Tensor) -> None:
        """Add a batch to all sums; `groups` [B] has, for each response, the index that `_group` gives its prompt."""
        has_signs = all(response.advantages is not None for response in batch.responses)
        advantages = batch.advantages if has_signs else None
        if advantages is None:
            self._leave_out("the sign of the advantages", _NO_ADVANTAGES)

        # Sums of the run before any correction.
        lists = saved_distributions(batch)
        states = lists.known if lists else None
        self.run = add_sums(self.run, run_sums(batch, states))

        # Tensors [B, T] that all corrections share: the ratios rho = p_new / p_inf, their products over the tokens
        # before a token, and the acceptance of each token at lam = 1, or Z where it is known.
        bands = bands_of(batch, states)
        log_ratio = torch.where(batch.mask, batch.new - batch.rollout, 0.0)
        ratio, prefixes = log_ratio.exp(), prefix_ratio(log_ratio)
        overlap = acceptance(batch.rollout, batch.new, lam=1.0)
        if states:
            overlap = overlap.masked_scatter(states.at, exact_z(states.rollout, states.new, lam=1.0))

        for correction in self._corrections:
            setting = correction.setting
            if (inputs := self._inputs(setting, batch, lists)) is None:
                continue

            # Estimate the correction's effect from its factors F on the sampled tokens. Where whole distributions are
            # known (`states`), sums over the vocabulary replace these estimates.
            totals = measured(setting.objective.correction, inputs)
            sampled = factors(setting, inputs, batch.new, advantages, totals)
            columns = SampledColumns.of(sampled, ratio, batch.mask)
            sums = correction_sums(sampled, columns.wrong, batch.mask, bands)
            if states and (values := _state_values(setting, states, totals)):
                sums |= state_sums(values, states)
                columns = columns.with_exact_sums(values, states.at)

            # Sums for the tables, and sums for the advice rule, which are added up by group of prompts.
            correction.sums = add_sums(correction.sums, sums)
            of_responses = rule_columns(columns, sampled.scale, prefixes, overlap, batch.mask)
            correction.groups = correction.groups.index_add(0, groups, of_responses)

    def _inputs(
        self, setting: CorrectionSetting, batch: ResponseBatch, lists: StateDistributions | None
    ) -> CorrectionInputs | None:
        """Build a correction's inputs for a batch. If the correction reads Z, the probability that OBRS accepts tokens,
        and Z is not known, note it as left out and return None."""
        correction = setting.objective.correction
        z = z_of(lists, batch, correction.lam, setting.objective.target)
        if z is None and "z" in correction.reads:
            self._leave_out(setting.label, _NO_LISTS if lists is None else _NO_OLD)
            return None

        if z is None:  # the correction does not read Z
            z = known_z(torch.ones_like(batch.rollout))
        return inputs_of(setting, batch.rollout, batch.old, batch.new, batch.mask, z)

    def _leave_out(self, label: str, why: str) -> None:
        """Note that `label`, a correction or a number of the report, could not be computed for the reason `why`."""
        self._left_out.setdefault(why, {})[label] = None


def _may_be_advised(setting: CorrectionSetting, stale: bool) -> bool:
    """Tell whether the rule of analysis/advice/rule.py may recommend a correction.

    Parts of OBRS that are studied alone, corrections that weigh whole responses or prefixes, and `none` and `is` with
    `proximal: new` are never recommended. If the policy has not been updated, the updated and the old policy are equal,
    and other corrections in which PPO's ratio is 1 (`aligns_to_new`) repeat those that name the old policy. These
    repetitions are not recommended either; dppo and ipo are no repetitions.

    Args:
        setting: the correction.
        stale: whether the policy had been updated since the trainer received the batch.
    """
    if setting.name in (*OBRS_PARTS, *WHOLE_RESPONSE):
        return False
    # With `proximal: new`, these two are never recommended, even if the policy has been updated.
    if setting.name in ("none", "is"):
        return setting.objective.proximal != "new"

    # By default dppo and ipo target the updated policy, so they repeat no correction that targets the old one.
    return stale or not setting.aligns_to_new or setting.name in ("dppo", "ipo")


def _state_values(setting: CorrectionSetting, states: StateDistributions, totals: Sums) -> StateValues | None:
    """Compute a correction's effect in each state of `states` from both models' distributions there.

    A state is the context of one sampled token. Return None for a correction that these distributions do not determine:
    one that weighs whole responses, or one that reads p_old where p_old is not known.
    """
    objective = setting.objective
    reads_old = "old" in (objective.target, objective.proximal)
    if setting.weighs_whole_responses or (states.old is None and reads_old):
        return None

    # Where Z is not known, ones stand for it, and where p_old is not, p_new: the correction does not read either then.
    z = states.z(objective.correction.lam, objective.target)
    z = torch.ones_like(states.new[:, 0]) if z is None else z
    old = states.new if states.old is None else states.old

    inputs = inputs_of(
        setting,
        states.rollout,
        old,
        states.new,
        mask=torch.ones_like(states.new, dtype=torch.bool),
        z=known_z(z.unsqueeze(-1).expand_as(states.new)),
    )
    return state_values(factors(setting, inputs, states.new, advantages=None, totals=totals), states)


_NO_LISTS = (
    "Z is needed, and there are no top-k lists of both models (log rollout_top_ids, rollout_top_log_probs, "
    "policy_top_ids, policy_top_log_probs)"
)
_NO_OLD = "Z of the old policy is needed, and the top-k lists are those of the policy that is updated"
_NO_ADVANTAGES = "there are no advantages, so both signs count half where one decides what is clipped or rejected"
