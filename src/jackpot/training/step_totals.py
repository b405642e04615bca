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


class StepTotals:
    """Finds the totals of an optimizer step in the cheapest way that its correction allows.

    OBRS estimates kappa = sum of acceptance / sum of Z from them. With `kappa: previous` they are those of the step
    before; with `prepass` those of this step, which take one more forward pass without gradient unless the step has a
    single micro-batch or the old log-probs hold them; with `auto` those of this step where they are free or at the
    first step, and else those of the step before.
    """

    def __init__(self, objective: PolicyObjective) -> None:
        self._objective = objective
        self._previous: Sums = {}  # totals of the step before; empty at first

    def measure(self, batch: TokenBatch, old: OldLogProbs, log_probs: Tensor, z: ZEstimate) -> Sums:
        """Return the sums of one micro-batch; `log_probs` and `z` [B, T] are the current policy's."""
        return self._objective.correction.measure(correction_inputs(self._objective, batch, old, log_probs, z))

    def before_backward(self, micro_batches: Sequence[MicroBatch], forward: ForwardFn) -> tuple[Sums | None, float]:
        """Return the totals of a step, over all ranks, and the seconds that their forward passes take.

        None in place of totals means that the only micro-batch gives them in its own forward pass.
        """
        wanted = self._objective.correction.kappa
        is_free = len(micro_batches) == 1 or all(holds_target(micro.old, self._objective) for micro in micro_batches)
        if wanted == "auto":
            wanted = "previous" if self._previous and _on_any_rank(not is_free) else "prepass"
        if wanted != "prepass":
            return (self._previous if wanted == "previous" else {}), 0.0
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
            self._previous = totals

    def state_dict(self) -> dict[str, Any]:
        """Return the totals of the step before, loadable with `weights_only`."""
        return {name: list(entry) for name, entry in self._previous.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        self._previous = {name: Mean(*entry) for name, entry in state.items()}


def _on_any_rank(happens: bool) -> bool:
    """Give all ranks the same answer, since all must take the same forward passes."""
    return bool(all_reduce_sums({"happens": Max.number(float(happens))})["happens"].value)
