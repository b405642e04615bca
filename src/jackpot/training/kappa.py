"""Sums over an optimizer step for the policy's correction; OBRS scales weights by kappa = sum of acceptance / sum of Z.

`StepTotals` finds the sums; `KappaRepair` mends a gradient that was computed with the kappa of another step.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from jackpot.core.errors import ConfigError, unknown_name
from jackpot.core.metrics import Max, Mean, Metric, Sum, Sums, add_sums, all_gather, all_reduce_sums, max_over_ranks
from jackpot.core.shards import locals_of
from jackpot.core.types import TokenBatch
from jackpot.objectives.constants import Kappa
from jackpot.objectives.corrections import Correction
from jackpot.objectives.joint import COUNTS, OldLogProbs, PolicyObjective, PolicyTerms, TokenScores, measured_inputs
from jackpot.training.batching import batch_to, empty_like, regroup
from jackpot.training.old_policy import MicroBatch, by_rollout, holds_target

ForwardFn = Callable[[TokenBatch, OldLogProbs | None], TokenScores]


class BeforeBackward(NamedTuple):
    """The totals with which an optimizer step begins its backward passes, summed over all ranks."""

    totals: Sums | None  # None: the forward pass of each rank's only micro-batch gives the totals
    are_provisional: bool  # True: totals of an earlier step; this step's are known after its backward passes
    seconds: float  # wall-clock seconds of forward passes that were run for the totals alone


class StepTotals:
    """The totals of an optimizer step, found in the cheapest way that the correction allows.

    OBRS scales its weights by kappa = sum of acceptance / sum of Z, computed from the totals. They cost nothing where
    no rank has more than one micro-batch in the step, or where the old log-probs suffice (`holds_target`). Elsewhere
    `kappa: prepass` takes one more forward pass without gradient. `kappa: auto` begins with the totals of the last step
    in which the policy moved, none at first, and `KappaRepair` corrects the gradient once the totals of this step are
    known. Regularizers of the loss do not scale with kappa, so with them `auto` does what `prepass` does.

    All ranks decide together which passes run, so that all run equal passes, and so that the way to find kappa does not
    depend on the number of ranks.

    Raises:
        ConfigError: the correction names an unknown `kappa`.
    """

    def __init__(self, objective: PolicyObjective) -> None:
        if objective.correction.kappa not in get_args(Kappa):
            raise ConfigError(unknown_name("kappa", objective.correction.kappa, get_args(Kappa)))
        self._objective = objective
        self._last: Sums = {}  # totals of the last step in which the policy moved; empty at first

    def before_backward(self, micro_batches: Sequence[MicroBatch], forward: ForwardFn) -> BeforeBackward:
        """Return the totals, as far as they are known before the first backward pass of a step.

        The totals are the sums of acceptance and of its expectation Z, whose ratio is kappa. They are empty for a
        correction without kappa; `BeforeBackward` says when they are of an earlier step, or None.
        """
        kappa = self._objective.correction.kappa
        if kappa == "none":
            return BeforeBackward(totals={}, are_provisional=False, seconds=0.0)

        # Whether the old log-probs alone determine the totals, so that no forward pass is needed.
        old_suffices = all(holds_target(micro.old, self._objective) for micro in micro_batches)
        counts: Sums = {  # numbers of micro-batches
            "step": Sum.number(sum(bool(micro.tokens.uids) for micro in micro_batches)),  # with sequences, on all ranks
            "rank": Max.number(len(micro_batches)),  # all those of the rank that has most
        }
        counts = all_reduce_sums(counts)

        # In a step of several micro-batches begin with the totals of an earlier step; `KappaRepair` then corrects the
        # gradient. It cannot correct a gradient with regularizers, which do not scale with kappa.
        if not old_suffices and counts["step"].value > 1 and kappa == "auto" and not self._objective.is_regularized:
            return BeforeBackward(totals=self._last, are_provisional=True, seconds=0.0)
        # Leave the totals to the forward pass of each rank's only micro-batch.
        if not old_suffices and counts["rank"].value == 1:
            return BeforeBackward(totals=None, are_provisional=False, seconds=0.0)

        # Find the totals from the old log-probs or, where these do not suffice, by forward passes without gradient.
        started = time.perf_counter()
        totals: Sums = {}
        with torch.no_grad():
            for micro in micro_batches:
                old = micro.old
                current = old if holds_target(old, self._objective) else OldLogProbs.of(forward(micro.tokens, old))
                # Without old log-probs this is the first update on the tokens, where the current policy is the old one.
                _, measured = measured_inputs(self._objective, micro.tokens, old or current, current)
                totals = add_sums(totals, measured)
        return BeforeBackward(
            totals=all_reduce_sums(totals), are_provisional=False, seconds=time.perf_counter() - started
        )

    def keep(self, totals: Sums) -> None:
        """Keep the totals of a finished step that moved the policy, for the next step."""
        self._last = totals

    def state_dict(self) -> dict[str, Any]:
        """Return the totals of the last step that moved the policy, in a form that torch loads with `weights_only`."""
        return {name: [type(entry).__name__, *entry] for name, entry in self._last.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the totals that `state_dict` returned as those of the last step that moved the policy."""
        kinds = {kind.__name__: kind for kind in Metric.__subclasses__()}
        self._last = {name: kinds[kind](*fields) for name, (kind, *fields) in state.items()}


ROUNDING = 4e-6  # largest relative rounding error of a weight, which is a product of exponentials in float32
MARGIN = 3.0  # the factor 3 by which `KappaRepair` enlarges its estimate of the error


@dataclass(frozen=True, slots=True)
class PolicyPass:
    """What `KappaRepair` needs of the backward pass of a micro-batch to repair the policy's gradient."""

    batch: TokenBatch  # tokens of the micro-batch, on the CPU
    terms: PolicyTerms  # terms of the policy's loss, detached
    correction: Correction  # its weights are those in the gradient
    # [B, T] norm of the gradient of the hidden state that predicts each token, 0 where masked; None where the
    # correction is final, so that nothing is repaired
    norms: Tensor | None

    @property
    def weights(self) -> Tensor:
        """Return the factor of each token's surrogate in the loss, its weight times the acceptance mask: [B, T]."""
        return self.correction.weights * self.correction.accept_mask


class HiddenNorms:
    """A record of the norms of the gradients of N hidden states, [N], which the backward pass fills in."""

    def __init__(self, hidden: Tensor) -> None:
        self._rows: Tensor | None = None
        hidden.register_hook(self._record)

    def spread(self, batch: TokenBatch) -> Tensor:
        """Return the gradient's norm at the hidden state that predicts each token: [B, T] float32, 0 if not sampled."""
        return torch.zeros_like(batch.rollout_log_probs) if self._rows is None else batch.spread(self._rows)

    def _record(self, gradient: Tensor) -> None:
        """Keep the norm of each row of the gradient of the hidden states, [N, H] -> [N]."""
        self._rows = torch.linalg.vector_norm(gradient, dim=-1, dtype=torch.float32)


class KappaRepair:
    """The repair of a policy gradient that was computed with the totals of an earlier optimizer step.

    Let kappa be the ratio of this step's totals (sum of acceptance / sum of Z), kappa_0 that of the earlier step's,
    w(kappa) a token's weight, which is linear in kappa except where a cap holds it, S the surrogate and m the
    acceptance mask. The policy's gradient is

        G(kappa) = - sum m w(kappa) dS = s G(kappa_0) - sum m delta dS      s = kappa / kappa_0
        delta    = w(kappa) - s w(kappa_0)                                  0 unless a cap holds w(kappa) or w(kappa_0)

    So after backward passes with any kappa_0 the gradient is multiplied by s, which is exact for all tokens that no cap
    touches. Sequences with other tokens are read once more with the weights delta, but only as many as are needed for
    an error below `kappa_tolerance`. With a tolerance of 0 the result is G(kappa) up to rounding for every correction;
    it is cheap where weights are piecewise linear.

    Let h_i be the hidden state that predicts token i, and dL/dh_i the gradient of the policy's loss at this state. The
    error of sequences that are not read again is estimated as

        3 sqrt(sum over sequences (sum over tokens |delta_i / (s w_i(kappa_0))| |dL/dh_i|)^2) / sqrt(sum |dL/dh_i|^2)

    relative to |G(kappa)|. The estimate assumes that gradients of tokens add up fully within a sequence and are
    unrelated between sequences, and that gradients of parameters are as large as those of the hidden states, through
    which alone a token reaches them. Without the factor 3 the error was up to 2.4 times the estimate
    (docs/corrections.md). The estimate is no bound: where the gradients of a step's tokens cancel, |G| is smaller than
    for unrelated tokens, and the relative error larger.

    Args:
        parameters: trained parameters of the policy, whose gradients are sums that are not yet divided.
        log_probs: computes the policy's log-probs of a batch, [B, T] with gradient.
        max_length: as in `joint_loss`.
        pads: as in `batching.micro_batches`.
    """

    def __init__(
        self,
        objective: PolicyObjective,
        parameters: Iterable[nn.Parameter],
        log_probs: Callable[[TokenBatch], Tensor],
        *,
        max_length: int,
        pads: bool,
    ) -> None:
        """Keep what it takes to correct a gradient once the step's kappa is known: loss, parameters, forward pass.

        `max_length` is the most tokens that a response may have, as the loss may divide by it. `pads` says whether
        sequences that get a second forward pass need padding.
        """
        self._objective = objective
        self._parameters = list(parameters)
        self._log_probs = log_probs
        self._max_length = max_length
        self._pads = pads

    def apply(self, passes: Sequence[PolicyPass], totals: Sums) -> tuple[list[PolicyPass], Sums]:
        """Correct the policy's gradient, summed over passes with provisional weights, to that with the final weights.

        The final weights have the kappa that `totals` gives. The parameters' `grad` is scaled in place; if its error is
        still too large, the forward and backward passes of some sequences are run again.

        Args:
            passes: the backward passes of this step.
            totals: totals of this step, over all ranks.

        Returns:
            The passes with the new weights, and metrics of this rank.
        """
        correction = self._objective.correction
        # The passes with the weights of this step's totals.
        final = [replace(micro, correction=correction.apply(micro.terms.inputs, totals)) for micro in passes]
        # `scale`: this step's kappa divided by the kappa in the gradient. `deltas`: what each weight then lacks.
        scale = final[0].correction.kappa / passes[0].correction.kappa
        deltas = [_delta(new.weights, scale * old.weights) for new, old in zip(final, passes, strict=True)]

        norms = [old.norms for old in passes if old.norms is not None]  # all have norms: the totals were provisional
        # What each token adds to the error if its sequence is not read again: the share of its weight that is lacking,
        # times the norm of the gradient at the hidden state that predicts it; 0 where nothing is lacking.
        errors = [
            torch.where(delta == 0, 0.0, (delta / (scale * old.weights)).abs() * pass_norms)
            for delta, old, pass_norms in zip(deltas, passes, norms, strict=True)
        ]

        error, is_chosen = _to_repair(errors, norms, self._objective.kappa_tolerance)
        any_rank_repairs = ~(error <= self._objective.kappa_tolerance)  # True also where the error is NaN
        # Copy scale, whether any rank repairs, and the choice of sequences to the CPU: the only wait for the device.
        decisions = torch.cat([torch.stack([scale, any_rank_repairs]), is_chosen])
        factor, is_repaired, *chosen = decisions.tolist()  # `chosen`: 1 or 0 for each sequence

        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        torch._foreach_mul_(locals_of(gradients), factor)
        if is_repaired:
            self._repair(final, deltas, chosen)

        return final, {
            "obrs/kappa_error": Mean.of(error, torch.ones_like(error, dtype=torch.bool)),
            "obrs/repaired_sequences": Mean.of(is_chosen, torch.ones_like(is_chosen)),
        }

    def _repair(self, passes: Sequence[PolicyPass], deltas: Sequence[Tensor], chosen: Sequence[float]) -> None:
        """Run the chosen sequences forward and backward again, with the weights `deltas`, [B, T] for each pass.

        Their gradient is added to that of the parameters. `chosen` has 1 or 0 for each sequence of all passes, in their
        order. All ranks run as many passes as the rank with the most; a rank without further sequences runs empty ones.
        """
        batches = [micro.batch for micro in passes]
        rows: list[list[int]] = []
        columns_by_uid: dict[str, dict[str, Tensor]] = {}
        remaining = iter(chosen)  # 1 or 0 for the sequences of the batches that are still to come

        # The rows of the chosen sequences in each batch, and by uid the columns that the loss of a sequence needs.
        for micro, delta in zip(passes, deltas, strict=True):
            batch, inputs = micro.batch, micro.terms.inputs
            rows.append([row for row, is_chosen in enumerate(islice(remaining, len(batch.uids))) if is_chosen])
            counted = COUNTS[self._objective.count](micro.correction, inputs.response_mask)
            pass_columns = {"delta": delta, "proximal": inputs.proximal_log_probs, "counted": counted}
            columns_by_uid |= by_rollout(batch, pass_columns)

        # Read the chosen sequences again, gathered in few batches.
        repairs = regroup(batches, rows, self._pads)
        most_repairs = max_over_ranks(len(repairs))

        for batch in repairs:
            batch_rows = [columns_by_uid[uid] for uid in batch.uids]
            padded = {name: pad_sequence([row[name] for row in batch_rows], batch_first=True) for name in batch_rows[0]}
            self._backward(batch, **padded)
        # Run empty passes until this rank has run as many as the rank with the most.
        nothing = deltas[0][:0]  # [0, T]
        for _ in range(len(repairs), most_repairs):
            self._backward(empty_like(batches[0]), delta=nothing, proximal=nothing, counted=nothing)

    def _backward(self, batch: TokenBatch, delta: Tensor, proximal: Tensor, counted: Tensor) -> None:
        """Add the gradient of a batch's surrogates, weighted by `delta`, to the parameters' gradient.

        Args:
            delta: [B, T] weight that each token still lacks in the gradient.
            proximal, counted: [B, T] proximal log-probs, and which tokens the loss counts.
        """
        batch = batch_to(batch, delta.device)
        surrogate = self._objective.surrogate_of(self._log_probs(batch), proximal, batch).value
        # The sum of the losses alone: the optimizer divides gradients by the step's denominator later.
        numerator, _ = self._objective.aggregate(-delta * surrogate, counted, self._max_length)
        numerator.backward()


def _delta(final_weights: Tensor, used_weights: Tensor) -> Tensor:
    """Return the weight that each token still lacks in the gradient, `final_weights` - `used_weights`: all [B, T].

    It is 0 where the two differ by rounding alone.
    """
    delta = final_weights - used_weights
    return torch.where(delta.abs() > ROUNDING * final_weights.abs(), delta, 0.0)


def _to_repair(token_errors: Sequence[Tensor], norms: Sequence[Tensor], tolerance: float) -> tuple[Tensor, Tensor]:
    """Estimate the relative error of the policy's gradient over all ranks, and choose the sequences to repair.

    A sequence is repaired by a second forward and backward pass, with the weight that each of its tokens still lacks.

    Args:
        token_errors: for each micro-batch, what each token adds to the error if its sequence is not chosen, [B, T].
        norms: for each micro-batch, the norm of the gradient at the hidden state that predicts each token, [B, T].
        tolerance: largest relative error that all sequences which are not chosen may cause together.

    Returns:
        The relative error if no sequence is chosen, a scalar, which is 0 if no cap touches any token; and for each
        sequence of this rank whether it is chosen. As few sequences as possible are chosen.
    """
    squares = torch.cat([errors.double().sum(-1).square() for errors in token_errors])
    ascending = all_gather(squares).sort().values  # squared errors of the sequences of all ranks
    norm = sum((pass_norms.double().square().sum() for pass_norms in norms), start=squares.new_zeros(()))
    # A sum of squared errors times this factor is a squared relative error, enlarged by the margin.
    factor = MARGIN**2 / all_reduce_sums({"norms": Sum(norm)})["norms"].value

    # For each sequence, the relative error that is left if it and all with smaller squares are not read again.
    errors = torch.where(ascending == 0, 0.0, ascending.cumsum(0) * factor).sqrt()
    smallest_chosen = torch.where(errors <= tolerance, torch.inf, ascending).min()  # a square; inf if none is chosen
    # `errors[-1]` is the error if no sequence is read again. A sequence is chosen if its square is not below the
    # smallest chosen one, or is NaN; but never if its square is 0.
    return errors[-1], ~(squares < smallest_chosen) & (squares != 0)
