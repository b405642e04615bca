"""Implements `jackpot recipes`, which prints the recipes with their sources and published numbers."""

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console

from jackpot.config.recipe_names import recipe_names
from jackpot.ui.arguments import complete_recipe
from jackpot.ui.lazy import lazy
from jackpot.ui.terminal.output import print_line, show_next, show_table

with lazy():
    from jackpot.config import published
    from jackpot.config.recipes import listing

_FIRST = "quickstart"  # the recipe at the top of the list


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(help="Recipe to print in full; default a list of all.", autocompletion=complete_recipe),
    ] = None,
) -> None:
    """List the recipes. With NAME, print one recipe in full: the source of each setting, its arms, for each arm the
    paper's table and row that it repeats, and the published numbers.

    docs/reproducing.md says what the papers leave open, where they contradict themselves, and what we chose.

    Status of recipes for the papers' tables: never run on its target (the papers' models), but with --tiny.
    """
    if name:
        _show_one(Console(), listing.list_recipe(name))
    else:
        _show_list(Console(), [listing.list_recipe(known) for known in recipe_names()])


def _show_list(console: Console, recipes: Sequence["listing.RecipeListing"]) -> None:
    """Print a row for each recipe, those without published numbers first, and among these `_FIRST` at the top."""
    rows = [
        (recipe.name, f"{recipe.gpus.count} x {recipe.gpus.kind}" if recipe.gpus else "a CPU", recipe.description)
        for recipe in sorted(recipes, key=lambda recipe: (bool(recipe.published), recipe.name != _FIRST))
    ]
    show_table(console, "", ("recipe", "runs on", "what"), rows, box=SIMPLE_HEAD)
    show_next(
        console,
        {
            "jackpot recipes NAME": "one in full: settings with their sources, arms, published numbers",
            "jackpot train NAME --tiny": "try any of them on this machine",
            "jackpot train NAME --dry-run": "its plan: memory, GPUs, hours",
        },
    )


def _show_one(console: Console, recipe: "listing.RecipeListing") -> None:
    """Print a recipe: its files, in which each setting has its source, and the titles of its papers."""
    print_line(console, f"{recipe.name}: {recipe.description}")
    if recipe.gpus:
        print_line(console, f"meant for {recipe.gpus.count} x {recipe.gpus.kind}")
    print_line(console, f"arms: {', '.join(recipe.arms)}")

    for path in recipe.files:  # the first is the recipe's own, the others are those of its bases
        suffix = "" if path == recipe.files[0] else " (of a base the settings count, not the arms nor the numbers)"
        print_line(console, f"\n{path}{suffix}\n\n{path.read_text().strip()}", is_whole=True)

    print_line(console, "")
    for paper in dict.fromkeys(table.paper for table in recipe.published):
        print_line(console, f"{paper} is {published.PAPERS[paper]}")
