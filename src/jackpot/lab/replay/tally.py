"""What is added up over the batches, for each correction and for the run. Layer 6.

Everything here has a fixed size, whatever the number of files. `Part` is kept for each half of the responses too, so
that the answer can be asked of both halves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from jackpot.lab.replay.factors import Factors
from jackpot.lab.replay.gradient import StateSums
from jackpot.lab.replay.responses import Batch, Response
from jackpot.lab.replay.states import States
from jackpot.objectives.measure import POSITIONS, mismatch, position_bands
from jackpot.ops.obrs import acceptance
from jackpot.ops.reduce import Histogram, Max, Mean, Sums, Total, add_sums

ENTROPIES = (0.0, 0.1, 1.0)  # nats, where bands of the policy's entropy start


def entropy_bands() -> list[str]:
    return ["entropy 0-0.1", "entropy 0.1-1", "entropy 1-up"]


@dataclass(slots=True)
class Tally:
    """One correction over some responses."""

    sums: Sums = field(default_factory=dict)
    states: StateSums | None = None

    def add(self, sums: Sums, states: StateSums | None) -> None:
        self.sums = add_sums(self.sums, sums)
        if states:
            self.states = states if self.states is None else self.states + states


class Ends:
    """The gap where the rollouts begin and where they end: of the first and of the last file or iteration."""

    def __init__(self) -> None:
        self._found: list[tuple[str, Mean]] = []  # the first and the last

    def add(self, responses: Sequence[Response]) -> None:
        """The next responses in their order."""
        for response in responses:
            new = response.old_log_probs if response.log_probs is None else response.log_probs
            apart = Mean.of(1.0 - acceptance(response.rollout_log_probs, new, 1.0), response.sampled_mask)
            if self._found and self._found[-1][0] == response.where:
                self._found[-1] = (response.where, self._found[-1][1] + apart)
            else:
                self._found = [*self._found[:1], (response.where, apart)]

    @property
    def gaps(self) -> tuple[tuple[str, float], ...]:
        """Where, and the total variation there, sampled."""
        return tuple((where, float(mean.value)) for where, mean in self._found)


def correction_sums(found: Factors, ratio: Tensor, mask: Tensor, bands: Mapping[str, Tensor]) -> Sums:
    """Of the sampled tokens.

    Args:
        found: [B, T] each.
        ratio: [B, T] p_new / p_inf.
        bands: [B, T] masks by name, over which the rejected share is counted too.
    """
    lost = 1.0 - found.accepted
    return {
        "log_weight": Histogram.of(found.weight.log(), mask),
        "weight_max": Max.of(found.weight, mask),
        "weight_mean": Mean.of(found.weight, mask),
        "responses": Total.of(mask.any(-1)),
        "factor": Mean.of(found.mean, mask),
        "square": Mean.of(found.square, mask),
        "accepted": Mean.of(found.accepted, mask),
        "capped": Mean.of(found.capped, mask),
        "clipped": Mean.of(found.clipped, mask),
        "apart": Mean.of((found.mean - ratio).abs() / 2.0, mask),
        "dropped": Total.of(mask.any(-1) & (found.accepted * mask).sum(-1).eq(0)),
    } | {f"lost {name}": Mean.of(lost, band) for name, band in bands.items()}


def run_sums(batch: Batch, states: States | None) -> Sums:
    """What the run's own distributions say, before any correction."""
    mask, sampled = batch.mask, batch.mask.any(-1)
    log_ratio = torch.where(mask, batch.new - batch.rollout, 0.0)
    ratio = log_ratio.exp()
    sums = mismatch(log_ratio, mask) | {
        "ratio": Mean.of(ratio, mask),
        "apart": Mean.of(1.0 - acceptance(batch.rollout, batch.new, 1.0), mask),
        "apart_engine": Mean.of(1.0 - acceptance(batch.rollout, batch.old, 1.0), mask),
        "apart_stale": Mean.of((torch.where(mask, batch.new - batch.old, 0.0).exp() - 1.0).abs() / 2.0, mask),
        "stale_max": Max.of((batch.new - batch.old).abs(), mask),
        "responses": Total.of(sampled),
        "length": Mean.of(mask.sum(-1), sampled),
        "no_advantage": Mean.of(batch.advantages == 0, mask),
    }
    if states is not None:
        expected = states.z(1.0, "new")
        gap = (acceptance(batch.rollout, batch.new, 1.0)[states.at] - expected).unsqueeze(0)
        everywhere = torch.ones_like(gap, dtype=torch.bool)
        sums |= {
            "acceptance_minus_z": Mean.of(gap, everywhere),
            "z": Mean.of(expected.unsqueeze(0), everywhere),
            "unreachable": Mean.of(_unreachable(states).unsqueeze(0), everywhere),
        }
    return sums


def _unreachable(states: States) -> Tensor:
    """The policy's probability on tokens that the writer cannot sample: [N]."""
    return torch.where(states.rollout.isneginf(), states.new.exp(), 0.0).sum(-1)


def bands_of(batch: Batch, states: States | None) -> dict[str, Tensor]:
    """Masks [B, T] by position, and by the policy's entropy where its distribution is known."""
    position = torch.arange(batch.mask.shape[1]).expand(batch.mask.shape)
    ends = [*POSITIONS[1:], torch.inf]
    bands = {
        name.replace("at_", "position "): batch.mask & (position >= start) & (position < end)
        for name, start, end in zip(position_bands(), POSITIONS, ends, strict=True)
    }
    if states is not None:
        entropy = torch.full(batch.mask.shape, -1.0, dtype=torch.float64)
        entropy[states.at] = entropy_of(states)
        ends = [*ENTROPIES[1:], torch.inf]
        for name, start, end in zip(entropy_bands(), ENTROPIES, ends, strict=True):
            bands[name] = (entropy >= start) & (entropy < end)
    return bands


def entropy_of(states: States) -> Tensor:
    """Of the policy, all other tokens taken as one: [N] nats."""
    return -(states.new.exp() * states.new).sum(-1).clamp(max=0.0)
