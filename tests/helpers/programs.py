"""Programs for a fresh interpreter: what they import, and what they do where packages are missing."""

import subprocess
import sys
from collections.abc import Collection


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own."""
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def without(packages: Collection[str]) -> str:
    """Return a program's first lines, after which importing any of these packages fails as if it were not installed."""
    return f"""
import importlib.abc, sys
class Blocker(importlib.abc.MetaPathFinder):
    blocked = set({sorted(packages)!r})
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.blocked:
            raise ModuleNotFoundError(f"{{name}} is blocked in this test", name=name)
sys.meta_path.insert(0, Blocker())
"""
