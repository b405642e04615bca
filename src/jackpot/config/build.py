"""Lays settings over each other and validates them, with errors that say what to do."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import pydantic
from pydantic import BaseModel

from jackpot.config.base import Differences, fields_below, model_classes
from jackpot.core.errors import ConfigError, unknown_name

Settings = TypeVar("Settings", bound=BaseModel)

# Names that other trainers have for a setting (docs/frameworks.md), for those who type them here.
ELSEWHERE = {
    "max_steps": "iterations",
    "total_training_steps": "iterations",
    "num_generations": "batch.group_size",
    "train_batch_size": "batch.prompts",
    "num_iterations": "batch.ppo_epochs",
    "ppo_max_token_len_per_gpu": "batch.micro_batch_tokens",
    "max_completion_length": "sampling.max_new_tokens",
    "max_response_length": "sampling.max_new_tokens",
    "max_prompt_length": "task.max_prompt_tokens",
    "model": "policy.path",
    "lr": "policy.optimizer.learning_rate",
    "epsilon": "objective.clip_low",
    "epsilon_high": "objective.clip_high",
    "beta": "objective.reference.kl_loss_coef",
    "eval_steps": "evaluation.every",
    "save_steps": "checkpoint.every",
}


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Lay `changes` over `base`, key by key and downwards. A change of `name` or `source` replaces its whole block.

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
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            kind = _kind(value)
            if kind is None or value[kind] == old.get(kind):
                value = merge(old, value)
        merged[key] = value
    return merged


def lay(settings: Mapping[str, Any], overrides: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Lay overrides over settings, one after the other; a choice of a block keeps what was set in it before.

    >>> lay({"a": "x"}, [{"a": {"k": 1}}, {"a": "y"}])
    {'a': {'name': 'y', 'k': 1}}
    """
    laid, before = dict(settings), []
    for key, value in (setting for override in overrides for setting in _settings(override)):
        laid = merge(laid, nest(key, value))
        for earlier, set_to in before:
            below = earlier[len(key) :]
            if below and earlier[: len(key)] == key and not _sets(value, below):
                laid = merge(laid, nest(earlier, set_to))
        before.append((key, value))
    return laid


def _settings(override: Any, key: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield what an override sets, one by one, with the parts of its key; a block that is chosen with all in it."""
    if not isinstance(override, Mapping) or not override or _kind(override):
        yield key, override
        return
    for name, value in override.items():
        yield from _settings(value, (*key, name))


def _sets(value: Any, key: Sequence[str]) -> bool:
    """Return whether a value decides what stands at a key in it: all but a name or a block that leaves the key out."""
    for part in key:
        if not isinstance(value, Mapping):
            return not isinstance(value, str)
        if part not in value:
            return False
        value = value[part]
    return True


def _kind(block: Mapping[str, Any]) -> str | None:
    """Return the key that chooses a block's class or source; a short form such as `correction: tis` gives only it."""
    return next((key for key in ("name", "source") if key in block), None)


def nest(key: str | Sequence[str], value: Any) -> dict[str, Any]:
    """Unfold a dotted key, or one in parts: `nest("a.b", 1)` is `{"a": {"b": 1}}`."""
    for part in reversed(key.split(".") if isinstance(key, str) else key):
        value = {part: value}
    return value


def flat(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Fold blocks into dotted keys: `flat({"a": {"b": 1}})` is `{"a.b": 1}`; an empty block stays a value."""
    folded: dict[str, Any] = {}
    for key, value in settings.items():
        is_block = isinstance(value, Mapping) and value
        folded |= flat(value, f"{above}{key}.") if is_block else {f"{above}{key}": value}
    return folded


def _with_inherited(kind: type[BaseModel], settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fill every block of `Differences` from the other block, unless it names its class or source."""
    marks = {key: mark for key, field in fields_below(kind) for mark in field.metadata if isinstance(mark, Differences)}
    for key, mark in marks.items():
        block, base = _at(settings, key), _at(settings, mark.key)
        if isinstance(block, Mapping) and _kind(block) is None and isinstance(base, str | Mapping):
            base = {"name": base} if isinstance(base, str) else base
            taken = {name: value for name, value in base.items() if name not in mark.own}
            settings = merge(settings, nest(key, merge(taken, block)))
    return settings


def _at(settings: Any, key: str) -> Any:
    """Return the value at a dotted key, or None where there is none."""
    for part in key.split("."):
        settings = settings.get(part) if isinstance(settings, Mapping) else None
    return settings


def validated(kind: type[Settings], settings: Mapping[str, Any]) -> Settings:
    """Validate settings as this class of them, after each block of `Differences` got what it leaves out.

    Raises:
        ConfigError: an unknown key (with the likely one), a wrong type, or numbers that do not fit.
    """
    settings = _with_inherited(kind, settings)
    try:
        return kind.model_validate(settings)
    except pydantic.ValidationError as error:
        raise ConfigError("\n".join(_explanations(error.errors(), settings, kind))) from None


def _explanations(
    errors: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], kind: type[BaseModel]
) -> Iterator[str]:
    """Yield a sentence for each key with errors; a value that is neither a number nor a name has two, and gets one."""
    by_key: dict[str, list[Mapping[str, Any]]] = {}
    for error in errors:
        by_key.setdefault(".".join(_location(error["loc"], settings)[0]), []).append(error)
    for those in by_key.values():
        those = [error for error in those if error["type"] == "value_error"] or those  # it knows which kind is meant
        names = [error["ctx"]["expected"] for error in those if error["type"] == "literal_error"]
        others = [error for error in those if error["type"] != "literal_error"]
        if names and others:
            yield from (f"{_explain(error, settings, kind)}, or {' or '.join(names)}" for error in others)
        else:
            yield from (_explain(error, settings, kind) for error in those)


def keys_of(kind: type[BaseModel]) -> list[str]:
    """Return the dotted key of every setting and block of settings below a class of them, each once."""
    return list(dict.fromkeys(key for key, _ in fields_below(kind)))


def similar_settings(key: str, known: Sequence[str]) -> list[str]:
    """Return the known keys with the last name of `key`, or that another trainer calls so: `lam` is OBRS's.

    Those of the policy and its objective stand first; of many only the first three are returned.
    """
    name = key.rpartition(".")[2]
    called = [ELSEWHERE[name]] if ELSEWHERE.get(name) in known else []
    same = [other for other in known if other.rpartition(".")[2] == name]
    same.sort(key=lambda other: (other != name, not other.startswith(("objective.", "policy.", "sampling."))))
    return list(dict.fromkeys([*called, *same]))[:3]


def _explain(error: Mapping[str, Any], settings: Mapping[str, Any], kind: type[BaseModel]) -> str:
    """Word one error of pydantic as a sentence that names the key, the value and what is allowed."""
    kind_of_error, loc, message = error["type"], error["loc"], error["msg"].removeprefix("Value error, ")
    is_missing = kind_of_error == "missing" and not isinstance(loc[-1], int)
    location, value = _location(loc[:-1] if is_missing else loc, settings)
    key = ".".join(location)

    match kind_of_error:
        case "extra_forbidden":
            if similar := [other for other in similar_settings(key, keys_of(kind)) if other != key]:
                return f"unknown setting {key!r}; did you mean {' or '.join(similar)}? jackpot config explains each"
            names = _valid_keys(location[:-1], settings, kind)
            return unknown_name("setting", key, [".".join([*location[:-1], name]) for name in names])
        case "missing" if is_missing:
            return f"{'.'.join([*location, loc[-1]])}: is missing; it has no default, so set it"
        case "union_tag_invalid" | "literal_error":
            given = error["ctx"].get("tag", value.get("name") if isinstance(value, Mapping) else value)
            allowed = re.findall(r"'([^']+)'", error["ctx"].get("expected_tags") or error["ctx"]["expected"])
            return f"{key}: {unknown_name('value', str(given), allowed)}"
        case "model_type":
            return _block_expected(key, value, _valid_keys(location, settings, kind))
        case "value_error":
            return f"{key}: {message}" if key else message
        case _:
            return f"{key}: {value!r} was given. {message}"


def _block_expected(key: str, value: Any, names: Sequence[str]) -> str:
    """Say how to set a block of settings for which one value was given."""
    any_setting = f"{key}.NAME=VALUE. Names: {', '.join(names)}"
    form = f"{key}.path={value}" if isinstance(value, str) and "path" in names else any_setting
    form = f"{key}=null where it should have none" if str(value).lower() == "none" else form
    return f"{key}: {value!r} was given, but {key} is a block of settings; write {form}"


def _location(loc: Sequence[str | int], settings: Mapping[str, Any]) -> tuple[list[str], Any]:
    """Return pydantic's location without the tags of unions between its keys, and the value that stands there."""
    path: list[str] = []
    here: Any = settings
    for index, part in enumerate(loc):
        items = dict[str | int, Any](enumerate(here)) if isinstance(here, list | tuple) else here
        if isinstance(items, Mapping) and part in items:
            here = items[part]
        elif index < len(loc) - 1 or not isinstance(here, Mapping) or here.get("name") == part:
            continue  # a union's tag
        elif not str(part).isidentifier():
            continue  # pydantic's name of a kind
        path.append(str(part))
    return path, here


def _valid_keys(path: Sequence[str], settings: Mapping[str, Any], kind: type[BaseModel]) -> list[str]:
    """Return the names of the settings in the block at `path`, of the class that the block's `name` chooses."""
    classes: list[type[BaseModel]] = [kind]
    here: Any = settings
    for part in path:
        is_list = isinstance(here, list | tuple)
        here = here[int(part)] if is_list else here.get(part) if isinstance(here, Mapping) else None
        fields = [cls.model_fields[part] for cls in classes if part in cls.model_fields]  # none for a place in a list
        classes = [cls for field in fields for cls in model_classes(field.annotation)] or classes
        name = here.get("name") if isinstance(here, Mapping) else here
        named = [cls for cls in classes if "name" in cls.model_fields and cls.model_fields["name"].default == name]
        classes = named or classes
    return sorted({name for cls in classes for name in cls.model_fields})
