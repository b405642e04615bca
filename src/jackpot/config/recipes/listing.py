"""Describes recipes for `jackpot recipes`: which arm is which row of which published table."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jackpot.config.published import GpusConfig, PublishedTable
from jackpot.config.recipes import load_recipe, recipe_files, recipe_names, recipe_notes


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeListing:
    """One recipe with its settings, arms and published numbers."""

    name: str
    description: str
    gpus: GpusConfig | None
    files: tuple[Path, ...]  # the recipe's own file, then those of its bases
    settings: dict[str, Any]  # settings outside the arms
    arms: dict[str, dict[str, Any]]  # settings that each arm changes, by its name
    published: tuple[PublishedTable, ...]

    def as_json(self) -> dict[str, Any]:
        """Return plain values for JSON, with the published numbers by the names of their columns."""
        return asdict(self) | {
            "gpus": self.gpus and self.gpus.model_dump(),
            "files": list(map(str, self.files)),
            "published": [
                {"paper": table.paper, "table": table.table}
                | row.model_dump(exclude={"numbers"})
                | {"numbers": numbers_by_column(table, row.numbers)}
                for table in self.published
                for row in table.rows
            ],
        }


def numbers_by_column(table: PublishedTable, numbers: tuple[float | None, ...]) -> dict[str, float]:
    """Return a row's numbers by column, without those that the paper leaves out."""
    named = zip(table.columns, numbers, strict=False)  # a curve has columns and no numbers
    return {column: number for column, number in named if number is not None}


def list_recipe(name: str) -> RecipeListing:
    """Describe the package's recipe of this name, or the YAML file at this path.

    Raises:
        ConfigError: as `load_recipe` and `recipe_notes`.
    """
    recipe = load_recipe(name)
    notes = recipe_notes(name, recipe)
    others = ("description", "arms", *type(notes).model_fields)
    return RecipeListing(
        name=name,
        description=recipe.get("description", ""),
        gpus=notes.gpus,
        files=tuple(recipe_files(name)),
        settings={key: value for key, value in recipe.items() if key not in others},
        arms={arm: changes or {} for arm, changes in (recipe.get("arms") or {}).items()},
        published=notes.published,
    )


def list_recipes() -> list[RecipeListing]:
    """Describe every recipe of the package: those of the papers first, then our own."""
    return sorted(map(list_recipe, recipe_names()), key=lambda recipe: (not recipe.published, recipe.name))
