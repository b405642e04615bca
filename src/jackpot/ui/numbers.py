"""Formats numbers for tables and sentences."""

import math

from jackpot.training.run_folder.folder import Measure


def format_number(value: float | None, form: str = ".3g") -> str:
    """Format a number for a table; a missing number or NaN becomes `-`."""
    return "-" if value is None or math.isnan(value) else format(value, form)


def measured(value: float, measure: Measure) -> str:
    """Format an accuracy in percent, `41.8%`, or a mean reward, `0.4181`."""
    return f"{value:.1%}" if measure == "accuracy" else f"{value:.4g}"


def with_error(value: float, error: float | None, measure: Measure = "accuracy", sign: str = "") -> str:
    """Format an accuracy in percent, `41.8 ± 2.2`, or a mean reward, `0.4180 ± 0.022`; an unknown error is left out.

    Args:
        sign: `+` for a difference, which then has its sign.
    """
    if measure == "accuracy":
        return f"{100 * value:{sign}.1f}" + ("" if error is None else f" ± {100 * error:.1f}")
    return f"{value:{sign}#.4g}" + ("" if error is None else f" ± {error:#.2g}")


def amount(number: float | None) -> str:
    """Format a cost with three digits: 640, 12,800, 1.28e+09; `-` for none."""
    if number is None:
        return "-"
    return f"{number:,.0f}" if 10 <= abs(number) < 1e6 else f"{number:.3g}"
