"""A correction of your own: the weight and the acceptance mask of every token, from the log-probs of both models.

    jackpot train examples/own_correction.yaml

It is a function whose arguments are tensors, by the names in `jackpot.objectives.corrections.formula`, and the settings
in `kwargs` of the recipe. docs/corrections.md has those that exist.
"""

import torch
from torch import Tensor

from jackpot.objectives.corrections.formula import Weighed


def soft_cap(log_ratio: Tensor, cap: float) -> Weighed:
    """Weigh a token by cap * tanh(rho / cap): near rho while rho is small, smooth, and never above the cap."""
    ratio = log_ratio.exp()
    return Weighed(cap * torch.tanh(ratio / cap), capped=ratio > cap)
