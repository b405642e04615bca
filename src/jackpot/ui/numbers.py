"""Reads and formats numbers for tables and sentences."""

import math
from collections.abc import Mapping
from typing import Any

from jackpot.training.run_folder.folder import Measure, measure_of


def format_number(value: float | None, form: str = ".3g") -> str:
    """Format a number for a table; a missing number or NaN becomes `-`."""
    return "-" if value is None or math.isnan(value) else format(value, form)


def measured(value: float, measure: Measure) -> str:
    """Format an accuracy in percent, `41.8%`, or a mean reward, `0.4181`."""
    return f"{value:.1%}" if measure == "accuracy" else f"{value:.4g}"


def evaluated(line: Mapping[str, Any], role: str) -> str | None:
    """Format the accuracy or mean reward of a model in a line of metrics.jsonl; None if it was not evaluated there."""
    measure = measure_of(line)
    value = line.get(f"eval/{role}_{measure}")
    return None if measure is None or value is None else measured(value, measure)


def with_error(value: float, error: float | None, measure: Measure = "accuracy", sign: str = "") -> str:
    """Format an accuracy in percent, `41.8 ± 2.2`, or a mean reward, `0.4180 ± 0.022`; an unknown error is left out.

    Args:
        sign: `+` for a difference, which then has its sign.
    """
    if measure == "accuracy":
        return f"{100 * value:{sign}.1f}" + ("" if error is None else f" ± {100 * error:.1f}")
    # `#` keeps trailing zeros.
    return f"{value:{sign}#.4g}" + ("" if error is None else f" ± {error:#.2g}")


def iteration_seconds(line: Mapping[str, Any]) -> float:
    """Return how long an iteration took, seconds, as the sum of the phases in its line of metrics.jsonl."""
    # The time of prepass is a part of the time of train.
    phases = [name for name in line if name.startswith("seconds/") and name != "seconds/prepass"]
    return sum(line[name] or 0.0 for name in phases)


def amount(value: float | None) -> str:
    """Format a cost with three digits: 640, 12,800, 1.28e+09; a missing cost becomes `-`."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if 10 <= abs(value) < 1e6 else f"{value:.3g}"
