"""Draws charts into a PNG file with matplotlib."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jackpot.core.files import whole_file
from jackpot.ui.charts import Chart, Numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DASHES = {"solid": "-", "dash": "--", "dot": ":"}
_STYLES = {"line": {}, "points": {"linestyle": "none", "marker": "."}, "both": {"marker": "o", "markersize": 3}}


def write_png(path: Path, charts: Sequence[Chart], columns: int = 3) -> None:
    """Draw charts side by side, at most `columns` in a row; 150 dots an inch, 5 x 3.8 inches each."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # a slow import, which the other commands do not need
    from matplotlib.figure import Figure

    columns = min(columns, len(charts))
    rows = math.ceil(len(charts) / columns)
    figure = Figure(figsize=(5.0 * columns, 3.8 * rows), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, chart in zip(panels, charts, strict=False):
        _draw_chart(panel, chart)
        panel.set_title(_escaped(chart.title), fontsize=10)
        panel.set_xlabel(_escaped(chart.x_label), fontsize=9)
        panel.set_ylabel(_escaped(chart.y_label), fontsize=9)
        panel.tick_params(labelsize=8)
    for panel in panels[len(charts) :]:
        panel.set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as partial:
        figure.savefig(partial, format="png")


def _draw_chart(panel: "Axes", chart: Chart) -> None:
    for series in chart.series:
        x, y = _floats(series.x), _floats(series.y)
        look = {"linestyle": _DASHES[series.dash]} | _STYLES[series.style]
        panel.plot(x, y, color=series.color, label=_escaped(series.name), linewidth=1.5, **look)
        if series.low is not None and series.high is not None:
            low, high = _floats(series.low), _floats(series.high)
            panel.fill_between(x, low, high, color=series.color, alpha=0.18, linewidth=0)
    for guide in chart.guides:
        draw, at = (panel.axhline, guide.y) if guide.x is None else (panel.axvline, guide.x)
        draw(at, color="#555555", linewidth=0.8, linestyle=":", label=_escaped(guide.text))
    if chart.x_names:
        panel.set_xticks(range(len(chart.x_names)), list(map(_escaped, chart.x_names)))
    if chart.log_x and _any_positive(one.x for one in chart.series):
        panel.set_xscale("log")
    if chart.log_y and _any_positive(one.y for one in chart.series):
        panel.set_yscale("log")
    if chart.y_range:
        panel.set_ylim(chart.y_range)
    panel.grid(alpha=0.25, linewidth=0.5)
    if len(chart.series) + len(chart.guides) > 1:
        panel.legend(fontsize=7, framealpha=0.7)


def _escaped(text: str) -> str:
    """Escape dollar signs, between which matplotlib would parse mathematics."""
    return text.replace("$", r"\$")


def _any_positive(columns: Iterable[Numbers]) -> bool:
    """Return whether a logarithmic axis would have a value: matplotlib cannot lay out one without."""
    return any(value is not None and value > 0.0 for column in columns for value in column)


def _floats(numbers: Numbers) -> list[float]:
    return [math.nan if number is None else float(number) for number in numbers]
