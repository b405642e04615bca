"""`jackpot recipes`: the recipes and what was published of them."""

import json

import typer
from rich.console import Console

from jackpot.config.recipes.listing import listed, listed_all
from jackpot.ui.terminal.recipes import show_recipe, show_recipes


def recipes(name: str | None, as_json: bool) -> None:
    """Print one recipe in full, or a list of all, as tables or JSON."""
    if as_json:
        found = listed(name).as_json() if name else [recipe.as_json() for recipe in listed_all()]
        typer.echo(json.dumps(found, indent=2))
    elif name:
        show_recipe(Console(), listed(name))
    else:
        show_recipes(Console(), listed_all())
