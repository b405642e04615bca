"""Sections as one HTML file that needs no network: data, plotly and our own code are in it. Layer 6."""

import html
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from jackpot.files import write_whole
from jackpot.report.charts import Chart, Section, Table

_ASSETS = Path(__file__).parent / "assets"


def write_page(path: Path, title: str, sections: Sequence[Section]) -> None:
    """Write the page; charts are drawn when they come into view."""
    page = (_ASSETS / "page.html").read_text()
    parts = {
        "TITLE": html.escape(title),
        "STYLE": (_ASSETS / "page.css").read_text(),
        "DATA": _embedded([_section(section) for section in sections]),
        "PLOTLY": get_plotlyjs(),
        "SCRIPT": (_ASSETS / "page.js").read_text(),
    }
    for name, text in parts.items():
        page = page.replace(f"@@{name}@@", text)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, page.encode())


def _section(section: Section) -> dict[str, Any]:
    return {"title": section.title, "intro": section.intro, "items": [_item(item) for item in section.items]}


def _item(item: Any) -> dict[str, Any]:
    kind = "table" if isinstance(item, Table) else "chart" if isinstance(item, Chart) else "heatmap"
    fields = asdict(item) | {"kind": kind}
    if isinstance(item, Chart):
        looks = [{"colour": series.colour, "dash": series.dash} for series in item.series]
        fields["series"] = [series | look for series, look in zip(fields["series"], looks, strict=True)]
    return fields


def _embedded(value: Any) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("</", "<\\/").replace("<!--", "<\\!--")
