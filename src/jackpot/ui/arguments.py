"""The arguments and options that several commands share."""

from typing import Annotated

import typer

from jackpot.config.recipe_names import recipe_names


def complete_recipe(incomplete: str) -> list[str]:
    """Return the names of recipes that begin with a text, for completion in the shell."""
    return [name for name in recipe_names() if name.startswith(incomplete)]


Recipe = Annotated[
    str,
    typer.Argument(
        help=f"Name of a recipe ({', '.join(recipe_names())}) or path of a .yaml file.",
        autocompletion=complete_recipe,
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings as key=value, for example sampling.temperature=0.6.")
]
Arm = Annotated[str | None, typer.Option(help="Arm of the recipe; default none of them.")]
ShowAll = Annotated[bool, typer.Option("--all", help="Print all tables, not only the main one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
