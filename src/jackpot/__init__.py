r"""Jackpot: reinforcement learning of a language model on rollouts of a smaller, cheaper model.

The top level offers three things: the correction for use inside another framework, which needs torch and pydantic only;
the verifier of final answers, which needs math-verify for answers that are no plain numbers; and training, which needs
the extra `train`.

    >>> from jackpot import correct, verify
    >>> verify(r"So it is $\boxed{0.5}$.", r"\frac{1}{2}")
    True

Each name is imported at its first use: `import jackpot` alone loads neither torch nor pydantic.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jackpot.core.errors import JackpotError
    from jackpot.corrections import Corrected, correct, make_correction
    from jackpot.launch.library import SavedRun, load_run, train
    from jackpot.objectives import obrs
    from jackpot.objectives.corrections import CORRECTIONS, Correction, CorrectionFn, CorrectionInputs
    from jackpot.objectives.estimate import estimate_z
    from jackpot.rollout.rewards.rewards import verify, verify_all

_PUBLIC = {  # the public names, by the module that defines them
    "jackpot.core.errors": ("JackpotError",),
    "jackpot.launch.library": ("SavedRun", "load_run", "train"),
    "jackpot.corrections": ("Corrected", "correct", "make_correction"),
    "jackpot.objectives.corrections": ("CORRECTIONS", "Correction", "CorrectionFn", "CorrectionInputs"),
    "jackpot.objectives.estimate": ("estimate_z",),
    "jackpot.rollout.rewards.rewards": ("verify", "verify_all"),
}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = [
    "CORRECTIONS",
    "Corrected",
    "Correction",
    "CorrectionFn",
    "CorrectionInputs",
    "JackpotError",
    "SavedRun",
    "correct",
    "estimate_z",
    "load_run",
    "make_correction",
    "obrs",
    "train",
    "verify",
    "verify_all",
]


def __getattr__(name: str) -> Any:
    """Import a public name of the package when it is first used."""
    if name == "__version__":
        return import_module("jackpot.core.package").version()
    if name == "obrs":  # the one public name that is a module
        return import_module("jackpot.objectives.obrs")
    if name not in _MODULES:
        raise AttributeError(f"module 'jackpot' has no attribute {name!r}; it has {', '.join(__all__)}")
    try:
        return getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        package = import_module("jackpot.core.package")
        if not package.needs_train(error):
            raise
        raise ImportError(f"jackpot.{name} needs the extra `train`: {package.install('train')}. {error}") from error


def __dir__() -> list[str]:
    """Return the names that tab completion offers, also the public names that are not imported yet."""
    return sorted([*globals(), *__all__, "__version__"])
