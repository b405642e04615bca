"""Names and numbers that formulas and settings share. Without torch, so that settings can read them."""

from typing import Literal

Kappa = Literal["auto", "prepass", "none"]  # how kappa is found (`corrections.base.CorrectionFn`)

LAM = 1.0  # default of OBRS's lam: a token is accepted with probability min(1, rho / lam), rho = p_target / p_inf
TEMPERATURE = 1.0  # default of the sampling temperature
HEAD_LOGITS_MEMORY = 256  # MiB of logits that the joint head may hold at once
