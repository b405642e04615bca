"""Reads a reference of all settings from their classes: the values, default, meaning and commands of each key.

`jackpot config` prints the reference, and `tools/reference_pages.py` writes docs/settings.md from it.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from inspect import get_annotations
from itertools import chain
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from jackpot.config.base import MAY_CHANGE, NULL_IS_INFINITE, Differences, model_classes
from jackpot.config.build import similar_settings
from jackpot.config.config import Config
from jackpot.config.tools import BenchmarksConfig, MismatchConfig
from jackpot.core.errors import ConfigError

COMMANDS: dict[str, type[BaseModel]] = {"train": Config, "eval": BenchmarksConfig, "mismatch": MismatchConfig}
CONTINUED = ("train", "eval")  # commands that continue a run or an evaluation that they find in their folder
_BLOCK = "a block"  # text that stands for "any block" among the allowed values of a field
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_KINDS = {int: "integer", float: "number", str: "string", type(None): "null"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """A key as one class of settings defines it, for one command. Several classes, such as those of the engines, may
    define the same key."""

    key: str
    command: str  # train, eval or mismatch
    variant: str = ""  # name of the class, such as vllm, where a block can be of several; empty: no choice
    chosen: str = ""  # key of the block that can be of several classes, such as engine; empty: none
    choices: int = 0  # number of names that the block `chosen` can have
    origin: tuple[str, str]  # the class that defines the setting, and the setting's name there
    same_as: str = ""  # the block that the key states differences from (`Differences`); empty: none
    values: str  # type and allowed values
    default: str  # default as YAML; "required" where there is none
    meaning: str  # docstring of the setting
    may_change: bool  # whether a run or an evaluation that continues may have another value


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A key of the settings with its uses in all classes that have the key."""

    key: str
    uses: tuple[Use, ...]

    def summary(self, of: str) -> str:
        """Return one text on the values, default or meaning of the key, which may differ between classes that have it.

        The text that more than half of these classes share stands first. Each other text is given with the names of the
        variants, such as vllm, or of the commands, such as jackpot eval, that it belongs to.

        Args:
            of: name of the field: values, default or meaning.
        """
        names_by_text: dict[str, list[str]] = {}  # names of the variants or commands that each text belongs to
        for use in self.uses:
            names_by_text.setdefault(getattr(use, of), []).append(use.variant or f"jackpot {use.command}")

        # `usual` has the text of more than half of the uses, if there is one; `rest` the other texts with their names.
        usual = [text for text, names in names_by_text.items() if 2 * len(names) > len(self.uses)]
        rest = {text: ", ".join(dict.fromkeys(names)) for text, names in names_by_text.items() if text not in usual}

        if of == "meaning":
            return " ".join([*usual, *(f"{names}: {text}" for text, names in rest.items())])
        return "; ".join([*usual, *(f"{text} ({names})" for text, names in rest.items())])

    @property
    def resume(self) -> str:
        """Say whether the setting may change when a run or evaluation continues; empty if only `mismatch` has it."""
        continued = [use.may_change for use in self.uses if use.command in CONTINUED]
        return ("may change" if any(continued) else "must stay the same") if continued else ""

    @property
    def users(self) -> str:
        """Say which commands use the setting, and with which choices, such as `engine=vllm`, if not with all."""
        commands = ", ".join(f"jackpot {name}" for name in dict.fromkeys(use.command for use in self.uses))
        return f"{commands}, with {self.variants}" if self.variants else commands

    @property
    def variants(self) -> str:
        """Name the choices that the setting belongs to, such as `engine=vllm`; empty where all choices have it."""
        names = list(dict.fromkeys(use.variant for use in self.uses if use.variant))
        return f"{self.uses[0].chosen}={_either(names)}" if len(names) < self.uses[0].choices else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A key with settings below it."""

    key: str
    command: str  # train, eval or mismatch
    default: str  # null, required, the name of the default choice, or empty
    meaning: str  # docstring of the field, or of the class for a whole command
    variants: tuple[tuple[str, str], ...]  # (allowed name, what it chooses); empty where there is no choice


def blocks(command: str) -> dict[str, Block]:
    """Return the blocks of a command's settings by key; the first, whose key is empty, stands for all settings."""
    whole = Block(key="", command=command, default="", meaning=_paragraph(COMMANDS[command]), variants=())
    walked = _walk(COMMANDS[command], "", command=command)
    return {block.key: block for block in [whole, *walked] if isinstance(block, Block)}


def settings(*commands: str) -> dict[str, Setting]:
    """Return every setting of some commands by the setting's key, in the order in which classes define them."""
    uses: dict[str, list[Use]] = {}
    for command in commands:
        for item in _walk(COMMANDS[command], "", command=command):
            if isinstance(item, Use):
                uses.setdefault(item.key, []).append(item)
    return {key: Setting(key=key, uses=tuple(of_key)) for key, of_key in uses.items()}


def own_settings(command: str) -> tuple[list[Setting], list[str]]:
    """Return the settings that a command has and `jackpot train` lacks, and shortened keys of those that both have.

    Two settings count as the same where one class defines both, whatever their keys and defaults.

    Returns:
        The command's own settings; of those that both commands have, only the first part of each key, such as `engine`.
    """
    # The origin of a use is a pair: the class that defines the setting, and the setting's name in that class.
    known = {use.origin for setting in settings("train").values() for use in setting.uses}
    of_command = list(settings(command).values())
    new = [setting for setting in of_command if any(use.origin not in known for use in setting.uses)]
    shared = [re.split(r"[.\[]", setting.key)[0] for setting in of_command if setting not in new]
    return new, list(dict.fromkeys(shared))


def find(key: str) -> tuple[list[Block], list[Setting]]:
    """Find a key: the blocks that have it, one for each command, and the settings at or below it.

    A key inside a block marked `Differences` is looked up in the block that the mark names.

    Args:
        key: a dotted key; a number in it is an index of a list.

    Raises:
        ConfigError: no such key; the message has the nearest keys.
    """
    name = re.sub(r"\.\d+(?=\.|$)", "[]", key)
    known = settings(*COMMANDS)
    # Look for no block if the key is a setting's too, or is empty, which would mean all settings.
    commands = [] if name in ("", *known) else COMMANDS
    with_name = [block for command in commands if (block := blocks(command).get(name))]

    # The key is that of a block or of a setting: return it with all settings below it.
    if with_name or name in known:
        below = (f"{name}.", f"{name}[].")
        return with_name, [item for item in known.values() if item.key == name or item.key.startswith(below)]

    # The key lies inside a block marked `Differences`: look for it in `base`, the block that the mark names.
    for setting in known.values():
        if (base := setting.uses[0].same_as) and name.startswith(f"{setting.key}."):
            return find(base + name.removeprefix(setting.key))

    raise ConfigError(f"unknown setting {key!r}{_guesses(name, list(known))} jackpot config --all lists all of them")


def _guesses(key: str, known: Sequence[str]) -> str:
    """Say which known keys an unknown key may mean: keys with the same last name, or that are spelled alike."""
    near = similar_settings(key, known) or get_close_matches(key, known, n=5)
    if not near:
        last_names = {known_key: known_key.rpartition(".")[2] for known_key in known}
        alike = get_close_matches(key.rpartition(".")[2], set(last_names.values()), n=2)
        near = [known_key for known_key in known if last_names[known_key] in alike][:6]
    return f"; did you mean {_either(near)}?" if near else "."


def _walk(kind: type[BaseModel], above: str, **shared: Any) -> Iterator[Block | Use]:
    """Yield every block and every setting below a class of settings, in the order of its fields.

    Args:
        kind: the class of settings.
        above: text before every key: empty, or the key of the block with a dot at its end.
        shared: fields of `Use` that are the same below the whole class: `command`, `variant`, `chosen`, `choices`.
    """
    for name, field in kind.model_fields.items():
        key = above + name
        classes = model_classes(field.annotation)
        meaning = _one_line(field.description)
        # The name of the class that defines the field, which may be a base class of `kind`.
        definer = next(cls.__name__ for cls in kind.__mro__ if name in get_annotations(cls))
        # What every `Use` of this field has in common; each `use(...)` below adds the rest.
        use = partial(Use, **shared, default=_default(field), meaning=meaning, may_change=MAY_CHANGE in field.metadata)

        # Yield the field as a setting, unless its only values are a block or null. A field marked `Differences` states
        # differences from the block `same_as`.
        same_as = next((mark.key for mark in field.metadata if isinstance(mark, Differences)), "")
        values = [f"settings of {same_as}"] if same_as else _values(field.annotation, field.metadata)
        is_choice = name == "name" and not field.is_required()  # a `name` that chooses among classes is yielded below
        if not is_choice and not {*values} <= {_BLOCK, "null"}:
            listed = [text for text in values if not classes or text != "null"]  # no null beside a block
            yield use(key=key, origin=(definer, name), same_as=same_as, values=_either(list(dict.fromkeys(listed))))
        if not classes or same_as:
            continue

        # Yield the block, then `name` if it chooses among several classes, then the fields of each class.
        names = [cls.model_fields["name"].default for cls in classes] if len(classes) > 1 else []
        variants = tuple(zip(names, map(_paragraph, classes), strict=False))  # empty for a single class, as names is
        yield Block(key=key, command=shared["command"], default=_default(field), meaning=meaning, variants=variants)
        below = f"{key}[]." if get_origin(field.annotation) is tuple else f"{key}."
        if names:
            yield use(key=f"{below}name", origin=(classes[0].__name__, "name"), values=_either(names))
        for cls, choice in zip(classes, names or [""], strict=True):
            chosen = {"variant": choice, "chosen": key, "choices": len(names)} if names else {}
            yield from _walk(cls, below, **shared | chosen)


def _paragraph(kind: type[BaseModel]) -> str:
    """Return the first paragraph of a class's docstring as one line."""
    return _one_line((kind.__doc__ or "").partition("\n\n")[0])


def _one_line(text: str | None) -> str:
    """Return a text with every run of spaces and line breaks as one space; None becomes an empty text."""
    return " ".join((text or "").split())


def _values(annotation: Any, metadata: Sequence[Any] = ()) -> list[str]:
    """Say in words what each alternative of a field's annotation allows, with the bounds in the metadata."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        # Each argument after the type is metadata, or a FieldInfo that holds a list of metadata.
        inner = [mark.metadata if isinstance(mark, FieldInfo) else [mark] for mark in arguments[1:]]
        return _values(arguments[0], [*chain.from_iterable(inner), *metadata])

    if origin not in (Union, UnionType) and model_classes(annotation):
        return [_BLOCK]
    if origin is Literal:
        return [_yaml(value) for value in arguments]

    if origin is tuple and arguments[1:] == (...,):  # a list of any length
        several = " (at least one)" if any(getattr(mark, "min_length", None) for mark in metadata) else ""
        return [f"list of {_KINDS[arguments[0]]}s{several}"]
    if origin is tuple:  # a list of a fixed length
        return [f"list of {len(arguments)}: each {_either(_values(arguments[0]))}"]
    if origin is dict:
        return ["mapping"]
    if arguments:
        return [text for alternative in arguments for text in _values(alternative)]
    if annotation is bool:
        return ["true", "false"]

    bounds = [
        f"{sign} {getattr(mark, name):g}"
        for mark in metadata
        for name, sign in _SIGNS.items()
        if getattr(mark, name, None) is not None
    ]
    # A number that must be below infinity is called finite.
    values = " ".join([_KINDS[annotation], " and ".join(bounds).replace("and < inf", "and finite")]).strip()
    return [values, "null"] if NULL_IS_INFINITE in metadata else [values]


def _either(names: Sequence[str]) -> str:
    """Join names to `a, b or c`."""
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _default(field: FieldInfo) -> str:
    """Return a field's default as YAML has it, or `required` where it has none."""
    return "required" if field.is_required() else _yaml(field.get_default(call_default_factory=True))


def _yaml(value: Any) -> str:
    """Return a value as YAML has it; for a block, the name that chooses its class."""
    if isinstance(value, BaseModel):
        return getattr(value, "name", "")
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, re.Pattern):
        return value.pattern
    if isinstance(value, float):
        return str(value).replace("inf", ".inf")
    return str(value) or '""'  # an empty text needs its quotes
