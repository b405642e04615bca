"""The texts with which a module refuses something, as they stand in its source."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

INSTRUCTION = re.compile(  # words that tell a user what to do
    r"\b(add|choose|continue|give|hide|install|leave|lower|make|move|pip|raise|(?<!not )set|start (it|the|ranks)|take"
    r"|unset|use|wait|write|did you mean|lists (all|the)|needs either)\b",
    re.IGNORECASE,
)


def texts_of(files: Iterable[Path]) -> set[str]:
    """Return all texts with which some files refuse."""
    return {text for file in files for text in messages(ast.parse(file.read_text()))}


def remedies_of(message: str, remedies: Mapping[str, Any]) -> list[tuple[re.Match[str], Any]]:
    """Return each match of the patterns of remedies, with what stands for it; None stands for what is not done.

    A pattern that is not in the message is an error, and so is what the message tells to do beside its remedies.
    """
    rest, changes = message, []
    for pattern, change in remedies.items():
        matches = list(re.finditer(pattern, message))
        assert matches, (pattern, message)
        changes += [(remedy, change) for remedy in matches if change is not None]
        for remedy in matches:
            rest = rest.replace(remedy[0], "", 1)

    assert not INSTRUCTION.search(rest), f"{message}\nNothing does what this tells to do: {rest}"
    return changes


def is_provoked(text: str, errors: Iterable[str]) -> bool:
    """Return whether a text of the source is in one of some errors, whatever stands for its {}."""
    pattern = ".*".join(map(re.escape, text.split("{}")))
    return any(re.search(pattern, error, re.DOTALL) for error in errors)


def messages(module: ast.Module) -> Iterator[str]:
    """Yield what a module refuses with, {} for what is formatted into it."""
    for node in ast.walk(module):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from filter(None, map(form_of, node.exc.args[:1]))
        if isinstance(node, ast.FunctionDef) and node.returns is not None and ast.unparse(node.returns) == "Conflicts":
            tuples = [child for child in ast.walk(node) if isinstance(child, ast.Tuple)]
            pairs = [child for child in tuples if len(child.elts) == 2]
            yield from (form for pair in pairs if (form := form_of(pair.elts[1])) and " " in form)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_refuse" and isinstance(node.args[0], ast.Dict):
            yield from filter(None, (form_of(key) for key in node.args[0].keys if key is not None))


def form_of(node: ast.expr) -> str | None:
    """Return a string of the source, {} for what is formatted into it; None for what is no string."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
