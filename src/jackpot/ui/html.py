"""Writes sections as one HTML file that needs no network: it contains the data, plotly and our own scripts.

Of plotly it has the basic bundle (lines and clouds of points), a file of this package, which `make plotly` fetches.
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
from jackpot.ui.charts import Chart, Numbers, Section, Table

_ASSETS = Path(__file__).parent / "assets"
# Scripts of the token inspector, in the order in which they run.
_INSPECTOR = ("colors.js", "inspector_rows.js", "inspector_panel.js", "inspector.js")
_SLOT = re.compile(r"@@([A-Z]+)@@")  # a place in page.html that `write_page` fills

_Columns = dict[tuple[float | None, ...], int]  # each distinct column of numbers of the page, and its index


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectorData:
    """The data of the page's token inspector."""

    # What the page reads before it unpacks a pack: the runs, their saved iterations, counts of responses and tokens.
    index: Mapping[str, Any]
    packs: Mapping[str, str]  # by name: the columns of one iteration or the texts of one run, as `packed` returns them
    left_out: Table  # runs with saved iterations for which the page has no room; no rows if there is none


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
    """Write a page of sections; the browser draws a chart when it comes into view.

    Args:
        tokens: data of the token inspector; None leaves the inspector out.
    """
    columns: _Columns = {}  # the columns of numbers of all charts, each once; `_section` adds to them
    data: dict[str, Any] = {"sections": [_section(section, columns) for section in sections]}
    data["numbers"] = list(columns)
    # Compressed parts of the page, by name; the page's script unpacks each when it is needed.
    packs = {"plotly": base64.b64encode((_ASSETS / "plotly-basic.min.js.gz").read_bytes()).decode()}

    inspector = scripts = ""
    if tokens and tokens.index["runs"]:
        inspector = _asset("inspector.html")
        scripts = "\n".join(map(_asset, _INSPECTOR))
        data["tokens"] = dict(tokens.index)
        packs |= tokens.packs
    packs["page"] = packed(data)

    slots = {  # what replaces each @@NAME@@ in page.html
        "TITLE": html.escape(title),
        "STYLE": _asset("page.css") + (_asset("inspector.css") if inspector else ""),
        "INSPECTOR": inspector,
        "PACKS": "\n".join(
            f'<script type="text/plain" id="pack-{name}">{text}</script>' for name, text in packs.items()
        ),
        "SCRIPT": _asset("page.js") + scripts,
    }

    page = _SLOT.sub(lambda match: slots[match[1]], _asset("page.html"))
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page.encode())


def _asset(name: str) -> str:
    """Return the text of a file in assets/."""
    return (_ASSETS / name).read_text()


def _section(section: Section, columns: _Columns) -> dict[str, Any]:
    """Return a section as the page's script reads it, and add its columns of numbers to `columns`."""
    items = [_item(item, columns) for item in section.items]
    return {"title": section.title, "intro": section.intro, "folded": section.is_folded, "items": items}


def _item(item: Chart | Table, columns: _Columns) -> dict[str, Any]:
    """Return a chart or table as the page's script reads it: each column of numbers as its index in `columns`."""
    if isinstance(item, Table):
        return asdict(item) | {"kind": "table"}

    def index(numbers: Numbers | None) -> int | None:
        """Return the index of a column in `columns`, to which it is added if it is new."""
        return None if numbers is None else columns.setdefault(tuple(numbers), len(columns))

    series = [
        asdict(line)
        | {"color": line.color, "dash": line.dash}
        | {name: index(getattr(line, name)) for name in ("x", "y", "low", "high")}
        for line in item.series
    ]
    return asdict(item) | {"kind": "chart", "series": series}
