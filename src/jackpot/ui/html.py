"""Sections as one HTML file that needs no network: data, plotly and our own code are in it."""

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jackpot.core.files import write_whole
from jackpot.ui.charts import Chart, Section, Table
from jackpot.ui.packing import Tokens, packed

_ASSETS = Path(__file__).parent / "assets"
_INSPECTOR = ("colours.js", "inspector_rows.js", "inspector_panel.js", "inspector.js")
_PLACE = re.compile(r"@@([A-Z]+)@@")


def write_page(
    path: Path,
    title: str,
    sections: Sequence[Section],
    *,
    tokens: Tokens | None = None,
    reload_every: float | None = None,
) -> None:
    """Write the page; charts are drawn when they come into view.

    Args:
        tokens: for the token inspector; without it the page has none.
        reload_every: seconds after which the page looks for a newer one in its place, again and again.
    """
    from plotly.offline import get_plotlyjs  # the other commands start without it

    numbers = _Numbers()
    data = {"sections": [_section(section, numbers) for section in sections], "reloadEvery": reload_every}
    packs = {"numbers": packed(numbers.lists)}
    inspector = scripts = ""
    if tokens and tokens.index["runs"]:
        inspector, scripts = _asset("inspector.html"), "\n".join(map(_asset, _INSPECTOR))
        data["tokens"] = dict(tokens.index)
        packs |= tokens.packs
    parts = {
        "TITLE": html.escape(title),
        "STYLE": _asset("page.css") + (_asset("inspector.css") if inspector else ""),
        "INSPECTOR": inspector,
        "DATA": _embedded(data),
        "PACKS": _packs(packs),
        "PLOTLY": get_plotlyjs(),
        "SCRIPT": _asset("page.js") + scripts,
    }
    page = _PLACE.sub(lambda place: parts[place[1]], _asset("page.html"))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page.encode())


class _Numbers:
    """Columns of numbers, each once: charts name them by their place, and they travel compressed."""

    def __init__(self) -> None:
        self.lists: list[list[float | None]] = []
        self._places: dict[tuple[float | None, ...], int] = {}

    def place(self, numbers: Sequence[float | None]) -> int:
        key = tuple(numbers)
        if key not in self._places:
            self._places[key] = len(self.lists)
            self.lists.append(list(numbers))
        return self._places[key]


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text()


def _section(section: Section, numbers: _Numbers) -> dict[str, Any]:
    items = [_item(item, numbers) for item in section.items]
    return {"title": section.title, "intro": section.intro, "items": items}


def _item(item: Any, numbers: _Numbers) -> dict[str, Any]:
    if isinstance(item, Table):
        return asdict(item) | {"kind": "table"}
    if not isinstance(item, Chart):
        places = {"x": numbers.place(item.x), "values": [numbers.place(row) for row in item.values]}
        return asdict(item) | places | {"kind": "heatmap"}
    series = [
        asdict(one)
        | {"colour": one.colour, "dash": one.dash}
        | {name: None if (column := getattr(one, name)) is None else numbers.place(column) for name in _COLUMNS}
        for one in item.series
    ]
    return asdict(item) | {"kind": "chart", "series": series}


_COLUMNS = ("x", "y", "low", "high")


def _embedded(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _packs(packs: Mapping[str, str]) -> str:
    return "\n".join(f'<script type="text/plain" id="pack-{name}">{text}</script>' for name, text in packs.items())
