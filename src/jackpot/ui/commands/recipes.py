"""Implements `jackpot recipes`, which prints the recipes and the published numbers."""

import json
from collections.abc import Collection, Sequence
from pathlib import Path

import typer
import yaml
from rich.console import Console

from jackpot.config.published import PAPERS, PublishedRow, PublishedTable
from jackpot.config.recipes.listing import RecipeListing, list_recipe, list_recipes
from jackpot.ui.terminal.progress import print_line
from jackpot.ui.terminal.tables import show_table

_INDENTED = (" ", "-", "#")
_MOST_COLUMNS = 6


def recipes(name: str | None, as_json: bool) -> None:
    """Print one recipe in full, or a list of all, as tables or JSON."""
    if as_json:
        found = list_recipe(name).as_json() if name else [recipe.as_json() for recipe in list_recipes()]
        typer.echo(json.dumps(found, indent=2))
    elif name:
        _show_one(Console(), list_recipe(name))
    else:
        _show_all(Console(), list_recipes())


def _show_all(console: Console, recipes: Sequence[RecipeListing]) -> None:
    """Print the published numbers of each recipe of a paper, and a table of the other recipes."""
    for recipe in recipes:
        if recipe.published:
            print_line(console, f"{recipe.name}: {recipe.description}")
            _show_published(console, recipe)
    rows = ((recipe.name, recipe.description, ", ".join(recipe.arms)) for recipe in recipes if not recipe.published)
    show_table(console, "Recipes of our own", ("recipe", "what", "arms"), rows)
    print_line(console, "jackpot recipes NAME prints one in full, with the source of each setting.")


def _show_one(console: Console, recipe: RecipeListing) -> None:
    """Print the files of a recipe with the source of each setting, its arms, and its published tables."""
    print_line(console, f"{recipe.name}: {recipe.description}")
    if recipe.gpus:
        print_line(console, f"meant for {recipe.gpus.count} x {recipe.gpus.kind}")
    for path in recipe.files:  # arms of a base are not arms of this recipe
        blocks = ("published",) if path == recipe.files[0] else ("published", "arms")
        print_line(console, f"\n{path}\n\n{_without(blocks, path)}\n")
    arms = ((arm, _one_line(changes)) for arm, changes in recipe.arms.items())
    show_table(console, "Arms", ("arm", "changes"), arms)
    for paper in dict.fromkeys(table.paper for table in recipe.published):
        print_line(console, f"{paper} is {PAPERS[paper]}")
    _show_published(console, recipe)


def _show_published(console: Console, recipe: RecipeListing) -> None:
    for table in recipe.published:
        show_table(console, f"{table.paper}, {table.table}", *_grid(table))
        if table.columns:
            for remark in dict.fromkeys(filter(None, map(_remark, table.rows))):
                arms = (row.arm for row in table.rows if _remark(row) == remark)
                print_line(console, f"{', '.join(arms)}: {remark}")
    of_rows = {row.arm for table in recipe.published for row in table.rows}
    if others := [arm for arm in recipe.arms if arm not in of_rows]:
        print_line(console, f"Of no row: {', '.join(others)}")
    print_line(console, "")


def _grid(table: PublishedTable) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Return heads and rows as in the paper; arms become columns if it has too many, and curves become text."""
    if not table.columns:
        return ("arm", "row", "what"), [(row.arm, row.row, _remark(row)) for row in table.rows]
    heads = ("arm", "row", *table.columns)
    rows = [(row.arm, row.row, *_cells(table, row)) for row in table.rows]
    if len(table.columns) <= _MOST_COLUMNS:
        return heads, rows
    heads, *rows = zip(heads, *rows, strict=True)
    return heads, rows


def _cells(table: PublishedTable, row: PublishedRow) -> list[str]:
    """Format the numbers of a row; a number that the paper leaves out becomes an empty cell."""
    return ["" if number is None else f"{number:g}" for number in row.numbers or [None] * len(table.columns)]


def _remark(row: PublishedRow) -> str:
    return "; ".join(filter(None, (row.note, row.not_runnable and f"not yet runnable: {row.not_runnable}")))


def _one_line(changes: dict) -> str:
    return yaml.safe_dump(changes, default_flow_style=True, sort_keys=False, width=10_000).strip()


def _without(blocks: Collection[str], path: Path) -> str:
    """Return a file's text without these top-level keys and everything below them."""
    lines, inside = [], False
    for line in path.read_text().splitlines():
        if line and not line.startswith(_INDENTED):
            inside = line.partition(":")[0] in blocks
        if not inside:
            lines.append(line)
    return "\n".join(lines).strip()
