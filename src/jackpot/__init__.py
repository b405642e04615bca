"""Jackpot: reinforcement learning of a language model on text that a smaller, cheaper model wrote.

    >>> from jackpot import CorrectionInputs, make_correction
    >>> correction = make_correction("obrs", lam=1.0, c1=3.0, c2=3.0, mask="sampled", totals="prepass")

This package's top level needs torch and pydantic only: the correction for use inside another framework. Its names are
imported when they are first used, so that a process that only judges answers loads neither.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jackpot.config.run import Config, Sampling
    from jackpot.core.errors import JackpotError
    from jackpot.core.types import Rollout, Version
    from jackpot.objectives import obrs
    from jackpot.objectives.corrections import CORRECTIONS, Correction, CorrectionFn, CorrectionInputs, make_correction

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

_CORRECTIONS = "jackpot.objectives.corrections"
_HOMES = {
    "CORRECTIONS": _CORRECTIONS,
    "Config": "jackpot.config.run",
    "Correction": _CORRECTIONS,
    "CorrectionFn": _CORRECTIONS,
    "CorrectionInputs": _CORRECTIONS,
    "JackpotError": "jackpot.core.errors",
    "Rollout": "jackpot.core.types",
    "Sampling": "jackpot.config.run",
    "Version": "jackpot.core.types",
    "make_correction": _CORRECTIONS,
}
_MODULES = {"obrs": "jackpot.objectives.obrs"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'jackpot' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)
