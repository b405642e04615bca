"""The texts with which a module refuses something, as they stand in its source."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

TELLS = re.compile(
    r"\b(add|choose|continue|give|hide|install|leave|lower|make|move|pip|raise|(?<!not )set|start (it|the|ranks)|take"
    r"|unset|use|wait|write|did you mean|lists (all|the)|needs either)\b",
    re.IGNORECASE,
)


def texts_of(files: Iterable[Path]) -> set[str]:
    return {text for file in files for text in messages(ast.parse(file.read_text()))}


def remedies_of(message: str, remedies: Mapping[str, Any]) -> list[tuple[re.Match[str], Any]]:
    """Return each match of the patterns of remedies, with what stands for it; None stands for what is not done.

    A pattern that is not in the message is an error, and so is what the message tells to do beside its remedies.
    """
    rest, done = message, []
    for pattern, change in remedies.items():
        matches = list(re.finditer(pattern, message))
        assert matches, (pattern, message)
        done += [(remedy, change) for remedy in matches if change is not None]
        for remedy in matches:
            rest = rest.replace(remedy[0], "", 1)

    assert not TELLS.search(rest), f"{message}\nNothing does what this tells to do: {rest}"
    return done


def is_provoked(text: str, said: Iterable[str]) -> bool:
    form = ".*".join(map(re.escape, text.split("{}")))
    return any(re.search(form, one, re.DOTALL) for one in said)


def messages(module: ast.Module) -> Iterator[str]:
    """Yield what a module refuses with, {} for what is formatted into it."""
    for node in ast.walk(module):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from filter(None, map(form_of, node.exc.args[:1]))
        if isinstance(node, ast.FunctionDef) and node.returns is not None and ast.unparse(node.returns) == "Conflicts":
            pairs = [one for one in ast.walk(node) if isinstance(one, ast.Tuple) and len(one.elts) == 2]
            yield from (form for pair in pairs if (form := form_of(pair.elts[1])) and " " in form)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "_refuse" and isinstance(node.args[0], ast.Dict):
            yield from filter(None, (form_of(key) for key in node.args[0].keys if key is not None))


def form_of(node: ast.expr) -> str | None:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(one.value) if isinstance(one, ast.Constant) else "{}" for one in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
