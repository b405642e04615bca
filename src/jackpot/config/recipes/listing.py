"""Descriptions of recipes for `jackpot recipes`: their arms, and which row of a published table each arm repeats."""

from dataclasses import dataclass
from pathlib import Path

from jackpot.config.published import GpusConfig, PublishedTable
from jackpot.config.recipes import load_recipe, recipe_files, recipe_notes


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeListing:
    """One recipe with its files, arms and published numbers."""

    name: str
    description: str
    gpus: GpusConfig | None
    files: tuple[Path, ...]  # the recipe's own file, then those of its bases
    arms: tuple[str, ...]  # names
    published: tuple[PublishedTable, ...]  # tables of papers whose rows the arms repeat


def list_recipe(name: str) -> RecipeListing:
    """Describe the package's recipe of this name, or the YAML file at this path.

    Raises:
        ConfigError: as `load_recipe` and `recipe_notes`.
    """
    recipe = load_recipe(name)
    notes = recipe_notes(name, recipe)
    return RecipeListing(
        name=name,
        description=recipe.get("description", ""),
        gpus=notes.gpus,
        files=tuple(recipe_files(name)),
        arms=tuple(recipe.get("arms") or ()),
        published=notes.published,
    )
