"""Postpones imports until a module is first used, so that a command's file can import at its top what it runs later.

`jackpot --help`, a typo and commands that compute nothing then start without torch and transformers.
"""

import builtins
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any


class Later:
    """A module that is imported when one of its names is first read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(import_module(self._name), attribute)


@contextmanager
def lazy() -> Iterator[None]:
    """Make every `from FOLDER import MODULE` in a with-block a `Later`; only modules may be imported there.

    importlib.util.LazyLoader would not do: torch walks over sys.modules, which runs every module that it postponed.
    """

    # Replaces `__import__`: returns an object in the folder's place, from which the import statement takes the names.
    def postpone(name: str, _globals: Any, _locals: Any, modules: Sequence[str], _level: int) -> SimpleNamespace:
        return SimpleNamespace(**{module: Later(f"{name}.{module}") for module in modules})

    usual = builtins.__import__
    builtins.__import__ = postpone
    try:
        yield
    finally:
        builtins.__import__ = usual


def load(module: ModuleType) -> None:
    """Import now every module that `module` imported in a `with lazy()` block."""
    for value in list(vars(module).values()):
        if isinstance(value, Later):
            import_module(value._name)
