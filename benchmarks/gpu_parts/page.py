"""Writes docs/gpu.md: benchmarks/gpu_page.md, then of each part the text at the top of its file and its rows."""

import ast
from collections.abc import Sequence
from pathlib import Path

from gpu_parts.results import RESULTS, Line, read, table
from gpu_parts.wheels import COMPARED, FOLDER, NEEDED

PAGE = RESULTS.with_suffix(".md")
PARTS = ("check", "runs", "head", "step", "attention", "decode", "sync", "fsdp", "fp8")
NOT_RUN = "Not run."
TEMPLATE = Path(__file__).resolve().parents[1] / "gpu_page.md"


def page(lines: Sequence[Line]) -> str:
    """Return the whole document."""
    text = TEMPLATE.read_text().format(
        folder=FOLDER.name,
        needed=", ".join(NEEDED.values()),
        compared=", ".join(COMPARED.values()),
    )
    return "\n".join([text, *(_section(part, lines) for part in PARTS)])


def _section(part: str, lines: Sequence[Line]) -> str:
    about = ast.get_docstring(ast.parse((Path(__file__).parent / f"{part}.py").read_text()))
    found = [line for line in lines if line.part == part]
    found = [line for line in found if line.commit == found[-1].commit]
    if not found:
        return f"## {part}\n\n{about}\n\n{NOT_RUN}\n"
    machine = ", ".join(f"{value}" if key == "device" else f"{key} {value}" for key, value in found[-1].machine.items())
    head = f"## {part}\n\n{about}\n\n`make gpu PART={part}` at {found[-1].commit} on {machine}:\n\n"
    others = [line for line in found if not line.result.get("right")]
    if part != "runs" or len(others) == len(found):
        return f"{head}{table(found)}\n"

    right = "; ".join(line.row for line in found if line not in others)
    return f"{head}Right: {right}.\n" + (f"\n{table(others)}\n" if others else "")


def write() -> None:
    PAGE.write_text(page(read(RESULTS)))
    print(PAGE)
