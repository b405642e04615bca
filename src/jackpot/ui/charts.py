"""Describes charts, tables and sections as data, without drawing them.

`html.py` puts them into a page where plotly draws them. None stands for an unknown number, and a line has a gap there.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Literal

Numbers = Sequence[float | None]

# Okabe and Ito's colors without black and yellow: color-blind people can distinguish them, on white and on black.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#7F7F7F")
DASHES = ("solid", "dash", "dot")
# Shades of each color, for more series than colors: gray level to mix in, and its share.
SHADES = ((0, 0.0), (0, 0.45), (255, 0.5))


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Describes one line or cloud of points, with a band around it if `low` and `high` are given."""

    name: str  # entry of the legend; equal names in several charts of a page share it
    x: Numbers
    y: Numbers
    low: Numbers | None = None
    high: Numbers | None = None
    number: int = 0  # chooses color and dash; an arm or variant has the same number in every chart
    shade: int = 0  # index into SHADES: the color as it is, darker, lighter
    style: Literal["line", "points", "both"] = "line"
    group: str = ""  # arm that the page's own legend shows or hides in all charts at once

    @property
    def color(self) -> str:
        """Return the color as #RRGGBB."""
        color, (level, part) = COLORS[self.number % len(COLORS)], SHADES[self.shade % len(SHADES)]
        parts = (int(color[start : start + 2], 16) for start in (1, 3, 5))
        return "#" + "".join(f"{round(one + (level - one) * part):02X}" for one in parts)

    @property
    def dash(self) -> str:
        """Return the name of the dash pattern, one of DASHES."""
        return DASHES[self.number // len(COLORS) % len(DASHES)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Guide:
    """Describes a dotted reference line, horizontal at `y` or vertical at `x`."""

    text: str
    x: float | None = None
    y: float | None = None
    is_broken: bool = False  # whether it is a limit and values of the chart are beyond it


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Describes lines and clouds of points on one pair of axes."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    note: str = ""  # one sentence: what the reader should look at
    log_x: bool = False
    log_y: bool = False
    y_range: tuple[float, float] | None = None
    x_names: tuple[str, ...] = ()  # labels of x = 0, 1, 2, ... on an axis of categories
    guides: tuple[Guide, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Holds cells of text under column heads."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    is_detail: bool = False  # whether the terminal shows it with --all only


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Holds the charts and tables of one part of a page in reading order."""

    title: str
    intro: str
    items: tuple[Chart | Table, ...]
    is_folded: bool = False  # whether the page shows only its title until the reader opens it


# Arms that most pages have, in the order of their colors, so that each has the same color in all of them.
_USUAL_ARMS = ("obrs", "none", "tis", "on_policy", "obrs_expected")


def arm_numbers(names: Iterable[str]) -> dict[str, int]:
    """Return `Series.number` of each arm; arms that are not usual get the free numbers in the order of their names."""
    given = sorted(set(names))
    numbers = {name: _USUAL_ARMS.index(name) for name in given if name in _USUAL_ARMS}
    free = (number for number in count() if number not in numbers.values())
    return numbers | dict(zip([name for name in given if name not in _USUAL_ARMS], free, strict=False))


def as_details(sections: Mapping[str, Section]) -> dict[str, Section]:
    """Return the sections with all tables marked as details."""
    return {
        name: replace(
            section,
            items=tuple(replace(item, is_detail=True) if isinstance(item, Table) else item for item in section.items),
        )
        for name, section in sections.items()
    }


DASHED = len(COLORS)  # added to a series' number: the same color, dashed
GRAY = len(COLORS) - 1  # number of the gray series


def finite(values: Sequence[float | None], smallest: float = -math.inf) -> tuple[float | None, ...]:
    """Replace by None, a gap in a chart, every value that is not finite or below `smallest`."""
    return tuple(
        value if value is not None and math.isfinite(value) and value >= smallest else None for value in values
    )
