"""Merges the nested settings of a recipe, an arm and overrides, and validates the result.

Every error names the key, the value, what is allowed and, for a mistyped key, the likely one.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import pydantic
from pydantic import BaseModel

from jackpot.config.base import Differences, fields_below, model_classes
from jackpot.core.errors import ConfigError, unknown_name

Settings = TypeVar("Settings", bound=BaseModel)

# Names that other trainers have for our settings (docs/frameworks.md), for users who type those here.
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
    """Lay `changes` over `base`, block by block. A block with another `name` or `source` replaces the whole old block.

    >>> merge({"a": {"name": "x", "k": 1}, "b": {"c": 1}}, {"a": {"name": "y"}, "b": {"d": 2}})
    {'a': {'name': 'y'}, 'b': {'c': 1, 'd': 2}}
    """
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)

        # Expand a short form such as `correction: tis` to a block if the value that it meets is a block.
        if isinstance(old, Mapping) and isinstance(value, str) and (class_key := _class_key(old)):
            value = {class_key: value}
        elif isinstance(old, str) and isinstance(value, Mapping):
            old = {_class_key(value) or "name": old}

        # Keep the settings of the old block only if the new block is of the same class.
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            class_key = _class_key(value)
            if class_key is None or value[class_key] == old.get(class_key):
                value = merge(old, value)

        merged[key] = value
    return merged


def lay(settings: Mapping[str, Any], overrides: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Lay overrides over settings in turn.

    An override that gives a block another `name` or `source` keeps what earlier overrides set inside the block.

    >>> lay({"a": "x"}, [{"a": {"k": 1}}, {"a": "y"}])
    {'a': {'name': 'y', 'k': 1}}
    """
    merged = dict(settings)
    earlier: list[tuple[tuple[str, ...], Any]] = []  # (parts of the key, value) of all overrides laid so far
    for key, value in chain.from_iterable(map(_single_settings, overrides)):
        merged = merge(merged, nest(key, value))

        # The merge may have replaced a block, and lost what earlier overrides set in it: set that again.
        for earlier_key, earlier_value in earlier:
            below = earlier_key[len(key) :]  # the earlier setting's key inside the new value
            if below and earlier_key[: len(key)] == key and not _decides(value, below):
                merged = merge(merged, nest(earlier_key, earlier_value))

        earlier.append((key, value))
    return merged


def _single_settings(override: Any, key: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (parts of the key, value) of every setting in an override; a block with a name or source stays whole."""
    if isinstance(override, Mapping) and override and not _class_key(override):
        for name, value in override.items():
            yield from _single_settings(value, (*key, name))
    else:
        yield key, override


def _decides(value: Any, key: Sequence[str]) -> bool:
    """Return whether an override's value for a block also decides the setting `key` inside that block.

    A block decides the settings that it contains. A text, which only names the kind of a block, decides none; any other
    value, such as null, leaves no block and so decides all.

    Args:
        key: parts of the setting's key, relative to the block.
    """
    for name in key:
        if not isinstance(value, Mapping):
            return not isinstance(value, str)
        if name not in value:
            return False
        value = value[name]
    return True


def _class_key(block: Mapping[str, Any]) -> str | None:
    """Return the key, `name` or `source`, whose value chooses a block's class; None where the block has neither."""
    return next((key for key in ("name", "source") if key in block), None)


def nest(key: str | Sequence[str], value: Any) -> dict[str, Any]:
    """Nest a value below a dotted key, or below a key in parts: `nest("a.b", 1)` is `{"a": {"b": 1}}`."""
    for name in reversed(key.split(".") if isinstance(key, str) else key):
        value = {name: value}
    return value


def flat(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Flatten nested blocks to dotted keys: `flat({"a": {"b": 1}})` is `{"a.b": 1}`; an empty block stays a value."""
    flattened: dict[str, Any] = {}
    for key, value in settings.items():
        is_block = isinstance(value, Mapping) and value
        flattened |= flat(value, f"{above}{key}.") if is_block else {f"{above}{key}": value}
    return flattened


def _with_inherited(kind: type[BaseModel], settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fill each block marked `Differences` with the settings that it lacks, from the block that the mark names.

    A block that has a `name` or a `source` is complete, and stays as it is.
    """
    marks = {key: mark for key, field in fields_below(kind) for mark in field.metadata if isinstance(mark, Differences)}
    for key, mark in marks.items():
        block, base = _value_at(settings, key), _value_at(settings, mark.key)

        if isinstance(block, Mapping) and _class_key(block) is None and isinstance(base, str | Mapping):
            base = {"name": base} if isinstance(base, str) else base  # expand a short form such as `engine: vllm`
            # Inherit all settings of the other block but those that the mark excludes; the block's own settings win.
            inherited = {name: value for name, value in base.items() if name not in mark.excluded}
            settings = merge(settings, nest(key, merge(inherited, block)))
    return settings


def _value_at(settings: Any, key: str) -> Any:
    """Return the value at a dotted key; None where the settings have no such key."""
    for name in key.split("."):
        settings = settings.get(name) if isinstance(settings, Mapping) else None
    return settings


def validated(kind: type[Settings], settings: Mapping[str, Any]) -> Settings:
    """Make an instance of a class of settings from a nested mapping; blocks marked `Differences` are filled first.

    Args:
        kind: the class of settings.
        settings: the nested mapping.

    Raises:
        ConfigError: an unknown key (with the likely key), a wrong type, or settings that do not fit together.
    """
    settings = _with_inherited(kind, settings)
    try:
        return kind.model_validate(settings)
    except pydantic.ValidationError as error:
        raise ConfigError("\n".join(_explanations(error.errors(), settings, kind))) from None


def _explanations(
    errors: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], kind: type[BaseModel]
) -> Iterator[str]:
    """Yield the sentences about all errors, key by key.

    A setting that may be a number or a name has two errors of pydantic for one wrong value; they become one sentence.
    """
    by_key: dict[str, list[Mapping[str, Any]]] = {}
    for error in errors:
        key_parts, _ = _location(error["loc"], settings)
        by_key.setdefault(".".join(key_parts), []).append(error)

    for all_of_key in by_key.values():
        # Our own errors (value_error) are of the class that a union chose; pydantic's are of every class it tried.
        of_key = [error for error in all_of_key if error["type"] == "value_error"] or all_of_key

        # An error about names that are allowed becomes the ending of the sentences about other errors, if any.
        allowed_names = [error["ctx"]["expected"] for error in of_key if error["type"] == "literal_error"]
        others = [error for error in of_key if error["type"] != "literal_error"]
        ending = f", or {' or '.join(allowed_names)}" if allowed_names and others else ""
        yield from (_explain(error, settings, kind) + ending for error in others or of_key)


def keys_of(kind: type[BaseModel]) -> list[str]:
    """Return the dotted key of every setting and block below a class of settings, each key once."""
    return list(dict.fromkeys(key for key, _ in fields_below(kind)))


def similar_settings(key: str, known: Sequence[str]) -> list[str]:
    """Return up to three known keys that a mistyped `key` may mean.

    First comes the setting that other trainers call by this name. Then come settings whose last part is the same, such
    as `objective.correction.lam` and `critic.lam` for `lam`: one outside of all blocks, those in the blocks that are
    usually meant, and the rest.
    """
    name = key.rpartition(".")[2]
    translated = [ELSEWHERE[name]] if ELSEWHERE.get(name) in known else []
    same_name = [known_key for known_key in known if known_key.rpartition(".")[2] == name]

    # A setting outside of all blocks comes first, then those in the usual blocks: False sorts before True.
    usual_blocks = ("objective.", "policy.", "sampling.")
    same_name.sort(key=lambda known_key: (known_key != name, not known_key.startswith(usual_blocks)))
    return list(dict.fromkeys([*translated, *same_name]))[:3]


def _explain(error: Mapping[str, Any], settings: Mapping[str, Any], kind: type[BaseModel]) -> str:
    """Turn one error of pydantic into a sentence that names the key, the value and what is allowed."""
    loc = error["loc"]
    # The location of a missing setting ends in that setting's name; `key` and `value` are those of its block.
    is_missing = error["type"] == "missing" and not isinstance(loc[-1], int)
    location, value = _location(loc[:-1] if is_missing else loc, settings)
    key = ".".join(location)
    message = error["msg"].removeprefix("Value error, ")

    match error["type"]:
        case "extra_forbidden":  # a key that the block does not have; another class of the block may have it
            keys = keys_of(kind)
            names = [".".join([*location[:-1], name]) for name in _valid_keys(location[:-1], settings, kind)]
            if key in keys:  # another class of the same block has this setting
                return (
                    f"unknown setting {key!r} of this choice; jackpot config {key} says which have it. Valid: "
                    f"{', '.join(names)}"
                )
            if similar := similar_settings(key, keys):
                return f"unknown setting {key!r}; did you mean {' or '.join(similar)}? jackpot config explains each"
            return unknown_name("setting", key, names)
        case "missing" if is_missing:
            return f"{'.'.join([*location, loc[-1]])}: is missing; it has no default, so set it"
        case "union_tag_invalid" | "literal_error":  # a name that does not exist
            name = error["ctx"].get("tag", value.get("name") if isinstance(value, Mapping) else value)
            allowed = re.findall(r"'([^']+)'", error["ctx"].get("expected_tags") or error["ctx"]["expected"])
            return f"{key}: {unknown_name('value', str(name), allowed)}"
        case "model_type":  # a single value was given in place of a block
            return _block_expected(key, value, _valid_keys(location, settings, kind))
        case "value_error":  # our own error, whose message says everything
            return f"{key}: {message}" if key else message
        case _:
            return f"{key}: {value!r} was given. {message}"


def _block_expected(key: str, value: Any, names: Sequence[str]) -> str:
    """Say how to set a block of settings for which one value was given."""
    form = f"{key}.NAME=VALUE. Names: {', '.join(names)}"
    if str(value).lower() == "none":
        form = f"{key}=null where it should have none"
    elif isinstance(value, str) and "path" in names:
        form = f"{key}.path={value}"
    return f"{key}: {value!r} was given, but {key} is a block of settings; write {form}"


def _location(loc: Sequence[str | int], settings: Mapping[str, Any]) -> tuple[list[str], Any]:
    """Return the parts of the key at which pydantic found an error, and the value there.

    Pydantic's location `loc` also has parts that are no keys: the name by which a union chose a class, and the kind of
    type that was tried.
    """
    path: list[str] = []
    value: Any = settings
    # Step down into the settings by those names in `loc` that are keys there. Other names are pydantic's own and are
    # left out, unless the last one looks like the name of a setting, which then is missing or unknown.
    for index, name in enumerate(loc):
        members = dict[str | int, Any](enumerate(value)) if isinstance(value, list | tuple) else value
        if isinstance(members, Mapping) and name in members:
            value = members[name]  # a key of the settings, or an index of a list
        elif index < len(loc) - 1 or not isinstance(value, Mapping) or value.get("name") == name:
            continue  # pydantic's name of the class that a union chose, or a name below a value that is no block
        elif not str(name).isidentifier():
            continue  # pydantic's name of a type that was tried
        path.append(str(name))  # a key, or the last name, of a setting that is missing or unknown
    return path, value


def _valid_keys(path: Sequence[str], settings: Mapping[str, Any], kind: type[BaseModel]) -> list[str]:
    """Return the names of the settings that the block at `path` may have, by the class that its `name` chooses."""
    classes: list[type[BaseModel]] = [kind]
    value: Any = settings
    for key in path:
        # Step down to the value at this part of the path; None below anything but a list or a block.
        if isinstance(value, list | tuple):
            value = value[int(key)]
        else:
            value = value.get(key) if isinstance(value, Mapping) else None

        fields = [cls.model_fields[key] for cls in classes if key in cls.model_fields]  # empty for an index of a list
        classes = [cls for field in fields for cls in model_classes(field.annotation)] or classes

        # Of the classes of a union, keep the one that the value names, if a class has this name.
        name = value.get("name") if isinstance(value, Mapping) else value
        named = [cls for cls in classes if "name" in cls.model_fields and cls.model_fields["name"].default == name]
        classes = named or classes

    return sorted({name for cls in classes for name in cls.model_fields})
