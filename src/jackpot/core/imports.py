"""The import of a user's class or function by its name, for settings such as `import_path: my_module:MyTask`."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from jackpot.core.errors import ConfigError


def import_object(path: str, kind: str) -> Any:
    """Import the class or function that a path such as `my_module:MyTask` names, and return it.

    The module is looked for where Python finds modules, and in the current folder.

    Args:
        path: name of the module, a colon, and the name of the class or function in it.
        kind: what the object is for, such as "task"; the error names it.

    Raises:
        ConfigError: the module cannot be imported, or has no callable of that name.
    """
    module, _, name = path.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)

    try:
        item = getattr(import_module(module), name)
    except Exception as error:  # the user's own code may raise anything
        raise ConfigError(
            f"the {kind} {path!r} cannot be imported: {type(error).__name__}: {error}. Its file must lie in the "
            f"current folder ({folder}) or where Python finds modules (PYTHONPATH)"
        ) from error
    if not callable(item):
        raise ConfigError(f"the {kind} {path!r} is a {type(item).__name__}; name a class or a function")
    return item
