"""From a recipe, an arm and overrides to a validated `Config`, with errors that help. Pydantic only."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pydantic
from pydantic import BaseModel

from jackpot.config.published import NOT_SETTINGS
from jackpot.config.run import Config
from jackpot.core.errors import ConfigError, unknown_name

Settings = TypeVar("Settings", bound=BaseModel)


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` laid over `base`, key by key and downwards. A change of `name` or `source` replaces its whole block.

    >>> merge({"a": {"name": "x", "k": 1}, "b": {"c": 1}}, {"a": {"name": "y"}, "b": {"d": 2}})
    {'a': {'name': 'y'}, 'b': {'c': 1, 'd': 2}}
    """
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, str) and (kind := _kind(old)):
            value = {kind: value}
        elif isinstance(old, str) and isinstance(value, Mapping):
            old = {_kind(value) or "name": old}
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        kind = _kind(value) if both else None
        renamed = kind is not None and value[kind] != old.get(kind)
        merged[key] = merge(old, value) if both and not renamed else value
    return merged


def _kind(block: Mapping[str, Any]) -> str | None:
    """The key that says what a block is; a short form such as `correction: tis` or `train: gsm8k` is this alone."""
    return next((key for key in ("name", "source") if key in block), None)


def nest(key: str, value: Any) -> dict[str, Any]:
    """`nest("a.b", 1)` is `{"a": {"b": 1}}`."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def build_config(recipe: Mapping[str, Any], arm: str | None = None, overrides: Sequence[dict[str, Any]] = ()) -> Config:
    """The recipe with one arm's and the user's overrides, in this order of increasing strength.

    Raises:
        ConfigError: an unknown arm, an unknown key (with the likely one), a wrong type, or numbers that do not fit.
    """
    settings = {key: value for key, value in recipe.items() if key not in NOT_SETTINGS}
    arms = recipe.get("arms") or {}
    if not isinstance(arms, Mapping) or not all(isinstance(changes or {}, Mapping) for changes in arms.values()):
        raise ConfigError(f"arms: {arms!r} was given; arms is a mapping from a name to a mapping of settings")
    if arm is not None:
        if arm not in arms:
            raise ConfigError(unknown_name("arm", arm, arms))
        settings = merge(settings, arms[arm] or {})
    for override in overrides:
        settings = merge(settings, override)
    return validated(Config, settings)


def validated(kind: type[Settings], settings: Mapping[str, Any]) -> Settings:
    """Settings of this kind.

    Raises:
        ConfigError: an unknown key (with the likely one), a wrong type, or numbers that do not fit.
    """
    try:
        return kind.model_validate(settings)
    except pydantic.ValidationError as error:
        raise ConfigError("\n".join(_explain(one, settings, kind) for one in error.errors())) from None


def differences(old: Any, new: Any, key: str = "") -> Iterable[str]:
    """`key: old -> new` for every setting that differs between what a folder holds and what is asked now."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in sorted(old.keys() | new.keys()):
            yield from differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield f"{key}: {json.dumps(old)} in the folder, {json.dumps(new)} now"


def _explain(error: Mapping[str, Any], settings: Mapping[str, Any], kind: type[BaseModel]) -> str:
    """One pydantic error as a sentence that names the key, the value and what is allowed."""
    is_missing = error["type"] == "missing" and not isinstance(error["loc"][-1], int)
    location, value = _location(error["loc"][:-1] if is_missing else error["loc"], settings)
    key = ".".join(location)
    if error["type"] == "extra_forbidden":
        siblings = _valid_keys(location[:-1], settings, kind)
        return unknown_name("setting", key, [".".join([*location[:-1], name]) for name in siblings])
    if is_missing:
        return f"{'.'.join([*location, error['loc'][-1]])}: is missing; it has no default, so set it"
    if error["type"] in ("union_tag_invalid", "literal_error"):
        given, allowed = _choice(error, value)
        return f"{key}: {unknown_name('value', given, allowed)}"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{key}: {message}" if key else message
    return f"{key}: {value!r} was given. {message}"


def _choice(error: Mapping[str, Any], value: Any) -> tuple[str, list[str]]:
    """What was given and what may be, for an error about one of a fixed set of names."""
    context = error["ctx"]
    given = context.get("tag", value if not isinstance(value, Mapping) else value.get("name"))
    return str(given), re.findall(r"'([^']+)'", context.get("expected_tags") or context["expected"])


def _location(loc: Sequence[str | int], settings: Mapping[str, Any]) -> tuple[list[str], Any]:
    """Pydantic's location without the union tags it puts between keys, and the value that stands there."""
    path: list[str] = []
    here: Any = settings
    for index, part in enumerate(loc):
        keyed = isinstance(here, Mapping) and part in here
        indexed = isinstance(here, list | tuple) and isinstance(part, int) and part < len(here)
        if keyed or indexed:
            here = here[part]
        elif index < len(loc) - 1 or not isinstance(here, Mapping) or here.get("name") == part:
            continue  # a union's tag
        path.append(str(part))
    return path, here


def _valid_keys(path: Sequence[str], settings: Mapping[str, Any], kind: type[BaseModel]) -> list[str]:
    """The settings allowed in the block at `path`, with the class that the block's `name` chooses."""
    classes: list[type[BaseModel]] = [kind]
    here: Any = settings
    for part in path:
        here = here.get(part) if isinstance(here, Mapping) else None
        annotations = [cls.model_fields[part].annotation for cls in classes if part in cls.model_fields]
        classes = [cls for annotation in annotations for cls in _model_classes(annotation)]
        name = here.get("name") if isinstance(here, Mapping) else here
        named = [cls for cls in classes if "name" in cls.model_fields and cls.model_fields["name"].default == name]
        classes = named or classes
    return sorted({name for cls in classes for name in cls.model_fields})


def _model_classes(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    return [cls for part in getattr(annotation, "__args__", ()) for cls in _model_classes(part)]
