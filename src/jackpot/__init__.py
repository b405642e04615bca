"""Jackpot: reinforcement learning of a language model on text that a smaller, cheaper model wrote.

    >>> from jackpot import CorrectionInputs, make_correction
    >>> correction = make_correction("obrs", lam=1.0, c1=3.0, c2=3.0, mask="sampled", totals="prepass")

This package's top level needs torch and pydantic only: the correction for use inside another framework.
"""

from jackpot.config import Config
from jackpot.errors import JackpotError
from jackpot.objectives.corrections import CORRECTIONS, Correction, CorrectionFn, CorrectionInputs, make_correction
from jackpot.ops import obrs
from jackpot.types import Rollout, Sampling, Version

__all__ = [
    "CORRECTIONS",
    "Config",
    "Correction",
    "CorrectionFn",
    "CorrectionInputs",
    "JackpotError",
    "Rollout",
    "Sampling",
    "Version",
    "make_correction",
    "obrs",
]
