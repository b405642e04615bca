"""Writes docs/gpu.md: benchmarks/gpu_page.md, then of each part the text at the top of its file and its rows."""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from gpu_parts.results import RESULTS, Line, Result, read, table
from gpu_parts.wheels import COMPARED, FOLDER, NEEDED

PAGE = RESULTS.with_suffix(".md")
PARTS = ("check", "runs", "head", "step", "attention", "decode", "sync", "fsdp", "fp8")
NOT_RUN = "Not run."
# Columns that docs/gpu.jsonl has and the page has not.
HIDDEN = {"longest gaps, ms", "copies to the host", "of a product", "quantizing", "product", "off by", "pays"}
TEMPLATE = Path(__file__).resolve().parents[1] / "gpu_page.md"


def page(lines: Sequence[Line]) -> str:
    """Return the whole document."""
    text = TEMPLATE.read_text().format(
        folder=FOLDER.name,
        needed=", ".join(NEEDED.values()),
        compared=", ".join(COMPARED.values()),
    )
    sections = [text]
    for part in PARTS:
        sections.append(_section(part, [line for line in lines if line.part == part], "".join(sections)))
    return "\n".join(sections)


def _section(part: str, found: Sequence[Line], above: str) -> str:
    """Return a part's text and what its newest commit measured; `above` is the page so far."""
    about = ast.get_docstring(ast.parse((Path(__file__).parent / f"{part}.py").read_text())) or ""
    if not found:
        return f"## {part}\n\n{about.splitlines()[0]} {NOT_RUN}\n"

    found = [line for line in found if line.commit == found[-1].commit]
    machine = ", ".join(f"{value}" if key == "device" else f"{key} {value}" for key, value in found[-1].machine.items())
    origin = f"at {found[-1].commit} on {machine}"
    head = f"## {part}\n\n{about}\n\n`make gpu PART={part}` {'there' if origin in above else origin}:\n\n"
    return head + "\n\n".join(_results(found)) + "\n"


def _results(found: Sequence[Line]) -> Iterator[str]:
    """Yield what is known of a part: how much was right, tables of rows with equal columns, what was not measured."""
    right = [line for line in found if line.result.get("right")]
    if right:
        gaps: dict[float, list[float]] = {}  # of what is allowed
        for line in right:
            if "gap" in line.result:
                gaps.setdefault(line.result["allowed"], []).append(line.result["gap"])
        largest = ", ".join(f"{max(gap):.3g} of {allowed:g} ({len(gap)})" for allowed, gap in gaps.items())
        count = f"{len(right)} of {len(found)} rows were right."
        yield count + f" The largest gaps of what is allowed (rows): {largest}." * bool(gaps)

    shown = [replace(line, result=_shown(line.result)) for line in found if line.is_done and line not in right]
    for _, alike in groupby(shown, key=lambda line: tuple(line.result)):
        yield table(list(alike))

    if missing := [f"{line.row} ({line.result.get('error', 'did not end')})" for line in found if not line.is_done]:
        yield f"Not measured: {'; '.join(missing)}."


def _shown(result: Result) -> Result:
    return {column: value for column, value in result.items() if column not in HIDDEN}


def write() -> None:
    PAGE.write_text(page(read(RESULTS)))
    print(PAGE)
