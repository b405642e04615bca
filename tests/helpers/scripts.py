"""Loads the scripts of benchmarks/, which is no package."""

import importlib.util
import sys
from types import ModuleType

from helpers.paths import ROOT


def script(name: str) -> ModuleType:
    """A file of benchmarks/ by the name under which others there import it."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]
