"""Recipes: YAML files that the package carries, or the user's own."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from jackpot.config.build import build_config, merge, nest
from jackpot.config.recipes.notes import check_runnable
from jackpot.config.run import Config
from jackpot.core.errors import ConfigError, unknown_name

_FILE_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's, if PyYAML has it, is ten times as fast


def recipe_names() -> list[str]:
    """The recipes inside the package."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.yaml"))


def load_recipe(name: str) -> dict[str, Any]:
    """The recipe of the package with this name, or the YAML file at this path.

    `base: NAME` takes the settings and the GPUs of another recipe, not its arms nor what was published of them, and
    lays this one's over them; a path in it is meant from where the command runs.

    Raises:
        ConfigError: no such recipe or file, not a YAML mapping, or bases that lead in a circle.
    """
    (_, recipe), *bases = _chain(name)
    for _, base in bases:
        recipe = merge({key: value for key, value in base.items() if key not in ("arms", "published")}, recipe)
    return {key: value for key, value in recipe.items() if key != "base"}


def recipe_files(name: str) -> list[Path]:
    """The file of a recipe and those of its bases, in this order; raises as `load_recipe`."""
    return [path for path, _ in _chain(name)]


def _chain(name: str) -> list[tuple[Path, dict[str, Any]]]:
    """The recipe and its bases, each as it stands in its file."""
    names, chain = [name], [_read(name)]
    while base := chain[-1][1].get("base"):
        if base in names:
            raise ConfigError(f"recipe {name!r}: its bases lead in a circle, {' -> '.join([*names, base])}")
        names.append(base)
        chain.append(_read(base))
    return chain


def _read(name: str) -> tuple[Path, dict[str, Any]]:
    path = Path(name) if name.endswith((".yaml", ".yml")) else Path(__file__).parent / f"{name}.yaml"
    if not path.is_file():
        raise ConfigError(f"{unknown_name('recipe', name, recipe_names())}; or give the path of a .yaml file")
    try:
        recipe = yaml.load(path.read_text(), Loader=_FILE_LOADER)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(recipe, dict):
        raise ConfigError(f"{path} holds {type(recipe).__name__}, a recipe is a mapping of settings")
    return path, recipe


def resolve(name: str, arm: str | None, overrides: Sequence[str]) -> Config:
    """The settings of `jackpot train NAME --arm ARM key=value ...`."""
    recipe = load_recipe(name)
    check_runnable(name, recipe, [arm])
    return build_config(recipe, arm, [parse_override(text) for text in overrides])


def resolve_arms(
    name: str, arms: Sequence[str], seeds: Sequence[int], overrides: Sequence[str]
) -> dict[tuple[str, int], Config]:
    """The settings of every arm with every seed, on one thread each unless an override says otherwise.

    Raises:
        ConfigError: a recipe without arms, no arm that was asked for, one named twice, or one that it does not have.
    """
    recipe = load_recipe(name)
    known = list(recipe.get("arms") or {})
    if not known:
        raise ConfigError(f"recipe {name!r} has no arms; write some (arms: {{NAME: {{settings}}}}) to compare them")
    wanted = list(arms) or known
    check_runnable(name, recipe, wanted)
    if twice := {arm for arm in wanted if wanted.count(arm) > 1}:
        raise ConfigError(f"arms {', '.join(sorted(twice))} were given twice; name each once")
    changes = [{"threads": 1}, *map(parse_override, overrides)]
    if any("seed" in change for change in changes):
        raise ConfigError("seed was given, but every arm is run with several; use --first-seed and --seeds")
    return {(arm, seed): build_config(recipe, arm, [*changes, {"seed": seed}]) for seed in seeds for arm in wanted}


def split_names(text: str) -> list[str]:
    """`a,b` or `a, b` as a list."""
    return [name.strip() for name in text.split(",") if name.strip()]


def parse_override(text: str) -> dict[str, Any]:
    """`a.b=value` as a nested mapping; the value is read as YAML, so `null`, `true`, `3` and `[1, 2]` mean what they
    say.

    Raises:
        ConfigError: no `=`, an empty key, or a value that is not YAML.
    """
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"{text!r} is not an override; write key=value, for example batch.prompts=16")
    try:
        return nest(key, yaml.load(value, Loader=_Loader))
    except yaml.YAMLError as error:
        raise ConfigError(f"{text!r}: the value is not YAML: {error}") from error


def parse_overrides(text: str) -> list[dict[str, Any]]:
    """`a=1,b=[2,3]` as overrides; a comma inside brackets is part of a value. Raises as `parse_override`."""
    parts = re.split(r",(?![^\[]*\])", text)
    return [parse_override(part.strip()) for part in parts if part.strip()]


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-4 is a number: YAML 1.1 wants 1.0e-4 and takes the former for a string."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:float"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?$|^[-+]?\.(inf|Inf|INF)$|^\.(nan|NaN|NAN)$"),
    list("-+0123456789."),
)
