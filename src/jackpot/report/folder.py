"""A folder with everything that was found: one page, one picture for each section, all numbers. Layer 6."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jackpot.files import write_whole
from jackpot.report.charts import Chart, Heatmap, Section, Table
from jackpot.report.page import write_page
from jackpot.report.png import write_png


def write_folder(folder: Path, name: str, title: str, sections: Mapping[str, Section], numbers: Any) -> list[Path]:
    """Write NAME.html, KEY.png for every section with a chart, and NAME.json; the files in that order.

    Args:
        numbers: dicts, lists, strings and numbers; what is not finite becomes null.
    """
    page = folder / f"{name}.html"
    write_page(page, title, list(sections.values()))
    written = [page]
    for key, section in sections.items():
        if charts := [item for item in section.items if not isinstance(item, Table)]:
            written.append(folder / f"{key}.png")
            write_png(written[-1], [_with_axes(chart) for chart in charts])
    written.append(folder / f"{name}.json")
    write_whole(written[-1], (json.dumps(_plain(numbers), indent=1, allow_nan=False) + "\n").encode())
    return written


def _with_axes(chart: Chart | Heatmap) -> Chart | Heatmap:
    """matplotlib cannot lay out a logarithmic axis on which nothing stands: such a one becomes linear."""
    if isinstance(chart, Heatmap):
        return chart
    stands = [_any_positive(values) for values in zip(*((one.x, one.y) for one in chart.series), strict=True)]
    has_x, has_y = stands or [False, False]
    return replace(chart, log_x=chart.log_x and has_x, log_y=chart.log_y and has_y)


def _any_positive(columns: Iterable[Iterable[float | None]]) -> bool:
    return any(value is not None and value > 0.0 for column in columns for value in column)


def _plain(value: Any) -> Any:
    """As JSON can have it."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
