"""The errors that a user can cause. Each message says what was given, what is allowed and what to do. Standard library
only."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class JackpotError(Exception):
    """The base class of all errors that a user can cause; the command line prints them without a traceback."""


class ConfigError(JackpotError, ValueError):
    """A setting, recipe, arm or override that cannot be used."""


class DataError(JackpotError, ValueError):
    """A prompt, tokenizer, tensor or data set that cannot be used."""


class ModelError(JackpotError, ValueError):
    """A model folder that is missing, is damaged, or does not fit the other model of the run."""


class EngineError(JackpotError, RuntimeError):
    """An engine that cannot serve a request, or that failed while it served one."""


class WeightsError(EngineError):
    """An engine that holds other weights than those that were sent to it."""


class CheckpointError(JackpotError, RuntimeError):
    """A checkpoint or run folder from which training cannot continue."""


class TrainingError(JackpotError, RuntimeError):
    """A state of the run in which training cannot go on, such as gradients that are not finite or dead workers."""


class RankError(JackpotError, RuntimeError):
    """A process that was lost or does not answer, in a run of several processes."""


def unknown_name(kind: str, name: str, valid: Iterable[str]) -> str:
    """Build the message about a name that does not exist, with the valid names and the closest of them.

    >>> unknown_name("arm", "obsr", ["obrs", "tis"])
    "unknown arm 'obsr'; did you mean 'obrs'? Valid: obrs, tis"
    """
    names = sorted(valid)
    close = get_close_matches(name, names, n=1)
    guess = f"; did you mean {close[0]!r}?" if close else "."
    return f"unknown {kind} {name!r}{guess} Valid: {', '.join(names) or '(none)'}"


def repeated(names: Sequence[str]) -> list[str]:
    """Return each name that occurs more than once."""
    return [name for name in dict.fromkeys(names) if names.count(name) > 1]


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class name where it has no message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
