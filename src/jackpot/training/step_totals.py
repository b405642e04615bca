"""Adds up what a correction needs to know of a whole optimizer step."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import torch

from jackpot.core.errors import ConfigError, unknown_name
from jackpot.core.metrics import Max, Metric, Sum, Sums, add_sums, all_reduce_sums
from jackpot.core.types import TokenBatch
from jackpot.objectives.constants import Kappa
from jackpot.objectives.joint import OldLogProbs, PolicyObjective, TokenScores, measured_inputs
from jackpot.training.old_policy import MicroBatch, holds_target

ForwardFn = Callable[[TokenBatch, OldLogProbs | None], TokenScores]


class BeforeBackward(NamedTuple):
    """The totals that are known before the first backward pass of an optimizer step, over all ranks."""

    totals: Sums | None  # None: the only micro-batch of each rank gives them in its own forward pass
    are_provisional: bool  # they are those of a step before; this step's are known after its backward passes
    seconds: float  # wall-clock of their own forward passes

    @property
    def are_final(self) -> bool:
        """Return whether nothing that a backward pass finds changes them."""
        return self.totals is not None and not self.are_provisional


class StepTotals:
    """Finds the totals of an optimizer step in the cheapest way that its correction allows.

    OBRS estimates kappa = sum of acceptance / sum of Z from them. They cost nothing where the step has a single
    micro-batch, or where the old log-probs hold them. Elsewhere `kappa: prepass` takes one more forward pass without
    gradient, unless no rank has more than one micro-batch; `kappa: auto` begins with those of the last step in which
    the policy moved, none at first, and `training.kappa_repair` puts the gradient right once this step's are known. The
    regularizers of the loss do not scale with kappa, so with them `auto` does as `prepass`.

    Which passes run follows from all ranks together, so that all run the same ones, and how kappa is found does not
    depend on their number.

    Raises:
        ConfigError: the correction names an unknown `kappa`.
    """

    def __init__(self, objective: PolicyObjective) -> None:
        if objective.correction.kappa not in get_args(Kappa):
            raise ConfigError(unknown_name("kappa", objective.correction.kappa, get_args(Kappa)))
        self._objective = objective
        self._last: Sums = {}  # totals of the last step in which the policy moved; none at first

    def before_backward(self, micro_batches: Sequence[MicroBatch], forward: ForwardFn) -> BeforeBackward:
        """Return what is known of a step before its first backward pass."""
        wanted = self._objective.correction.kappa
        if wanted == "none":
            return BeforeBackward({}, False, 0.0)
        are_held = all(holds_target(micro.old, self._objective) for micro in micro_batches)
        counts: Sums = {
            "step": Sum.number(sum(bool(micro.tokens.uids) for micro in micro_batches)),
            "rank": Max.number(len(micro_batches)),  # the most of any
        }
        counts = all_reduce_sums(counts)
        if not are_held and counts["step"].value > 1 and wanted == "auto" and not self._objective.is_regularized:
            return BeforeBackward(self._last, True, 0.0)
        if not are_held and counts["rank"].value == 1:
            return BeforeBackward(None, False, 0.0)
        started = time.perf_counter()
        totals: Sums = {}
        with torch.no_grad():
            for micro in micro_batches:
                old = micro.old
                now = old if holds_target(old, self._objective) else OldLogProbs.of(forward(micro.tokens, old))
                _, measured = measured_inputs(self._objective, micro.tokens, old or now, now)
                totals = add_sums(totals, measured)
        return BeforeBackward(all_reduce_sums(totals), False, time.perf_counter() - started)

    def keep(self, totals: Sums) -> None:
        """Keep the totals of a finished step, in which the policy moved, for the next one."""
        self._last = totals

    def state_dict(self) -> dict[str, Any]:
        """Return the totals that were kept, each with its kind, loadable with `weights_only`."""
        return {name: [type(entry).__name__, *entry] for name, entry in self._last.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        kinds = {kind.__name__: kind for kind in Metric.__subclasses__()}
        self._last = {name: kinds[kind](*fields) for name, (kind, *fields) in state.items()}
