"""Says which tests start processes, from the source of their modules: pytest's mark `process` (tests/conftest.py)."""

import ast
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

# Whatever is named so starts processes, wherever it is imported from.
STARTERS = {"subprocess", "multiprocessing", "fork", "spawnlp", "start_processes"}
STARTERS |= {f"helpers.{name}" for name in ("programs.run", "led.fork_ranks", "led.run_ranks", "sharded.on_ranks")}
STARTERS |= {f"helpers.{name}" for name in ("kills.Command", "kills.kill_all", "soak.soak")}
STARTERS |= {f"helpers.engines.{name}" for name in ("hosts.forks", "hosts.forking", "hosts.fork_engines")}
STARTERS |= {"helpers.engines.servers.VLLMServer"}
# Here the package starts them: workers of rewards, engines, ranks, runs side by side.
PATHS = ("rollout/rewards/test_rewards.py", "system/test_compare.py", "mutants/", "adapters/")
PATHS += tuple(f"launch/test_{name}.py" for name in ("engine_processes", "ranks", "ray"))


def starts_processes(path: Path, tests: Path, function: str, fixtures: Collection[str]) -> bool:
    """Return whether a test may start a process: by its folder, or by what it, its fixtures and their callees name."""
    if str(path.relative_to(tests)).startswith(PATHS):
        return True

    names_of = _names_by_function(path)
    visited, pending = set(), [function, *fixtures]
    while pending:
        name = pending.pop()
        if name in STARTERS:
            return True
        if name not in visited:
            visited.add(name)
            pending += names_of.get(name, ())
    return False


@cache
def _names_by_function(path: Path) -> dict[str, list[str]]:
    """Return what each function, class and global of a module names; what is imported from helpers, by its module."""
    tree = ast.parse(path.read_text())
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("helpers.")
        for alias in node.names
    }

    names: dict[str, list[str]] = {}
    for node in tree.body:
        mentioned = [imported.get(name, name) for name in _mentioned(node)]
        targets = [node.name] if hasattr(node, "name") else _mentioned(node) if isinstance(node, ast.Assign) else []
        for target in targets:
            names.setdefault(target, []).extend(mentioned)
    return names


def _mentioned(node: ast.AST) -> Iterator[str]:
    """Yield the names and attributes in a tree, and the arguments of functions, which may be fixtures."""
    for child in ast.walk(node):
        if isinstance(child, ast.Name):
            yield child.id
        elif isinstance(child, ast.Attribute):
            yield child.attr
        elif isinstance(child, ast.arg):
            yield child.arg
