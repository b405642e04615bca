"""A check of every response token's probability against training's, with limits that a run learns from its batches.

The depth of a token is its position in the response. Shapes: `T` response tokens, `P` prompts, `D` ranges of depth.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from jackpot.core.errors import EngineError
from jackpot.core.metrics import Max, Mean, Sums
from jackpot.core.types import Rollout, TokenBatch, Version, unique_rows
from jackpot.objectives.joint import OldLogProbs
from jackpot.training.batching import sampled_with
from jackpot.training.reported_lists import Bets

DEPTHS = 20  # number of ranges of depth: tokens 1, 2-3, 4-7, ...; the last range has no end
LEARNT = 2  # number of first batches that only teach which gaps are usual; `guards.py` checks as many thoroughly
MAY_GROW = 4.0  # largest gap of a range of depths, as a multiple of the mean gap of the range in the run so far
MEMORY = 0.95  # weight of a batch in the mean that `MAY_GROW` multiplies, relative to the next: usual gaps may grow


def token_gaps(batch: TokenBatch, old: OldLogProbs, version: Version) -> tuple[Tensor, Sums]:
    """Measure |p_engine - p_training| of the tokens of a micro-batch.

    Args:
        old: training's log-probs of the tokens.
        version: the weights that gave `old`.

    Returns:
        The gaps, [B, T], NaN where other weights sampled the token; and metrics of the gaps and of p_training /
        p_engine. The mean of this ratio over the engine's tokens is the probability that top-p and top-k keep: p_engine
        sums to 1 over the tokens that are kept, and p_training, which is not truncated, sums to that probability.
    """
    # Compare with the log-probs of the model that sampled the response.
    log_probs = old.rollout_model_old_log_probs
    if batch.by_policy is not None:
        log_probs = torch.where(batch.by_policy[:, None], old.old_log_probs, log_probs)
    gaps = (log_probs.exp() - batch.rollout_log_probs.exp()).abs()
    is_known = batch.response_mask & sampled_with(batch, version)
    kept_mass = (log_probs - batch.rollout_log_probs).exp()
    return gaps.masked_fill(~is_known, torch.nan), {
        "mismatch/engine_gap": Mean.of(gaps, is_known),
        "mismatch/engine_gap_max": Max.of(gaps, is_known),
        "mismatch/kept_mass": Mean.of(kept_mass, is_known),
    }


class GapEvidence:
    """The evidence in a run that, at some position in responses (depth), an engine's log-probs have left training's.

    For a prompt and a range of depths, let x be the mean |p_engine - p_training| of the tokens at these depths in all
    responses to the prompt. Let L be the limit of the mean of x over prompts: MAY_GROW times the mean of x in earlier
    batches (in this range, or in a shallower range if it is larger there), and at least what is always allowed.

    Every range has a bet (`Bets`) that its gaps are larger: each prompt multiplies the bet's product by
    (1 + x / L) / 2, whose mean is at most 1 as long as the mean of x is at most L. In the means of earlier batches an x
    above L counts as L. An x of the first batches, which are not judged, counts up to MAY_GROW times what is always
    allowed, so that an engine that was wrong before a restart does not teach that its gap is usual.
    """

    def __init__(self) -> None:
        """Begin without evidence; the bets of all ranges of depth have equal shares."""
        self._bets = Bets(torch.full((DEPTHS,), 1.0 / DEPTHS, dtype=torch.float64))
        # By range of depth, over earlier batches, which count ever less: sum of x (see the class), number of prompts.
        self._sums, self._counts = torch.zeros(2, DEPTHS, dtype=torch.float64)
        self._batches = 0  # number of batches added so far

    def add(self, rollouts: Sequence[Rollout], gaps: Sequence[Tensor], always: float) -> float:
        """Add the gaps of a batch to the evidence that gaps have grown, and return the evidence so far (`Bets.share`).

        A share of 1 ends the run. The first `LEARNT` batches only teach what gaps are usual.

        Args:
            rollouts: rollouts of the batch.
            gaps: |p_engine - p_training| of each rollout's tokens, [T] each; NaN where it is unknown.
            always: mean gap that is always allowed.

        Raises:
            EngineError: the gaps are larger than they were in earlier batches.
        """
        means = _means_by_depth(rollouts, gaps)  # mean gap of each prompt in each range of depths, [P, D]
        known = means.isfinite()
        if not known.any():
            return self._bets.share

        # Compute each range's limit of the mean gap from earlier batches, at least that of the shallower ranges.
        usual = torch.where(self._counts > 0.0, self._sums / self._counts, 0.0).cummax(0).values
        limits = (MAY_GROW * usual).clamp(min=always)
        self._batches += 1
        if self._batches > LEARNT:
            # The bet of a range wins if gaps grow: each prompt multiplies it by (1 + x / L) / 2, where x is the
            # prompt's mean gap in the range and L the range's limit.
            log_factors = torch.where(known, (means / limits / 2.0 + 0.5).log(), 0.0)
            if self._bets.add(log_factors.sum(0)) >= 1.0:
                raise EngineError(_error_text(int(self._bets.products.argmax()), means, usual, limits))
        else:  # what is usual is not known yet
            limits = torch.full_like(limits, MAY_GROW * always)

        # Learn from the mean gaps, cut off at the limits.
        means = torch.minimum(means, limits)
        self._sums = MEMORY * self._sums + means.nansum(0)
        self._counts = MEMORY * self._counts + known.sum(0)
        return self._bets.share


def _error_text(index: int, means: Tensor, usual: Tensor, limits: Tensor) -> str:
    """Return the error's text on the gaps in one range of depths, which begins at token 2**index of responses.

    Args:
        index: which range of depths.
        means: mean gap of each prompt in each range, [P, D].
        usual: mean gap of each range in the batches before, [D].
        limits: largest mean gap that is allowed in each range, [D].
    """
    first, gap = 2**index, float(means[:, index].nanmean())
    return (
        f"the engine's log-probs have moved away from training's: at the tokens {first} to {2 * first - 1} of "
        f"responses they differ in probability by {gap:.2g} on average in this batch, and by {float(usual[index]):.2g} "
        f"at such depths in the batches before; {float(limits[index]):.2g} is allowed. No step on this batch is saved. "
        f"Likely causes: an engine that changes its settings or weights while it runs, or computes long responses "
        f"otherwise than short ones. Start the engine anew and continue with the same command; where the gap is meant, "
        f"set guard.check_engine=false"
    )


def _means_by_depth(rollouts: Sequence[Rollout], gaps: Sequence[Tensor]) -> Tensor:
    """Return the mean gap of each prompt's tokens in each range of depths, [P, D] float64; NaN where none is known.

    A gap is a token's |p_engine - p_training|; its depth is its position in the response, counted from 1.
    """
    prompts, index = unique_rows([(rollout.prompt.uid,) for rollout in rollouts])
    lengths, values = torch.tensor([len(gap) for gap in gaps]), torch.cat(list(gaps)).double()
    # The depth of each token, from 1 on: its place among all tokens less the number of tokens in earlier rollouts.
    depths = torch.arange(1, len(values) + 1) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    # The range of each depth, the floor of its log2: `frexp` writes a depth as a number in [0.5, 1) times 2**exponent.
    ranges = (depths.double().frexp().exponent - 1).clamp(max=DEPTHS - 1)

    # For each token, the index of its prompt and range in [P * D]: sum the gaps in each of these cells.
    cells = torch.tensor(index).repeat_interleave(lengths) * DEPTHS + ranges
    is_known, size = values.isfinite(), len(prompts) * DEPTHS
    sums = cells[is_known].bincount(values[is_known], minlength=size)
    return (sums / cells[is_known].bincount(minlength=size)).view(-1, DEPTHS)
