"""Charts, tables and sections as data, which `html.py` writes into a page; there plotly draws the charts.

None stands for an unknown number: a line has a gap there.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

Numbers = Sequence[float | None]

# Okabe and Ito's colors without black and yellow: color-blind people can distinguish them, on white and on black.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#7F7F7F")
DASHES = ("solid", "dash", "dot")
# Shades of each color, for more series than there are colors: (gray level to mix in, 0 to 255, and its share).
SHADES = ((0, 0.0), (0, 0.45), (255, 0.5))


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line or cloud of points of a chart, with a band from `low` to `high` if both are known."""

    name: str  # entry in the legend; series of one name in several charts of a page share the entry
    x: Numbers
    y: Numbers
    low: Numbers | None = None
    high: Numbers | None = None
    color_index: int = 0  # index into COLORS, which repeat with the next dash; an arm keeps its index in all charts
    shade: int = 0  # index into SHADES: 0 leaves the color as it is, 1 makes it darker, 2 lighter
    style: Literal["line", "points", "both"] = "line"
    group: str = ""  # name of the arm, whose series the page's own legend shows or hides in all charts at once

    @property
    def color(self) -> str:
        """Return the color as #RRGGBB."""
        color = COLORS[self.color_index % len(COLORS)]
        gray_level, gray_share = SHADES[self.shade % len(SHADES)]

        channels = (int(color[start : start + 2], 16) for start in (1, 3, 5))
        return "#" + "".join(f"{round(channel + (gray_level - channel) * gray_share):02X}" for channel in channels)

    @property
    def dash(self) -> str:
        """Return the name of the dash pattern, one of DASHES."""
        return DASHES[self.color_index // len(COLORS) % len(DASHES)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Guide:
    """A dotted reference line, horizontal at `y` or vertical at `x`."""

    text: str
    x: float | None = None
    y: float | None = None
    is_broken: bool = False  # whether it is a limit and values of the chart are beyond it


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """Lines and clouds of points on one pair of axes."""

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
    """A table of text cells under column heads."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    is_detail: bool = False  # whether the terminal shows it with --all only


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """The charts and tables of one part of a page, in reading order."""

    title: str
    intro: str
    items: tuple[Chart | Table, ...]
    is_folded: bool = False  # whether the page shows only its title until the reader opens it


# Arms that most pages have, in the order of their colors, so that each has the same color on every page.
_USUAL_ARMS = ("obrs", "none", "tis", "on_policy", "obrs_expected")


def arm_color_indices(names: Iterable[str]) -> dict[str, int]:
    """Return the `Series.color_index` of each arm: `_USUAL_ARMS` keep theirs on every page, others get a free one."""
    arms = set(names)
    usual = {name: index for index, name in enumerate(_USUAL_ARMS) if name in arms}
    unusual = sorted(arms - usual.keys())
    free = (index for index in count() if index not in usual.values())
    return usual | dict(zip(unusual, free, strict=False))


DASHED = len(COLORS)  # added to a color index, it gives the same color with a dashed line
GRAY = len(COLORS) - 1  # color index of a gray series


def finite(values: Sequence[float | None], smallest: float = -math.inf) -> tuple[float | None, ...]:
    """Replace by None, a gap in a chart, every value that is below `smallest` or not finite."""
    return tuple(
        value if value is not None and math.isfinite(value) and value >= smallest else None for value in values
    )
