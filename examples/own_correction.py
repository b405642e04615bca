"""A correction of your own: the weight and the acceptance mask of every token, from the log-probs of both models.

    jackpot train examples/own_correction.yaml

The class is constructed from the block `objective.correction` of the recipe. docs/corrections.md has those that exist.
"""

import torch

from jackpot.core.metrics import Sums
from jackpot.objectives.corrections.base import BaseCorrection, Correction, CorrectionInputs, correction_result


class SoftCap(BaseCorrection):
    """Weighs a token by cap * tanh(rho / cap): near rho while rho is small, smooth, and never above the cap."""

    def apply(self, inputs: CorrectionInputs, totals: Sums) -> Correction:
        """Return the weights [B, T], all tokens accepted; `totals` has the step's sums, which OBRS needs for kappa."""
        cap = self.settings.kwargs["cap"]
        ratio = inputs.log_ratio.exp()
        return correction_result(inputs, cap * torch.tanh(ratio / cap), capped=ratio > cap)
