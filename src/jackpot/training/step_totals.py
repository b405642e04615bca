"""Add up what a correction needs to know of a whole optimizer step before its first backward pass."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from jackpot.core.metrics import Max, Mean, Sums, add_sums, all_reduce_sums
from jackpot.core.types import TokenBatch
from jackpot.objectives.joint import OldLogProbs, PolicyObjective, TokenScores, correction_inputs
from jackpot.objectives.obrs import ZEstimate
from jackpot.training.old_policy import MicroBatch, holds_target

ForwardFn = Callable[[TokenBatch, OldLogProbs | None], TokenScores]
WITH_FILL_INS, WITHOUT_FILL_INS = "with_fill_ins", "without_fill_ins"


class StepTotals:
    """Finds the totals of an optimizer step in the cheapest way that its correction allows.

    OBRS estimates kappa = sum of acceptance / sum of Z from them. With `kappa: previous` they are those of the step
    before; with `prepass` those of this step, which take one more forward pass without gradient unless the step has a
    single micro-batch or the old log-probs hold them; with `auto` those of this step where they are free or where there
    is none before, and else those of the step before.

    The step before is the last one whose Z was summed over the same sets of tokens: with the fill-ins of the rollout
    model in training, or over the engine's top k alone. A factor of one sum would be wrong for the other.
    """

    def __init__(self, objective: PolicyObjective) -> None:
        self._objective = objective
        self._previous: dict[str, Sums] = {}  # totals of the last step of each kind; none at first
        self._kind = WITHOUT_FILL_INS  # of the step that `before_backward` looked at

    def measure(self, batch: TokenBatch, old: OldLogProbs, log_probs: Tensor, z: ZEstimate) -> Sums:
        """Return the sums of one micro-batch; `log_probs` and `z` [B, T] are the current policy's."""
        return self._objective.correction.measure(correction_inputs(self._objective, batch, old, log_probs, z))

    def before_backward(
        self, micro_batches: Sequence[MicroBatch], forward: ForwardFn, has_fill_ins: Callable[[MicroBatch], bool]
    ) -> tuple[Sums | None, float]:
        """Return the totals of a step, over all ranks, and the seconds that their forward passes take.

        None in place of totals means that the only micro-batch gives them in its own forward pass.

        Args:
            has_fill_ins: whether the Z of a micro-batch contains fill-ins of the rollout model in training.
        """
        wanted = self._objective.correction.kappa
        if wanted in ("auto", "previous"):
            is_free = len(micro_batches) == 1 or all(holds_target(one.old, self._objective) for one in micro_batches)
            costs, is_filled = _on_any_rank(not is_free, any(map(has_fill_ins, micro_batches)))
            self._kind = WITH_FILL_INS if is_filled else WITHOUT_FILL_INS
            previous = self._previous.get(self._kind, {})
            if wanted == "previous" or (previous and costs):
                return previous, 0.0
        if wanted == "none":
            return {}, 0.0
        if len(micro_batches) == 1:
            return None, 0.0
        started = time.perf_counter()
        totals: Sums = {}
        with torch.no_grad():
            for micro in micro_batches:
                old = micro.old
                if holds_target(old, self._objective):
                    measured = self.measure(micro.tokens, old, old.old_log_probs, old.z)
                else:
                    scores = forward(micro.tokens, old)
                    measured = self.measure(micro.tokens, old or OldLogProbs.of(scores), scores.log_probs, scores.z)
                totals = add_sums(totals, measured)
        return all_reduce_sums(totals), time.perf_counter() - started

    def keep(self, totals: Sums) -> None:
        """Keep the totals of a finished step for the next one, unless a token of it was not finite or none counted."""
        if totals["acceptance"].total.isfinite() and totals["z"].total > 0:
            self._previous[self._kind] = totals

    def state_dict(self) -> dict[str, Any]:
        """Return the totals of the steps before, loadable with `weights_only`."""
        return {kind: {name: list(entry) for name, entry in totals.items()} for kind, totals in self._previous.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self._previous = {
            kind: {name: Mean(*entry) for name, entry in state[kind].items()}
            for kind in (WITH_FILL_INS, WITHOUT_FILL_INS)
            if kind in state
        }


def _on_any_rank(*happens: bool) -> list[bool]:
    """Give all ranks the same answers, since all must take the same forward passes."""
    sums = {str(number): Max.number(float(one)) for number, one in enumerate(happens)}
    reduced = all_reduce_sums(sums)
    return [bool(reduced[name].value) for name in sums]
