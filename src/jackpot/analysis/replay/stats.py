"""Sums over batches of responses, for each correction and for the run before any correction.

Their size does not depend on the number of files. The sums that the rule reads are kept for each group of prompts, for
its standard errors.

Shapes: `B` responses of up to `T` tokens, `N` sampled tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from jackpot.analysis.advice.rule import COLUMNS, GROUPS
from jackpot.analysis.replay.distributions import StateDistributions
from jackpot.analysis.replay.factors import GradientFactors
from jackpot.analysis.replay.gradient import StateSums, StateValues
from jackpot.analysis.replay.responses import ResponseBatch, SavedResponse
from jackpot.core.bands import POSITIONS, band_masks
from jackpot.core.metrics import Histogram, Max, Mean, Sum, Sums, add_sums
from jackpot.objectives.metrics import mismatch
from jackpot.objectives.obrs import acceptance

ENTROPIES = (0.0, 0.1, 1.0)  # starts of the bands of the policy's entropy, nats


@dataclass(slots=True)
class CorrectionStats:
    """The sums of one correction over all responses."""

    sums: Sums = field(default_factory=dict)
    states: StateSums | None = None
    groups: Tensor = field(default_factory=lambda: torch.zeros(GROUPS, len(COLUMNS), dtype=torch.float64))

    def add(self, sums: Sums, states: StateSums | None, columns: Tensor, groups: Tensor) -> None:
        """Add the sums of a batch, those over its known distributions if there are any, and what the rule reads.

        Args:
            columns: [B, COLUMNS] sums over the tokens of each response.
            groups: [B] group of each response.
        """
        self.sums = add_sums(self.sums, sums)
        self.groups = self.groups.index_add(0, groups, columns)
        if states:
            self.states = states if self.states is None else self.states + states

    @property
    def sampled_tv_after_correction(self) -> float:
        """Estimate the total variation after the correction from sampled tokens only; 1 where F is 0 everywhere."""
        variation, trained = self.sums["variation"].total, self.sums["trained"].total
        return float(variation / trained) if trained != 0 else 1.0

    @property
    def tokens(self) -> int:
        """Return the number of tokens that the correction was replayed on."""
        return int(self.sums["factor"].count) if self.sums else 0

    @property
    def known(self) -> int:
        """Return the number of tokens whose whole distributions are known."""
        return int(self.states.mean.count) if self.states else 0


class EndGaps:
    """Measures the total variation between rollout model and policy in the first and in the last file or iteration."""

    def __init__(self) -> None:
        self._found: list[tuple[str, Mean]] = []  # file or iteration with its gap: the first and the last

    def add(self, responses: Sequence[SavedResponse]) -> None:
        """Add the next responses; files must come in their order."""
        for response in responses:
            new = response.old_log_probs if response.log_probs is None else response.log_probs
            gap = Mean.of(1.0 - acceptance(response.rollout_log_probs, new, 1.0), response.sampled_mask)
            if self._found and self._found[-1][0] == response.where:
                self._found[-1] = (response.where, self._found[-1][1] + gap)
            else:
                self._found = [*self._found[:1], (response.where, gap)]

    @property
    def gaps(self) -> tuple[tuple[str, float], ...]:
        """Return the first and the last file or iteration, each with its total variation, from sampled tokens."""
        return tuple((where, float(mean.value)) for where, mean in self._found)


class SampledColumns(NamedTuple):
    """What the rule reads of the sampled tokens, [B, T] each.

    The total variation after the correction of a state is E |F - F_s rho| / (2 F_s) (`gradient`), and F_s is not known
    from one token. It is estimated by h m: the F_s that the state would have without caps, times the share m that caps
    leave of these tokens, as if m were the same in all states.
    """

    factor: Tensor  # E F
    square: Tensor  # E F^2
    wrong: Tensor  # F_s times the total variation
    trained: Tensor  # F, averaged over both signs of the advantage

    @classmethod
    def of(cls, found: GradientFactors, ratio: Tensor, mask: Tensor) -> "SampledColumns":
        """Estimate them from the factors at the sampled tokens and rho there."""
        aim = found.scale * ratio  # F without caps
        wrong = (found.either - aim * _level(found.either, aim, mask)).abs() / 2.0
        return cls(found.mean, found.square, wrong, found.either)

    def known(self, values: StateValues, at: Tensor) -> "SampledColumns":
        """Put the sums over whole distributions where those are known, at the tokens `at` [B, T]."""
        exact = (values.of_state, values.second.sum(-1), values.variation, values.of_state)
        return SampledColumns(*(column.masked_scatter(at, sums) for column, sums in zip(self, exact, strict=True)))


def rule_columns(columns: SampledColumns, scale: Tensor, prefixes: Tensor, overlap: Tensor, mask: Tensor) -> Tensor:
    """Sum what the rule reads over the tokens of each response: [B, COLUMNS].

    Args:
        scale: [B, T] h, the weight of a state where nothing is capped.
        prefixes: [B, T] R_t of the policy that is updated.
        overlap: [B, T] acceptance at lam = 1, or Z where it is known.
    """
    elsewhere = (scale / scale[mask].mean() - prefixes).clamp(min=0.0)
    each = (torch.ones_like(overlap), *columns, elsewhere, overlap)
    return torch.stack([torch.where(mask, column, 0.0).sum(-1) for column in each], dim=-1)


def correction_sums(found: GradientFactors, columns: SampledColumns, mask: Tensor, bands: Mapping[str, Tensor]) -> Sums:
    """Sum one correction over the sampled tokens.

    Args:
        found: [B, T] each.
        bands: [B, T] masks by name, over which the rejected share is averaged too.
    """
    rejected = 1.0 - found.accepted
    shared = {"factor": found.mean, "square": found.square, "trained": found.either, "variation": columns.wrong}
    return {
        "log_weight": Histogram.of(found.weight.log(), mask),
        "weight_max": Max.of(found.weight, mask),
        "weight_mean": Mean.of(found.weight, mask),
        "responses": Sum.of(mask.any(-1)),
        **{name: Mean.of(values, mask) for name, values in shared.items()},
        "accepted": Mean.of(found.accepted, mask),
        "capped": Mean.of(found.capped, mask),
        "clipped": Mean.of(found.clipped, mask),
        "dropped": Sum.of(mask.any(-1) & (found.accepted * mask).sum(-1).eq(0)),
    } | {f"rejected {name}": Mean.of(rejected, band) for name, band in bands.items()}


def _level(trained: Tensor, aim: Tensor, mask: Tensor) -> Tensor:
    """Return the share of the aim that caps leave in these tokens, a scalar; 1 where the aim is 0."""
    wanted = aim[mask].sum()
    return torch.where(wanted > 0, trained[mask].sum() / wanted, 1.0)


def run_sums(batch: ResponseBatch, states: StateDistributions | None) -> Sums:
    """Sum the mismatch of the run over a batch, before any correction."""
    mask, sampled = batch.mask, batch.mask.any(-1)
    log_ratio = torch.where(mask, batch.new - batch.rollout, 0.0)
    ratio = log_ratio.exp()
    sums = mismatch(log_ratio, mask) | {
        "ratio": Mean.of(ratio, mask),
        "total_variation": Mean.of(1.0 - acceptance(batch.rollout, batch.new, 1.0), mask),
        "total_variation_engine": Mean.of(1.0 - acceptance(batch.rollout, batch.old, 1.0), mask),
        "total_variation_stale": Mean.of(
            (ratio - torch.where(mask, batch.old - batch.rollout, 0.0).exp()).abs() / 2.0, mask
        ),
        "policy_max": Max.of(torch.maximum((batch.new - batch.rollout).abs(), (batch.old - batch.rollout).abs()), mask),
        "stale_max": Max.of((batch.new - batch.old).abs(), mask),
        "responses": Sum.of(sampled),
        "length": Mean.of(mask.sum(-1), sampled),
        "no_advantage": Mean.of(batch.advantages == 0, mask),
    }
    sampled_only = mask if states is None else mask & ~states.at
    sums |= {
        "sampled_only_ratio": Mean.of(ratio, sampled_only),
        "sampled_only_log_ratio": Histogram.of(log_ratio, sampled_only),
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


def _unreachable(states: StateDistributions) -> Tensor:
    """Return the policy's probability on tokens that the rollout model cannot sample, [N]."""
    return torch.where(states.rollout.isneginf(), states.new.exp(), 0.0).sum(-1)


def bands_of(batch: ResponseBatch, states: StateDistributions | None) -> dict[str, Tensor]:
    """Return masks [B, T] of bands of position, and of the policy's entropy where its distribution is known."""
    position = torch.arange(batch.mask.shape[1]).expand(batch.mask.shape)
    bands = {f"position {name}": batch.mask & here for name, here in band_masks(position, POSITIONS).items()}
    if states is not None:
        entropy = torch.full(batch.mask.shape, -1.0, dtype=torch.float64)
        entropy[states.at] = entropy_of(states)
        bands |= {f"entropy {name}": here for name, here in band_masks(entropy, ENTROPIES).items()}
    return bands


def entropy_of(states: StateDistributions) -> Tensor:
    """Return the policy's entropy with all unknown tokens taken as one, [N] nats."""
    return -(states.new.exp() * states.new).sum(-1).clamp(max=0.0)
