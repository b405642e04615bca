"""Jackpot: reinforcement learning of a language model on rollouts of a smaller, cheaper model.

The top level offers the correction alone, for use inside another framework; it needs torch and pydantic only:

    >>> from jackpot import CorrectionInputs, make_correction
    >>> correction = make_correction("obrs")

Each name is imported at its first use, so that a process which only verifies answers loads neither package.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jackpot.core.errors import JackpotError
    from jackpot.objectives import obrs
    from jackpot.objectives.corrections import CORRECTIONS, Correction, CorrectionFn, CorrectionInputs, make_correction

__all__ = [
    "CORRECTIONS",
    "Correction",
    "CorrectionFn",
    "CorrectionInputs",
    "JackpotError",
    "make_correction",
    "obrs",
]
_CORRECTIONS = "jackpot.objectives.corrections"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'jackpot' has no attribute {name!r}; it has {', '.join(__all__)}")
    if name == "obrs":
        return import_module("jackpot.objectives.obrs")
    return getattr(import_module("jackpot.core.errors" if name == "JackpotError" else _CORRECTIONS), name)
