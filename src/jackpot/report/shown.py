"""How results become what charts and tables take. Layer 6, pure."""

import math
from collections.abc import Sequence

from jackpot.report.charts import COLOURS

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
