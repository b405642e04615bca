"""Functions that sum a batch of saved responses, for one correction or for the run before any correction.

Shapes: `B` responses of up to `T` tokens, `N` tokens whose whole distributions are known.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from jackpot.analysis.replay.distributions import StateDistributions
from jackpot.analysis.replay.factors import GradientFactors
from jackpot.analysis.replay.gradient import StateValues
from jackpot.analysis.replay.responses import ResponseBatch, SavedResponse
from jackpot.core.bands import POSITIONS, band_masks
from jackpot.core.metrics import Histogram, Max, Mean, Sum, Sums
from jackpot.objectives.metrics import mismatch
from jackpot.objectives.obrs import acceptance, exact_z

ENTROPIES = (0.0, 0.1, 1.0)  # lower ends of the bands of the policy's entropy, nats


def ratio_quantile(sums: Sums, name: str, share: float) -> float:
    """Return a quantile of a ratio, from the histogram of the ratio's logarithm.

    Args:
        sums: sums with the histogram.
        name: name of the histogram.
        share: share of the ratios that lie below the quantile.
    """
    return float(Histogram.named(sums, name).quantile(share).exp())


class EndGaps:
    """A collector of the total variation between rollout model and policy in the first and in the last file."""

    def __init__(self) -> None:
        self._ends: list[tuple[str, Mean]] = []  # (name, mean total variation) of the first and the last file

    def add(self, responses: Sequence[SavedResponse]) -> None:
        """Add the next responses to the means of their files; the responses of each file must come together."""
        for response in responses:
            _, new = response.policy_log_probs
            # The response's total variation between rollout model and updated policy, estimated from sampled tokens.
            variation = Mean.of(1.0 - acceptance(response.rollout_log_probs, new, lam=1.0), response.sampled_mask)
            last_file, last_mean = self._ends[-1] if self._ends else (None, variation)  # None equals no file
            if last_file == response.where:
                self._ends[-1] = (response.where, last_mean + variation)
            else:  # the response is the first of its file: keep the first file of all, and this one
                self._ends = [*self._ends[:1], (response.where, variation)]

    @property
    def gaps(self) -> tuple[tuple[str, float], ...]:
        """Return (name, total variation) of the first and the last file or iteration, from sampled tokens."""
        return tuple((where, float(mean.value)) for where, mean in self._ends)


class SampledColumns(NamedTuple):
    """Numbers of one correction at the sampled tokens, [B, T] each, from which the advice rule judges the correction.

    F is the correction's factor on a token's gradient. A state is the text before a token, and F_s is the mean of F
    over all tokens that may follow. The total variation that remains in a state is E |F - F_s rho| / (2 F_s). One
    sampled token does not show F_s, so F_s is estimated as h m: h (`GradientFactors.scale`) would be F_s if nothing
    were capped, and m is the share of F that the caps leave over all tokens, taken to be equal in all states.
    """

    factor: Tensor  # E F, the mean of F over the random mask of accepted tokens
    square: Tensor  # E F^2, over the same mask
    wrong: Tensor  # total variation that the correction leaves between its weights and p_new, times F_s
    trained: Tensor  # E F, averaged over both signs of the advantage: an estimate of F_s from one token

    @classmethod
    def of(cls, factors: GradientFactors, ratio: Tensor, mask: Tensor) -> "SampledColumns":
        """Estimate the columns from a correction's factors and rho = p_new / p_inf at the sampled tokens, [B, T]."""
        uncapped = factors.scale * ratio  # h rho, which F would be if nothing were capped
        total = uncapped[mask].sum()
        left_by_caps = torch.where(total > 0, factors.either[mask].sum() / total, 1.0)  # m
        wrong = (factors.either - uncapped * left_by_caps).abs() / 2.0  # |E F - h m rho| / 2
        return cls(factor=factors.mean, square=factors.square, wrong=wrong, trained=factors.either)

    def with_exact_sums(self, values: StateValues, at: Tensor) -> "SampledColumns":
        """Replace the estimates by exact sums at the tokens whose distributions are known, and return all columns.

        Args:
            values: exact sums in N states.
            at: [B, T] bool, True at the N tokens.
        """
        # The mean of F over all tokens that may follow is F_s, and replaces both columns of E F at the sampled token.
        exact = SampledColumns(
            factor=values.of_state, square=values.second.sum(-1), wrong=values.variation, trained=values.of_state
        )
        pairs = zip(self, exact, strict=True)  # (estimates [B, T], exact sums [N]) of each column
        return SampledColumns(*(estimates.masked_scatter(at, sums) for estimates, sums in pairs))


def rule_columns(columns: SampledColumns, scale: Tensor, prefixes: Tensor, overlap: Tensor, mask: Tensor) -> Tensor:
    """Sum a response's numbers for the advice rule over its tokens: [B, 7], in the order of advice.rule.COLUMNS.

    Args:
        columns: the correction's numbers at the sampled tokens, [B, T] each.
        scale: [B, T] h, the weight of a state if nothing were capped.
        prefixes: [B, T] R, the product of rho before a token: how many times as often the policy reaches it.
        overlap: [B, T] probability that OBRS accepts a sampled token at lam = 1, or Z, its mean in a state, if known.
        mask: [B, T] bool, True at sampled tokens.
    """
    # By how much a state has too much weight: its multiple of the mean weight, less `prefixes`, where that is positive.
    elsewhere = (scale / scale[mask].mean() - prefixes).clamp(min=0.0)
    tokens = torch.ones_like(overlap)
    # These stand in the order of COLUMNS of the advice rule.
    summed = (tokens, columns.factor, columns.square, columns.wrong, columns.trained, elsewhere, overlap)
    return torch.stack([torch.where(mask, numbers, 0.0).sum(-1) for numbers in summed], dim=-1)


def correction_sums(factors: GradientFactors, wrong: Tensor, mask: Tensor, bands: Mapping[str, Tensor]) -> Sums:
    """Sum the effect of one correction over the sampled tokens.

    Args:
        factors: the correction's factors, [B, T] each.
        wrong: [B, T] the column `wrong` of `SampledColumns`: the total variation between policy and corrected
            distribution in the token's state, times F_s, the sum of all factors there.
        mask: [B, T] bool, True at sampled tokens.
        bands: [B, T] masks of bands by name, for the rejected share in each band.
    """
    # Columns whose means over the sampled tokens are taken; F is the correction's factor on a token's gradient.
    means = {
        "weight_mean": factors.weight,
        "factor": factors.mean,
        "square": factors.square,
        "trained": factors.either,  # as "factor", but averaged over both signs of the advantage
        "variation": wrong,
        "accepted": factors.accepted,
        "capped": factors.capped,
        "clipped": factors.clipped,
    }

    return {
        "log_weight": Histogram.of(factors.weight.log(), mask),
        "weight_max": Max.of(factors.weight, mask),
        "responses": Sum.of(mask.any(-1)),
        "dropped": Sum.of(mask.any(-1) & (factors.accepted * mask).sum(-1).eq(0)),  # all tokens rejected
        **{name: Mean.of(values, mask) for name, values in means.items()},
        **{f"rejected {name}": Mean.of(1.0 - factors.accepted, band) for name, band in bands.items()},
    }


def run_sums(batch: ResponseBatch, states: StateDistributions | None) -> Sums:
    """Sum the mismatch between rollout model and policy over a batch, before any correction.

    Args:
        batch: the responses.
        states: distributions at the tokens where they are known; None: at none.
    """
    mask, sampled = batch.mask, batch.mask.any(-1)
    log_ratio = torch.where(mask, batch.new - batch.rollout, 0.0)
    ratio = log_ratio.exp()
    old_ratio = torch.where(mask, batch.old - batch.rollout, 0.0).exp()
    accepted = acceptance(batch.rollout, batch.new, lam=1.0)  # 1 less its mean is the total variation

    # At tokens without known distributions the mean ratio is all that can be checked.
    sampled_only = mask if states is None else mask & ~states.at

    # Of the three total variations, the first is that between rollout model and updated policy, the second that between
    # rollout model and old policy, and the third that between the two policies. The two maxima are of differences of
    # log-probs: of either policy from the rollout model, and of the two policies.
    sums = mismatch(log_ratio, mask) | {
        "ratio": Mean.of(ratio, mask),
        "total_variation": Mean.of(1.0 - accepted, mask),
        "total_variation_engine": Mean.of(1.0 - acceptance(batch.rollout, batch.old, lam=1.0), mask),
        "total_variation_stale": Mean.of((ratio - old_ratio).abs() / 2.0, mask),  # |p_new - p_old| / (2 p_inf)
        "policy_max": Max.of(torch.maximum((batch.new - batch.rollout).abs(), (batch.old - batch.rollout).abs()), mask),
        "stale_max": Max.of((batch.new - batch.old).abs(), mask),
        "responses": Sum.of(sampled),
        "length": Mean.of(mask.sum(-1), sampled),
        "no_advantage": Mean.of(batch.advantages == 0, mask),
        "sampled_only_ratio": Mean.of(ratio, sampled_only),
        "sampled_only_log_ratio": Histogram.of(log_ratio, sampled_only),
    }

    if states is not None:
        z = exact_z(states.rollout, states.new, lam=1.0)
        # The policy's probability of tokens that the rollout model never samples.
        unreachable = torch.where(states.rollout.isneginf(), states.new.exp(), 0.0).sum(-1)
        everywhere = torch.ones_like(z, dtype=torch.bool)
        sums |= {
            "acceptance_minus_z": Mean.of(accepted[states.at] - z, everywhere),
            "z": Mean.of(z, everywhere),
            "unreachable": Mean.of(unreachable, everywhere),
        }
    return sums


def bands_of(batch: ResponseBatch, states: StateDistributions | None) -> dict[str, Tensor]:
    """Return masks [B, T] by name: bands of position, and of the policy's entropy where its distribution is known."""
    position = torch.arange(batch.mask.shape[1]).expand(batch.mask.shape)
    bands = {f"position {name}": batch.mask & band for name, band in band_masks(position, POSITIONS).items()}

    if states is not None:
        entropy = torch.full(batch.mask.shape, -1.0, dtype=torch.float64)  # -1 is in no band
        # All tokens outside the top-k lists count as a single token. The clamp undoes rounding below 0.
        entropy[states.at] = -(states.new.exp() * states.new).sum(-1).clamp(max=0.0)
        bands |= {f"entropy {name}": band for name, band in band_masks(entropy, ENTROPIES).items()}
    return bands
