"""Pictures as data: what is drawn, not how.

`png.py` draws them with matplotlib, `page.py` puts them into a page where plotly draws them. A number that is not known
is None, and a line has a gap there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Numbers = Sequence[float | None]

# Okabe and Ito's colours without black and yellow: told apart by colour-blind people, on white and on black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#7F7F7F")
DASHES = ("solid", "dash", "dot")
# Shades of each colour, for more things than colours: towards which grey level, by how much.
SHADES = ((0, 0.0), (0, 0.45), (255, 0.5))


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line or cloud of points, with a band around it where `low` and `high` are given."""

    name: str  # equal names in several charts of a page are one entry of the legend
    x: Numbers
    y: Numbers
    low: Numbers | None = None
    high: Numbers | None = None
    number: int = 0  # chooses colour and dash; the same thing has the same number in every chart
    shade: int = 0  # of the colour: as it is, darker, lighter
    style: Literal["line", "points", "both"] = "line"
    group: str = ""  # what the page's own legend switches on and off in all charts at once

    @property
    def colour(self) -> str:
        colour, (level, part) = COLOURS[self.number % len(COLOURS)], SHADES[self.shade % len(SHADES)]
        parts = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
        return "#" + "".join(f"{round(one + (level - one) * part):02X}" for one in parts)

    @property
    def dash(self) -> str:
        return DASHES[self.number // len(COLOURS) % len(DASHES)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Guide:
    """A straight line to compare with: at `y`, or where x equals `x`."""

    text: str
    x: float | None = None
    y: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    note: str = ""  # one sentence: what to see
    log_x: bool = False
    log_y: bool = False
    y_range: tuple[float, float] | None = None
    x_names: tuple[str, ...] = ()  # of the places 0, 1, 2, ... where x counts things that have names
    guides: tuple[Guide, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Heatmap:
    title: str
    x_label: str
    y_label: str
    x: Numbers
    y: Sequence[str]  # from the bottom
    values: Sequence[Numbers]  # [y][x]
    value_label: str
    note: str = ""
    log_values: bool = False  # of positive values: the colours go by their logarithm


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A part of a page: what it shows, in the order in which it is read."""

    title: str
    intro: str
    items: tuple[Chart | Heatmap | Table, ...]


SMALLEST_RATIO = 1e-5  # what is drawn on logarithmic axes
SMALLEST_KL = 1e-7
DASHED = len(COLOURS)  # added to a series' number: the same colour, dashed
GREY = len(COLOURS) - 1


def number(value: float | None, form: str = ".3g") -> str:
    """A number in a table."""
    return "-" if value is None or math.isnan(value) else format(value, form)


def drawn(values: Sequence[float | None], smallest: float = -math.inf) -> tuple[float | None, ...]:
    """What a chart can draw: gaps for what is not finite or below `smallest`."""
    return tuple(
        value if value is not None and math.isfinite(value) and value >= smallest else None for value in values
    )
