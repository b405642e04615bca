"""The errors that a user can cause. Each message says what was given, what is allowed and what to do. Standard library
only."""

from collections.abc import Iterable
from difflib import get_close_matches


class JackpotError(Exception):
    """Is the class of all errors that a user can cause; the command line prints them without a traceback."""


class ConfigError(JackpotError, ValueError):
    """Reports a setting, recipe, arm or override that cannot be used."""


class DataError(JackpotError, ValueError):
    """Reports a prompt, tokenizer or data set that cannot be used."""


class ModelError(JackpotError, ValueError):
    """Reports a model folder that is missing, damaged or does not fit the other model."""


class EngineError(JackpotError, RuntimeError):
    """Reports an engine that cannot serve a request, or failed to."""


class WeightsError(EngineError):
    """Reports an engine that holds other weights than it was sent."""


class CheckpointError(JackpotError, RuntimeError):
    """Reports a checkpoint or run folder from which training cannot continue."""


class TrainingError(JackpotError, RuntimeError):
    """Reports training that has to stop."""


class RankError(JackpotError, RuntimeError):
    """Reports a process of a run of several that was lost or does not answer."""


def unknown_name(kind: str, given: str, valid: Iterable[str]) -> str:
    """Build the message for a name that does not exist: it lists the valid names and suggests the closest one.

    >>> unknown_name("arm", "obsr", ["obrs", "tis"])
    "unknown arm 'obsr'; did you mean 'obrs'? Valid: obrs, tis"
    """
    names = sorted(valid)
    close = get_close_matches(given, names, n=1)
    guess = f"; did you mean {close[0]!r}?" if close else "."
    return f"unknown {kind} {given!r}{guess} Valid: {', '.join(names) or '(none)'}"


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, else its kind."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
