"""Finds the sums over an optimizer step that its correction needs, of which OBRS makes kappa = sum a / sum Z.

Where they are not known before the first backward pass (`StepTotals`), the policy gradient that holds the kappa of
another step is brought to the kappa of its own (`KappaRepair`). With weights w(kappa) that are linear in kappa but for
their caps, S the surrogate and m the acceptance mask, the policy's gradient is

    G(kappa) = - sum m w(kappa) dS = s G(kappa_0) - sum m delta dS        s = kappa / kappa_0
    delta    = w(kappa) - s w(kappa_0)                                    0 unless a cap holds w(kappa) or w(kappa_0)

So after backward passes with any kappa_0 the gradient is multiplied by s, which is exact for all tokens that no cap
touches. The sequences with the others are read once more with the weights delta: as few of them as leave an error
below a tolerance. With a tolerance of 0 that is G(kappa) up to rounding for every correction; piecewise linear weights
make it cheap.

h_i being the hidden state that predicts token i, the error of sequences that are not read again is estimated as

    3 sqrt(sum over sequences (sum over tokens |delta_i / (s w_i(kappa_0))| |dL/dh_i|)^2) / sqrt(sum |dL/dh_i|^2)

relative to |G(kappa)|. The gradients of two tokens add up at worst within a sequence and are taken for unrelated
otherwise; those of parameters, which a token reaches through its h_i alone, are taken to be as large as those of the
hidden states. Without the factor 3 the error came to lie up to 2.4 times above it (docs/corrections.md). It is no
bound: where the gradients of a step's tokens cancel, |G| is smaller than unrelated ones would make it, and the relative
error larger by as much. A tolerance of 0 leaves no error.
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
from jackpot.training.old_policy import MicroBatch, holds_target

ForwardFn = Callable[[TokenBatch, OldLogProbs | None], TokenScores]


class BeforeBackward(NamedTuple):
    """The totals that are known before the first backward pass of an optimizer step, over all ranks."""

    totals: Sums | None  # None: the only micro-batch of each rank gives them in its own forward pass
    are_provisional: bool  # they are those of a step before; this step's are known after its backward passes
    seconds: float  # wall-clock of their own forward passes


class StepTotals:
    """Finds the totals of an optimizer step in the cheapest way that its correction allows.

    OBRS estimates kappa = sum of acceptance / sum of Z from them. They cost nothing where the step has a single
    micro-batch, or where the old log-probs hold them. Elsewhere `kappa: prepass` takes one more forward pass without
    gradient, unless no rank has more than one micro-batch; `kappa: auto` begins with those of the last step in which
    the policy moved, none at first, and `KappaRepair` puts the gradient right once this step's are known. The
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


ROUNDING = 4e-6  # of float32 weights that are products of an exp, relative
MARGIN = 3.0  # the factor of the estimate


@dataclass(frozen=True, slots=True)
class PolicyPass:
    """Holds what the backward pass of a micro-batch leaves of the policy's loss."""

    batch: TokenBatch  # as it was dealt, on the CPU
    terms: PolicyTerms  # detached
    correction: Correction  # that the gradient contains
    norms: Tensor | None  # [B, T] norm of the gradient of the hidden state that predicts each token, 0 where masked;
    # None where the correction is final

    @property
    def weights(self) -> Tensor:
        """Factor on the surrogate of each token, the acceptance mask included: [B, T]."""
        return self.correction.weights * self.correction.accept_mask


class HiddenNorms:
    """Records the norm of each row of the gradient of hidden states [N, H] when a backward pass comes to it."""

    def __init__(self, hidden: Tensor) -> None:
        self._rows: Tensor | None = None
        hidden.register_hook(self._record)

    def spread(self, batch: TokenBatch) -> Tensor:
        """Return the norms where their tokens are: [B, T] float32, 0 where masked or where no gradient came."""
        return torch.zeros_like(batch.rollout_log_probs) if self._rows is None else batch.spread(self._rows)

    def _record(self, gradient: Tensor) -> None:
        self._rows = torch.linalg.vector_norm(gradient, dim=-1, dtype=torch.float32)


class KappaRepair:
    """Brings the policy's gradient to the totals of its own optimizer step.

    Args:
        parameters: of the policy, which hold the gradient's numerators.
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
        self._objective, self._parameters, self._log_probs = objective, list(parameters), log_probs
        self._max_length, self._pads = max_length, pads

    def apply(self, passes: Sequence[PolicyPass], totals: Sums) -> tuple[list[PolicyPass], Sums]:
        """Give the gradient of all passes the weights that `totals` lead to.

        Args:
            totals: of this step, over all ranks.

        Returns:
            The passes with these weights, and metrics of this rank.
        """
        final = [replace(one, correction=self._objective.correction.apply(one.terms.inputs, totals)) for one in passes]
        scale = final[0].correction.kappa / passes[0].correction.kappa
        deltas = [_delta(new.weights, scale * old.weights) for new, old in zip(final, passes, strict=True)]

        norms = [old.norms for old in passes if old.norms is not None]  # of all, as no correction was final
        worth = [
            torch.where(delta == 0, 0.0, (delta / (scale * old.weights)).abs() * of_pass)
            for delta, old, of_pass in zip(deltas, passes, norms, strict=True)
        ]

        error, flags = _to_repair(worth, norms, self._objective.kappa_tolerance)
        any_rank_repairs = ~(error <= self._objective.kappa_tolerance)
        numbers = torch.cat([torch.stack([scale, any_rank_repairs]), flags]).tolist()  # waits for the device

        torch._foreach_mul_(locals_of(one.grad for one in self._parameters if one.grad is not None), numbers[0])
        if numbers[1]:
            self._repair(final, deltas, numbers[2:])

        return final, {
            "obrs/kappa_error": Mean.of(error, torch.ones_like(error, dtype=torch.bool)),
            "obrs/repaired_sequences": Mean.of(flags, torch.ones_like(flags)),
        }

    def _repair(self, passes: Sequence[PolicyPass], deltas: Sequence[Tensor], flags: Sequence[float]) -> None:
        """Add the gradient of the flagged sequences with the weights `deltas` [B, T].

        All ranks run as many passes as the one with the most: a rank with nothing left reads a prompt for nothing.
        """
        batches = [one.batch for one in passes]
        rows: list[list[int]] = []
        columns: dict[str, dict[str, Tensor]] = {}
        left = iter(flags)

        for one, delta in zip(passes, deltas, strict=True):
            rows.append([row for row, flag in enumerate(islice(left, len(one.batch.uids))) if flag])
            inputs = one.terms.inputs
            counted = COUNTS[self._objective.count](one.correction, inputs.response_mask)
            of_pass = {"delta": delta, "proximal": inputs.proximal_log_probs, "counted": counted}
            for row in rows[-1]:
                length = int(one.batch.attention_mask[row].sum())
                columns[one.batch.uids[row]] = {name: column[row, :length] for name, column in of_pass.items()}

        parts = regroup(batches, rows, self._pads)
        most = max_over_ranks(len(parts))

        for part in parts:
            of_part = [columns[uid] for uid in part.uids]
            self._backward(
                part, *(pad_sequence([row[name] for row in of_part], batch_first=True) for name in of_part[0])
            )
        for _ in range(len(parts), most):
            self._backward(empty_like(batches[0]), *[deltas[0][:0]] * 3)

    def _backward(self, part: TokenBatch, delta: Tensor, proximal: Tensor, counted: Tensor) -> None:
        part = batch_to(part, delta.device)
        surrogate = self._objective.surrogate_of(self._log_probs(part), proximal, part).value
        numerator, _ = self._objective.aggregate(-delta * surrogate, counted, self._max_length)
        numerator.backward()


def _delta(wanted: Tensor, held: Tensor) -> Tensor:
    """wanted - held, 0 where they differ by rounding alone: [B, T]."""
    delta = wanted - held
    return torch.where(delta.abs() > ROUNDING * wanted.abs(), delta, 0.0)


def _to_repair(worth: Sequence[Tensor], norms: Sequence[Tensor], tolerance: float) -> tuple[Tensor, Tensor]:
    """Estimate the relative error of the policy's gradient over all ranks, and choose the sequences to read again.

    Args:
        worth: |delta_i / (s w_i)| |dL/dh_i| of each micro-batch, [B, T].
        norms: |dL/dh_i|, [B, T].
        tolerance: largest error that the sequences which are not chosen may have together.

    Returns:
        The error if none is read again, a scalar, 0 where no cap touches a token; and whether this rank's sequences are
        among the fewest of all ranks that have to be.
    """
    squares = torch.cat([of_pass.double().sum(-1).square() for of_pass in worth])
    of_all = all_gather(squares).sort().values
    norm = sum((of_pass.double().square().sum() for of_pass in norms), start=squares.new_zeros(()))
    unit = MARGIN**2 / all_reduce_sums({"norms": Sum(norm)})["norms"].value
    errors = torch.where(of_all == 0, 0.0, of_all.cumsum(0) * unit).sqrt()  # if this one and all smaller ones are left
    least = torch.where(errors <= tolerance, torch.inf, of_all).min()
    return errors[-1], ~(squares < least) & (squares != 0)
