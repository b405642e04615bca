"""What `jackpot recipes` tells: which arm of which recipe is which row of which table."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jackpot.config.published import GpusConfig, PublishedTable
from jackpot.config.recipes import load_recipe, recipe_files, recipe_names
from jackpot.config.recipes.notes import recipe_notes


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """One recipe."""

    name: str
    description: str
    gpus: GpusConfig | None
    files: tuple[Path, ...]  # its own, then those of its bases
    settings: dict[str, Any]  # without those of an arm
    arms: dict[str, dict[str, Any]]  # name and the settings that it changes
    published: tuple[PublishedTable, ...]

    def as_json(self) -> dict[str, Any]:
        """For a program: numbers by the name of their column, and only those that there are."""
        return asdict(self) | {
            "gpus": self.gpus and self.gpus.model_dump(),
            "files": list(map(str, self.files)),
            "published": [
                {"paper": table.paper, "table": table.table}
                | row.model_dump(exclude={"numbers"})
                | {"numbers": present(table, row.numbers)}
                for table in self.published
                for row in table.rows
            ],
        }


def present(table: PublishedTable, numbers: tuple[float | None, ...]) -> dict[str, float]:
    """A row's numbers by column, without those that the paper leaves out."""
    named = zip(table.columns, numbers, strict=False)  # a curve has columns and no numbers
    return {column: number for column, number in named if number is not None}


def listed(name: str) -> Listed:
    """The recipe of the package with this name, or the YAML file at this path.

    Raises:
        ConfigError: as `load_recipe` and `recipe_notes`.
    """
    recipe = load_recipe(name)
    notes = recipe_notes(name, recipe)
    beside = ("description", "arms", *type(notes).model_fields)
    return Listed(
        name=name,
        description=recipe.get("description", ""),
        gpus=notes.gpus,
        files=tuple(recipe_files(name)),
        settings={key: value for key, value in recipe.items() if key not in beside},
        arms={arm: changes or {} for arm, changes in (recipe.get("arms") or {}).items()},
        published=notes.published,
    )


def listed_all() -> list[Listed]:
    """Every recipe of the package: those of the papers first, then our own."""
    return sorted(map(listed, recipe_names()), key=lambda recipe: (not recipe.published, recipe.name))
