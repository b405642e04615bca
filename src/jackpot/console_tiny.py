"""What `jackpot train --tiny` says before it begins. Layer 7."""

from rich.console import Console
from rich.table import Table

from jackpot.launch.tiny import Tiny


def show_tiny(console: Console, tiny: Tiny) -> None:
    """Every setting that is not the recipe's, and where the problems are from."""
    console.print(
        "--tiny: small models with random weights and few problems, to see that every part of the recipe runs here. "
        "Its numbers mean nothing. It changes",
        soft_wrap=True,
    )
    table = Table()
    for column in ("setting", "recipe", "here"):
        table.add_column(column, overflow="fold")
    for key, recipe, here in tiny.changes:
        table.add_row(key, _text(recipe), _text(here))
    console.print(table, markup=False)
    for line in tiny.data:
        console.print(line, soft_wrap=True, markup=False)


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return "null" if value is None else str(value)
