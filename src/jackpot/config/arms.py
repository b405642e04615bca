"""Builds the settings of a run from a recipe, one of its arms and the user's overrides."""

from collections.abc import Mapping, Sequence
from typing import Any

from jackpot.config.build import lay, merge, validated
from jackpot.config.config import Config
from jackpot.config.published import NOT_SETTINGS
from jackpot.core.errors import ConfigError, unknown_name


def build_config(recipe: Mapping[str, Any], arm: str | None = None, overrides: Sequence[dict[str, Any]] = ()) -> Config:
    """Lay an arm's settings over those of the recipe, and the user's overrides over both; validate the result.

    Args:
        recipe: a recipe as `load_recipe` reads it.
        arm: name of one of the recipe's arms; None: the recipe alone.
        overrides: nested mappings of settings; a later override wins over an earlier one.

    Raises:
        ConfigError: an unknown arm, an unknown key (with the likely key), a wrong type, or settings that do not fit
            together.
    """
    settings = {key: value for key, value in recipe.items() if key not in NOT_SETTINGS}

    # A recipe is a file of the user's: `arms` may be anything. An arm without changes may be null.
    arms = recipe.get("arms") or {}
    if not isinstance(arms, Mapping) or not all(isinstance(changes or {}, Mapping) for changes in arms.values()):
        raise ConfigError(f"arms: {arms!r} was given; arms is a mapping from a name to a mapping of settings")
    if arm is not None:
        if arm not in arms:
            raise ConfigError(unknown_name("arm", arm, arms))
        settings = merge(settings, arms[arm] or {})

    return validated(Config, lay(settings, overrides))
