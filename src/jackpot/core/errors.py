"""Every error a user can cause. Each says what was given, what is allowed, what to do. Standard library
only."""

from collections.abc import Iterable
from difflib import get_close_matches


class JackpotError(Exception):
    """Base of all errors raised on purpose; the command line prints it without a traceback."""


class ConfigError(JackpotError, ValueError):
    """A setting, recipe, arm or override that cannot be used."""


class DataError(JackpotError, ValueError):
    """A prompt, tokenizer or data set that cannot be used."""


class ModelError(JackpotError, ValueError):
    """A model folder that is missing, damaged or does not fit its partner."""


class EngineError(JackpotError, RuntimeError):
    """An engine that cannot do what was asked, or did not do it."""


class CheckpointError(JackpotError, RuntimeError):
    """A checkpoint or run folder that cannot be continued."""


class TrainingError(JackpotError, RuntimeError):
    """Training that cannot go on as it does."""


def unknown_name(kind: str, given: str, valid: Iterable[str]) -> str:
    """The message for a name that does not exist: lists the valid ones and guesses what was meant.

    >>> unknown_name("arm", "obsr", ["obrs", "tis"])
    "unknown arm 'obsr'; did you mean 'obrs'? Valid: obrs, tis"
    """
    names = sorted(valid)
    close = get_close_matches(given, names, n=1)
    guess = f"; did you mean {close[0]!r}?" if close else "."
    return f"unknown {kind} {given!r}{guess} Valid: {', '.join(names) or '(none)'}"
