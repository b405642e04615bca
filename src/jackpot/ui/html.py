"""Writes sections as one HTML file that needs no network: it contains the data, plotly and our own code.

Data and plotly are compressed. The bundle of plotly is the basic one, which has lines and clouds of points; it is a
file of this package, which `make plotly` fetches.
"""

import base64
import gzip
import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jackpot.core.files import write_whole
from jackpot.ui.charts import Chart, Section, Table

_ASSETS = Path(__file__).parent / "assets"
_INSPECTOR = ("colors.js", "inspector_rows.js", "inspector_panel.js", "inspector.js")
_SLOT = re.compile(r"@@([A-Z]+)@@")


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectorData:
    """Holds the data of the page's token inspector."""

    index: Mapping[str, Any]  # the runs, their saved iterations, and the counts of responses and tokens
    packs: Mapping[str, str]  # name: columns of one iteration or texts of one run, see `packed`
    left_out: Table  # saved iterations for which the page has no room; without rows if it has all


def packed(value: Any) -> str:
    """Return a value as JSON, compressed by gzip, in base64; equal values give equal text."""
    data = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
    return base64.b64encode(gzip.compress(data, compresslevel=6, mtime=0)).decode()


def write_page(
    path: Path,
    title: str,
    sections: Sequence[Section],
    *,
    tokens: InspectorData | None = None,
) -> None:
    """Write the page. The browser draws a chart when it comes into view.

    Args:
        tokens: data of the token inspector; None leaves the inspector out.
    """
    numbers = _Numbers()
    data: dict[str, Any] = {"sections": [_section(section, numbers) for section in sections], "numbers": numbers.lists}
    packs = {"plotly": base64.b64encode((_ASSETS / "plotly-basic.min.js.gz").read_bytes()).decode()}

    inspector = scripts = ""
    if tokens and tokens.index["runs"]:
        inspector, scripts = _asset("inspector.html"), "\n".join(map(_asset, _INSPECTOR))
        data["tokens"] = dict(tokens.index)
        packs |= tokens.packs
    packs["page"] = packed(data)

    parts = {
        "TITLE": html.escape(title),
        "STYLE": _asset("page.css") + (_asset("inspector.css") if inspector else ""),
        "INSPECTOR": inspector,
        "PACKS": _packs(packs),
        "SCRIPT": _asset("page.js") + scripts,
    }

    page = _SLOT.sub(lambda slot: parts[slot[1]], _asset("page.html"))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page.encode())


class _Numbers:
    """Stores each distinct column of numbers once; a chart refers to a column by its index."""

    def __init__(self) -> None:
        self.lists: list[list[float | None]] = []
        self._indices: dict[tuple[float | None, ...], int] = {}

    def index(self, numbers: Sequence[float | None]) -> int:
        key = tuple(numbers)
        if key not in self._indices:
            self._indices[key] = len(self.lists)
            self.lists.append(list(numbers))
        return self._indices[key]


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text()


def _section(section: Section, numbers: _Numbers) -> dict[str, Any]:
    items = [_item(item, numbers) for item in section.items]
    return {"title": section.title, "intro": section.intro, "folded": section.is_folded, "items": items}


def _item(item: Chart | Table, numbers: _Numbers) -> dict[str, Any]:
    if isinstance(item, Table):
        return asdict(item) | {"kind": "table"}
    series = [
        asdict(one)
        | {"color": one.color, "dash": one.dash}
        | {name: None if (column := getattr(one, name)) is None else numbers.index(column) for name in _COLUMNS}
        for one in item.series
    ]
    return asdict(item) | {"kind": "chart", "series": series}


_COLUMNS = ("x", "y", "low", "high")


def _packs(packs: Mapping[str, str]) -> str:
    return "\n".join(f'<script type="text/plain" id="pack-{name}">{text}</script>' for name, text in packs.items())
