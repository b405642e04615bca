r"""Jackpot: reinforcement learning of a language model on rollouts of a smaller, cheaper model.

The top level offers the correction, for use inside another framework, which needs torch and pydantic only; and the
verifier of final answers, which needs math-verify for those that are no plain numbers:

    >>> from jackpot import CorrectionInputs, make_correction, verify
    >>> correction = make_correction("obrs")
    >>> verify(r"So it is $\boxed{0.5}$.", r"\frac{1}{2}")
    True

Each name is imported at its first use, so that a process which only verifies answers loads neither package.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jackpot.core.errors import JackpotError
    from jackpot.objectives import obrs
    from jackpot.objectives.corrections import CORRECTIONS, Correction, CorrectionFn, CorrectionInputs, make_correction
    from jackpot.rollout.rewards.rewards import verify, verify_all

_CORRECTIONS, _REWARDS = "jackpot.objectives.corrections", "jackpot.rollout.rewards.rewards"
_MODULES = {  # of each name
    "CORRECTIONS": _CORRECTIONS,
    "Correction": _CORRECTIONS,
    "CorrectionFn": _CORRECTIONS,
    "CorrectionInputs": _CORRECTIONS,
    "JackpotError": "jackpot.core.errors",
    "make_correction": _CORRECTIONS,
    "obrs": "jackpot.objectives.obrs",
    "verify": _REWARDS,
    "verify_all": _REWARDS,
}
__all__ = [
    "CORRECTIONS",
    "Correction",
    "CorrectionFn",
    "CorrectionInputs",
    "JackpotError",
    "make_correction",
    "obrs",
    "verify",
    "verify_all",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'jackpot' has no attribute {name!r}; it has {', '.join(__all__)}")
    module = import_module(_MODULES[name])
    return module if name == "obrs" else getattr(module, name)
