"""Reads recipes, which are YAML files of the package or of the user, and overrides from the command line.

Status of recipes for rows of the papers' tables: never run on its target (the papers' models), but with `--tiny`.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from jackpot.config.arms import build_config
from jackpot.config.build import merge, nest, validated
from jackpot.config.config import Config
from jackpot.config.published import PublishedRow, RecipeNotes
from jackpot.config.recipe_names import recipe_names
from jackpot.core.errors import ConfigError, repeated, unknown_name

_FILE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader is ten times as fast


def load_recipe(name: str) -> dict[str, Any]:
    """Read the package's recipe of this name, or the YAML file at this path.

    With `base: NAME` the recipe starts from the settings and GPUs of the recipe NAME, without the arms and published
    numbers of NAME. A relative path of a base starts from the folder that the command runs in.

    Raises:
        ConfigError: no such recipe or file, not a YAML mapping, or bases that lead in a circle.
    """
    (_, recipe), *bases = _chain(name)  # pairs of a file's path and its content
    # Lay each base, from the nearest on, under what was merged before: the settings of the nearer file win.
    for _, base in bases:
        recipe = merge({key: value for key, value in base.items() if key not in ("arms", "published")}, recipe)
    return {key: value for key, value in recipe.items() if key != "base"}


def recipe_files(name: str) -> list[Path]:
    """Return the file of a recipe, then the files of its bases. Raises the errors of `load_recipe`."""
    return [path for path, _ in _chain(name)]


def _chain(name: str) -> list[tuple[Path, dict[str, Any]]]:
    """Return (path, content) of a recipe's file, then of the file of its base, of the base of that, and so on.

    Raises:
        ConfigError: one of the files cannot be read, or the bases lead in a circle.
    """
    names, chain = [name], [_read(name)]
    while base := chain[-1][1].get("base"):  # the base that the last file names
        if base in names:
            raise ConfigError(f"recipe {name!r}: its bases lead in a circle, {' -> '.join([*names, base])}")

        names.append(base)
        try:
            chain.append(_read(str(base)))
        except ConfigError as error:
            raise ConfigError(f"{chain[-1][0]}: base: {error}") from error

    return chain


def _read(name: str) -> tuple[Path, dict[str, Any]]:
    """Read the file of a recipe; return its path and its content, a mapping of settings.

    Raises:
        ConfigError: no such recipe or file, or a file that is not a YAML mapping.
    """
    is_path = name.endswith((".yaml", ".yml"))
    path = Path(name) if is_path else Path(__file__).parent / f"{name}.yaml"

    if is_path and not path.is_file():
        named = f"; the package's recipe is called {path.stem}" if path.stem in recipe_names() else ""
        raise ConfigError(f"there is no file {name}{named}. jackpot recipes lists the recipes of the package")
    if not path.is_file():
        raise ConfigError(f"{unknown_name('recipe', name, recipe_names())}; or give the path of a .yaml file")

    try:
        recipe = yaml.load(path.read_text(), Loader=_FILE_LOADER)  # noqa: S506  it is a SafeLoader
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error

    if not isinstance(recipe, dict):
        content = "is empty" if recipe is None else f"holds {type(recipe).__name__}"
        raise ConfigError(f"{path} {content}; a recipe is a mapping of settings, such as `base: quickstart`")
    return path, recipe


def recipe_notes(name: str, recipe: Mapping[str, Any]) -> RecipeNotes:
    """Validate the parts of a loaded recipe that are neither settings nor arms: GPUs and published numbers.

    Args:
        name: name of the recipe, for errors.
        recipe: the recipe as `load_recipe` reads it.

    Raises:
        ConfigError: an unknown key, a wrong type or count of numbers, or a published row that has neither an arm nor a
            reason why the arm is missing, or both.
    """
    notes = validated(RecipeNotes, {key: recipe[key] for key in RecipeNotes.model_fields if key in recipe})
    arms = recipe.get("arms") or {}

    for row in _published_rows(notes):
        # A row that can be run needs its arm; one that cannot be run must have no arm.
        if (row.arm in arms) == bool(row.not_runnable):
            has = "has" if row.arm in arms else "has not"
            raise ConfigError(
                f"recipe {name!r}: published row {row.row!r} is of arm {row.arm!r}, which the recipe {has}; a row "
                f"needs either its arm or not_runnable, which says why there is none"
            )
    return notes


def check_runnable(name: str, recipe: Mapping[str, Any], arms: Sequence[str | None]) -> None:
    """Refuse arms that a paper published and that cannot be run yet.

    Raises:
        ConfigError: one of `arms` is such an arm; the message has the reason.
    """
    for row in _published_rows(recipe_notes(name, recipe)):
        if row.not_runnable and row.arm in arms:
            raise ConfigError(f"arm {row.arm!r} of recipe {name!r} is not yet runnable: {row.not_runnable}")


def _published_rows(notes: RecipeNotes) -> list[PublishedRow]:
    """Return the rows of all published tables that a recipe repeats."""
    return [row for table in notes.published for row in table.rows]


def resolve(name: str, arm: str | None, overrides: Sequence[str]) -> Config:
    """Build the settings of `jackpot train NAME --arm ARM key=value ...`.

    Raises:
        ConfigError: as `load_recipe`, `check_runnable`, `parse_override` and `build_config`.
    """
    recipe = load_recipe(name)
    check_runnable(name, recipe, [arm])
    return build_config(recipe, arm, [parse_override(text) for text in overrides])


def resolve_arms(
    name: str, arms: Sequence[str], seeds: Sequence[int], overrides: Sequence[str]
) -> dict[tuple[str, int], Config]:
    """Build the settings of every arm with every seed, by (arm, seed).

    Each run gets one CPU thread unless an override says otherwise.

    Args:
        name: name of the recipe, or the path of its file.
        arms: names of arms; empty: all arms of the recipe.
        seeds: seeds of every arm.
        overrides: settings of all runs as key=value.

    Raises:
        ConfigError: a recipe without arms, an arm that is named twice or does not exist, or an override of the seed.
    """
    recipe = load_recipe(name)
    known = list(recipe.get("arms") or {})
    if not known:
        raise ConfigError(f"recipe {name!r} has no arms; add some (arms: {{NAME: {{settings}}}}) to compare them")

    wanted = list(arms) or known
    check_runnable(name, recipe, wanted)
    if twice := repeated(wanted):
        raise ConfigError(f"arms {', '.join(sorted(twice))} were given twice; give each once")

    changes = [{"threads": 1}, *map(parse_override, overrides)]
    if any("seed" in change for change in changes):
        raise ConfigError("seed was given, but every arm is run with several; use --first-seed and --seeds")

    return {(arm, seed): build_config(recipe, arm, [*changes, {"seed": seed}]) for seed in seeds for arm in wanted}


def split_names(text: str) -> list[str]:
    """Split `a,b` or `a, b` into its names."""
    return [name.strip() for name in text.split(",") if name.strip()]


def parse_override(text: str) -> dict[str, Any]:
    """Turn `a.b=value` into a nested mapping. The value is read as YAML, so `3` becomes a number and `[1, 2]` a list.

    Raises:
        ConfigError: no `=`, an empty key, or a value that is not YAML.
    """
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"{text!r} is not an override; write key=value, for example batch.prompts=16")
    try:
        return nest(key, yaml.load(value, Loader=_Loader))  # noqa: S506  it is a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"{text!r}: the value is not YAML: {error}") from error


def parse_overrides(text: str) -> list[dict[str, Any]]:
    """Split `a=1,b=[2,3]` into overrides; a comma in brackets is part of a value. Raises as `parse_override` does."""
    overrides = re.split(r",(?![^\[]*\])", text)
    return [parse_override(override.strip()) for override in overrides if override.strip()]


class _Loader(yaml.SafeLoader):
    """A loader of YAML in which 1e-4 is a number; in YAML 1.1 only 1.0e-4 is, and 1e-4 is a string."""


# Replace the pattern by which YAML 1.1 recognizes numbers with a point or an exponent.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:float"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"),
    list("-+0123456789."),
)
