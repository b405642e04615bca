"""What a recipe says beside its settings, checked: the GPUs it is meant for, and what was published."""

from collections.abc import Mapping, Sequence
from typing import Any

from jackpot.config.build import validated
from jackpot.config.published import PublishedRow, RecipeNotes
from jackpot.core.errors import ConfigError


def recipe_notes(name: str, recipe: Mapping[str, Any]) -> RecipeNotes:
    """The notes of a loaded recipe.

    Raises:
        ConfigError: a key, a type or a count of numbers that does not fit, or a row whose arm is neither there nor
            said to be missing.
    """
    notes = validated(RecipeNotes, {key: recipe[key] for key in RecipeNotes.model_fields if key in recipe})
    arms = recipe.get("arms") or {}
    for row in published_rows(notes):
        if (row.arm in arms) == bool(row.not_runnable):
            has = "has" if row.arm in arms else "has not"
            raise ConfigError(
                f"recipe {name!r}: published row {row.row!r} is of arm {row.arm!r}, which the recipe {has}; a row "
                f"needs either its arm or not_runnable, which says why there is none"
            )
    return notes


def check_runnable(name: str, recipe: Mapping[str, Any], arms: Sequence[str | None]) -> None:
    """Raises:
    ConfigError: an arm that was published and cannot be run yet, with the reason.
    """
    for row in published_rows(recipe_notes(name, recipe)):
        if row.not_runnable and row.arm in arms:
            raise ConfigError(f"arm {row.arm!r} of recipe {name!r} is not yet runnable: {row.not_runnable}")


def published_rows(notes: RecipeNotes) -> list[PublishedRow]:
    """All of them, table by table."""
    return [row for table in notes.published for row in table.rows]
