"""What is added up over the batches, for each correction and for the run.

Everything here has a fixed size, whatever the number of files. `Part` is kept for each half of the responses too, so
that the answer can be asked of both halves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from jackpot.analysis.replay.factors import Factors
from jackpot.analysis.replay.gradient import StateSums
from jackpot.analysis.replay.responses import Batch, Response
from jackpot.analysis.replay.states import States
from jackpot.core.bands import POSITIONS, band_masks
from jackpot.core.metrics import Histogram, Max, Mean, Sum, Sums, add_sums
from jackpot.objectives.metrics import mismatch
from jackpot.objectives.obrs import acceptance

ENTROPIES = (0.0, 0.1, 1.0)  # nats, where bands of the policy's entropy start


@dataclass(slots=True)
class Tally:
    """One correction over some responses."""

    sums: Sums = field(default_factory=dict)
    states: StateSums | None = None

    def add(self, sums: Sums, states: StateSums | None) -> None:
        self.sums = add_sums(self.sums, sums)
        if states:
            self.states = states if self.states is None else self.states + states

    @property
    def apart(self) -> float:
        """What is misplaced, from the sampled tokens alone (`correction_sums`); 1 where nothing is trained on."""
        return self._share("")

    @property
    def misplaced(self) -> float:
        """The same, summed over whole distributions at the tokens where they are known."""
        return self._share("alone ")

    @property
    def effective(self) -> float:
        """(sum F)^2 / (n sum F^2) over all tokens, summed over whole distributions where they are known."""
        factor, square = self.sums["alone factor"].total, self.sums["alone square"].total
        if self.states:
            factor, square = factor + self.states.mean.total, square + self.states.square.total
        return float(factor.square() / (square * self.sums["factor"].count)) if square != 0 else 0.0

    @property
    def tokens(self) -> int:
        """That were put through the correction."""
        return int(self.sums["factor"].count) if self.sums else 0

    @property
    def known(self) -> int:
        """Tokens whose whole distributions are known."""
        return int(self.states.mean.count) if self.states else 0

    def _share(self, part: str) -> float:
        apart, trained = self.sums[f"{part}apart"].total, self.sums[f"{part}trained"].total
        if self.states and part:
            apart, trained = apart + self.states.misplaced.total, trained + self.states.mean.total
        return float(apart / trained) if trained != 0 else 1.0


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


def correction_sums(found: Factors, aim: Tensor, mask: Tensor, alone: Tensor, bands: Mapping[str, Tensor]) -> Sums:
    """Of the sampled tokens.

    Where a state trains on F_s, what is misplaced there is E |F - F_s rho| / 2 (`gradient`), and F_s is not known from
    one token. Taken for it is s_s m: what the state would train on if nothing were capped, times the share m that is
    left after caps in these tokens, as if it were the same in all states.

    Args:
        found: [B, T] each.
        aim: [B, T] s_s p_new / p_inf: what the factor would be if nothing were capped.
        alone: [B, T] the tokens of the mask of which nothing is known but what was sampled.
        bands: [B, T] masks by name, over which the rejected share is counted too.
    """
    lost = 1.0 - found.accepted
    shared = {
        "factor": found.mean,
        "square": found.square,
        "trained": found.either,
        "apart": (found.either - aim * _level(found.either, aim, mask)).abs() / 2.0,
    }
    return {
        "log_weight": Histogram.of(found.weight.log(), mask),
        "weight_max": Max.of(found.weight, mask),
        "weight_mean": Mean.of(found.weight, mask),
        "responses": Sum.of(mask.any(-1)),
        **{name: Mean.of(values, mask) for name, values in shared.items()},
        **{f"alone {name}": Mean.of(values, alone) for name, values in shared.items()},
        "accepted": Mean.of(found.accepted, mask),
        "capped": Mean.of(found.capped, mask),
        "clipped": Mean.of(found.clipped, mask),
        "dropped": Sum.of(mask.any(-1) & (found.accepted * mask).sum(-1).eq(0)),
    } | {f"lost {name}": Mean.of(lost, band) for name, band in bands.items()}


def _level(trained: Tensor, aim: Tensor, mask: Tensor) -> Tensor:
    """What is left of the aim in these tokens, a scalar; 1 where there is no aim."""
    wanted = aim[mask].sum()
    return torch.where(wanted > 0, trained[mask].sum() / wanted, 1.0)


def run_sums(batch: Batch, states: States | None) -> Sums:
    """What the run's own distributions say, before any correction."""
    mask, sampled = batch.mask, batch.mask.any(-1)
    log_ratio = torch.where(mask, batch.new - batch.rollout, 0.0)
    ratio = log_ratio.exp()
    sums = mismatch(log_ratio, mask) | {
        "ratio": Mean.of(ratio, mask),
        "apart": Mean.of(1.0 - acceptance(batch.rollout, batch.new, 1.0), mask),
        "apart_engine": Mean.of(1.0 - acceptance(batch.rollout, batch.old, 1.0), mask),
        "apart_stale": Mean.of((ratio - torch.where(mask, batch.old - batch.rollout, 0.0).exp()).abs() / 2.0, mask),
        "policy_max": Max.of(torch.maximum((batch.new - batch.rollout).abs(), (batch.old - batch.rollout).abs()), mask),
        "stale_max": Max.of((batch.new - batch.old).abs(), mask),
        "responses": Sum.of(sampled),
        "length": Mean.of(mask.sum(-1), sampled),
        "no_advantage": Mean.of(batch.advantages == 0, mask),
    }
    alone = mask if states is None else mask & ~states.at
    sums |= {"alone_ratio": Mean.of(ratio, alone), "alone_log_ratio": Histogram.of(log_ratio, alone)}
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
    bands = {f"position {name}": batch.mask & here for name, here in band_masks(position, POSITIONS).items()}
    if states is not None:
        entropy = torch.full(batch.mask.shape, -1.0, dtype=torch.float64)
        entropy[states.at] = entropy_of(states)
        bands |= {f"entropy {name}": here for name, here in band_masks(entropy, ENTROPIES).items()}
    return bands


def entropy_of(states: States) -> Tensor:
    """Of the policy, all other tokens taken as one: [N] nats."""
    return -(states.new.exp() * states.new).sum(-1).clamp(max=0.0)
