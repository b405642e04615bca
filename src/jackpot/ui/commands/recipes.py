"""Implements `jackpot recipes`, which prints the recipes and the published numbers."""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console

from jackpot.ui.arguments import AsJson, ShowAll, complete_recipe
from jackpot.ui.lazy import lazy
from jackpot.ui.terminal.output import print_line, show_next, show_table

with lazy():
    from jackpot.config import published
    from jackpot.config.recipes import listing

_INDENTED = (" ", "-", "#")
_MOST_COLUMNS = 6
_FIRST = "quickstart"  # of the list


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(help="Recipe to print in full; default a list of all.", autocompletion=complete_recipe),
    ] = None,
    show_all: ShowAll = False,
    as_json: AsJson = False,
) -> None:
    """List the recipes; with NAME or --all their arms, which row of which paper's table each is, and the published
    numbers.

    docs/reproducing.md says what the papers leave open, where they contradict themselves, and what we chose.

    Status of recipes for the papers' tables: never run on its target (the papers' models), but with --tiny.
    """
    if as_json:
        found = listing.list_recipe(name).as_json() if name else [recipe.as_json() for recipe in listing.list_recipes()]
        typer.echo(json.dumps(found, indent=2))
    elif name:
        _show_one(Console(), listing.list_recipe(name))
    else:
        _show_list(Console(), listing.list_recipes(), show_all)


def _show_list(console: Console, recipes: Sequence["listing.RecipeListing"], show_all: bool) -> None:
    """Print a row for each recipe, our own first; with `show_all` also their arms and published numbers."""
    if show_all:
        for recipe in recipes:
            print_line(console, f"{recipe.name}: {recipe.description}")
            print_line(console, f"arms: {', '.join(recipe.arms)}")
            _show_published(console, recipe)
    rows = [
        (recipe.name, f"{recipe.gpus.count} x {recipe.gpus.kind}" if recipe.gpus else "a CPU", recipe.description)
        for recipe in sorted(recipes, key=lambda recipe: (bool(recipe.published), recipe.name != _FIRST))
    ]
    show_table(console, "", ("recipe", "runs on", "what"), rows, box=SIMPLE_HEAD)
    commands = {
        "jackpot recipes NAME": "one in full: settings with their sources, arms, published numbers",
        "jackpot train NAME --tiny": "try any of them on this machine",
        "jackpot train NAME --dry-run": "its plan: memory, GPUs, hours",
    }
    show_next(console, commands if show_all else commands | {"jackpot recipes --all": "all published numbers"})


def _show_one(console: Console, recipe: "listing.RecipeListing") -> None:
    """Print the files of a recipe with the source of each setting, its arms, and its published tables."""
    print_line(console, f"{recipe.name}: {recipe.description}")
    if recipe.gpus:
        print_line(console, f"meant for {recipe.gpus.count} x {recipe.gpus.kind}")
    for path in recipe.files:  # arms of a base are not arms of this recipe
        blocks = ("published",) if path == recipe.files[0] else ("published", "arms")
        print_line(console, f"\n{path}\n\n{_without(blocks, path)}\n", is_whole=True)
    arms = ((arm, _one_line(changes)) for arm, changes in recipe.arms.items())
    show_table(console, "Arms", ("arm", "changes"), arms)
    for paper in dict.fromkeys(table.paper for table in recipe.published):
        print_line(console, f"{paper} is {published.PAPERS[paper]}")
    _show_published(console, recipe)


def _show_published(console: Console, recipe: "listing.RecipeListing") -> None:
    for table in recipe.published:
        show_table(console, f"{table.paper}, {table.table}", *_grid(table))
        if table.columns:
            for remark in dict.fromkeys(filter(None, map(_remark, table.rows))):
                arms = (row.arm for row in table.rows if _remark(row) == remark)
                print_line(console, f"{', '.join(arms)}: {remark}")
    of_rows = {row.arm for table in recipe.published for row in table.rows}
    if others := [arm for arm in recipe.arms if arm not in of_rows]:
        print_line(console, f"Not from a paper: {', '.join(others)}")
    print_line(console, "")


def _grid(table: "published.PublishedTable") -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Return heads and rows as in the paper; arms become columns if it has too many, and curves become text."""
    if not table.columns:
        return ("arm", "row", "what"), [(row.arm, row.row, _remark(row)) for row in table.rows]
    heads = ("arm", "row", *table.columns)
    rows = [(row.arm, row.row, *_cells(table, row)) for row in table.rows]
    if len(table.columns) <= _MOST_COLUMNS:
        return heads, rows
    heads, *rows = zip(heads, *rows, strict=True)
    return heads, rows


def _cells(table: "published.PublishedTable", row: "published.PublishedRow") -> list[str]:
    """Format the numbers of a row; a number that the paper leaves out becomes an empty cell."""
    return ["" if number is None else f"{number:g}" for number in row.numbers or [None] * len(table.columns)]


def _remark(row: "published.PublishedRow") -> str:
    return "; ".join(filter(None, (row.note, row.not_runnable and f"not yet runnable: {row.not_runnable}")))


def _one_line(changes: dict) -> str:
    import yaml  # which the other commands need only if they read a recipe

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
