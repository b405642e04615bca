"""Keeps the rows of the GPU benchmark in a file: a line of JSON when a row begins, and one when it ends."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "gpu.jsonl"
Result = dict[str, Any]  # column of the table: number or text; `error` alone where there is none


class NotInstalled(Exception):
    """A package that a row needs is not on this machine."""


@dataclass(frozen=True)
class Row:
    """Something to measure."""

    name: str  # within its part
    measure: Callable[[], Result]
    seconds: float = 90.0  # the most that it may take, all repetitions included


@dataclass(frozen=True)
class Line:
    """What is known of one row at one commit."""

    part: str
    row: str
    commit: str
    machine: dict[str, str]  # device and versions
    result: Result  # empty from the row's begin to its end
    seconds: float = 0.0  # that the row took

    @property
    def is_done(self) -> bool:
        return bool(self.result) and "error" not in self.result


def read(path: Path | None) -> list[Line]:
    """Return the newest line of every row at every commit; a last line that was cut off is left out."""
    newest: dict[tuple[str, str, str], Line] = {}
    for text in path.read_text().splitlines() if path and path.exists() else ():
        try:
            line = Line(**json.loads(text))
        except ValueError:
            continue
        newest[line.commit, line.part, line.row] = line
    return list(newest.values())


class Results:
    """The rows of one commit, read from a file and added to it; kept in memory alone where `path` is None."""

    def __init__(self, path: Path | None, commit: str, machine: dict[str, str]) -> None:
        self._path, self._commit, self._machine = path, commit, machine
        self._lines = {(line.part, line.row): line for line in read(path) if line.commit == commit}

    def is_done(self, part: str, row: str) -> bool:
        return (part, row) in self._lines and self._lines[part, row].is_done

    def tried(self, part: str, row: str) -> bool:
        """Return whether the row was begun before, with an error or no end."""
        return (part, row) in self._lines

    def begin(self, part: str, row: str) -> None:
        """Note a row before it is measured: one that ends the process is then tried last."""
        self._add(Line(part, row, self._commit, self._machine, {}))

    def end(self, part: str, row: str, result: Result, seconds: float) -> None:
        self._add(Line(part, row, self._commit, self._machine, result, round(seconds, 1)))

    def of(self, part: str) -> list[Line]:
        return [line for line in self._lines.values() if line.part == part]

    def _add(self, line: Line) -> None:
        self._lines[line.part, line.row] = line
        if self._path:
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(line)) + "\n")


def table(lines: Sequence[Line]) -> str:
    """Return the results as Markdown: a column for every name in them, and errors in a last one."""
    columns = list(dict.fromkeys(name for line in lines for name in line.result if name != "error"))
    has_errors = any(not line.is_done for line in lines)
    head = ["", *columns, *["not measured"] * has_errors]
    cells = [
        [line.row, *(_cell(line.result.get(name, "")) for name in columns)]
        + [line.result.get("error", "") if line.result else "began and did not end"] * has_errors
        for line in lines
    ]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *cells))


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
