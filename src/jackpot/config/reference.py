"""Reads the classes of settings: every key with its values, its default, its meaning and who uses it.

`jackpot config` prints what this module finds, and docs/settings.md is made of it.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from inspect import get_annotations
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from jackpot.config.base import MAY_CHANGE, NULL_IS_INFINITE, Differences, model_classes
from jackpot.config.build import similar_settings
from jackpot.config.config import Config
from jackpot.config.tools import BenchmarksConfig, MismatchConfig
from jackpot.core.errors import ConfigError

COMMANDS: dict[str, type[BaseModel]] = {"train": Config, "eval": BenchmarksConfig, "mismatch": MismatchConfig}
CONTINUED = ("train", "eval")  # commands that continue what stands in their folder
_SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_KINDS = {int: "integer", float: "number", str: "string", type(None): "null"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """Describes a key in one class of settings, of one command."""

    command: str  # train, eval or mismatch
    variant: str  # the choice that the key belongs to, such as vllm; empty: none
    chosen: str  # the block that the choice is made for, such as engine; empty: none
    choices: int  # number of names that the block can have
    origin: tuple[str, str]  # the class that defines the setting, and its name there
    same_as: str  # the block whose settings the key has, which it says the differences from; empty: none
    values: str  # type and allowed values
    default: str  # default as YAML; "required" where there is none
    meaning: str  # docstring of the setting
    may_change: bool  # whether a run or an evaluation that continues may have another value


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Describes a key of the settings by its uses in all classes that have it."""

    key: str
    uses: tuple[Use, ...]

    def summary(self, of: str) -> str:
        """Join what the uses have in one of their fields; where they differ, each with its variants or commands.

        The text of more than half of the uses stands first, without names.
        """
        named: dict[str, list[str]] = {}
        for use in self.uses:
            named.setdefault(getattr(use, of), []).append(use.variant or f"jackpot {use.command}")
        usual = [text for text, names in named.items() if 2 * len(names) > len(self.uses)]
        rest = {text: ", ".join(dict.fromkeys(names)) for text, names in named.items() if text not in usual}
        if of == "meaning":
            return " ".join([*usual, *(f"{names}: {text}" for text, names in rest.items())])
        return "; ".join([*usual, *(f"{text} ({names})" for text, names in rest.items())])

    @property
    def resume(self) -> str:
        """Say whether the setting may change when a run or an evaluation continues; empty where nothing does."""
        continued = [use.may_change for use in self.uses if use.command in CONTINUED]
        return ("may change" if any(continued) else "must stay the same") if continued else ""

    @property
    def users(self) -> str:
        """Say which commands use the setting, and with which choices where it belongs to some of them only."""
        commands = ", ".join(f"jackpot {name}" for name in dict.fromkeys(use.command for use in self.uses))
        return f"{commands}, with {self.variants}" if self.variants else commands

    @property
    def variants(self) -> str:
        """Name the choices that the setting belongs to, such as `engine=vllm`; empty where all of them have it."""
        names = list(dict.fromkeys(use.variant for use in self.uses if use.variant))
        return f"{self.uses[0].chosen}={_either(names)}" if len(names) < self.uses[0].choices else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Describes a key with settings below it."""

    key: str
    command: str  # train, eval or mismatch
    default: str  # null or required as of a setting, or the name of the default choice, or empty
    meaning: str  # docstring of the field, or of the class for a whole command
    variants: tuple[tuple[str, str], ...]  # allowed names and what each is; empty where there is nothing to choose


_Walked = Block | tuple[str, Use]


def blocks(command: str) -> dict[str, Block]:
    """Return every block of a command's settings by its key, the whole with an empty key first."""
    kind = COMMANDS[command]
    whole = Block(key="", command=command, default="", meaning=_paragraph(kind), variants=())
    return {block.key: block for block in [whole, *_walk(kind, "", _Context(command))] if isinstance(block, Block)}


def settings(*commands: str) -> dict[str, Setting]:
    """Return every setting of these commands by its key, in the order of the classes."""
    uses: dict[str, list[Use]] = {}
    for command in commands:
        for found in _walk(COMMANDS[command], "", _Context(command)):
            if not isinstance(found, Block):
                uses.setdefault(found[0], []).append(found[1])
    return {key: Setting(key=key, uses=tuple(of_key)) for key, of_key in uses.items()}


def own_settings(command: str) -> tuple[list[Setting], list[str]]:
    """Return the settings of a command that `jackpot train` has not, and the first names of those that it has too.

    A setting is the same where the same class defines it, at another key or with another default than the rest.
    """
    known = {use.origin for setting in settings("train").values() for use in setting.uses}
    own, shared = [], []
    for setting in settings(command).values():
        if any(use.origin not in known for use in setting.uses):
            own.append(setting)
        else:
            shared.append(re.split(r"[.\[]", setting.key)[0])
    return own, list(dict.fromkeys(shared))


def find(key: str) -> tuple[list[Block], list[Setting]]:
    """Return the block with this key in each command that has one, and the setting with this key or those below it.

    A key in a block that says what differs from another one is found in the other.

    Raises:
        ConfigError: no such key, with the nearest ones.
    """
    wanted = re.sub(r"\.\d+(?=\.|$)", "[]", key)
    known = settings(*COMMANDS)
    if wanted in known:
        return [], [setting for name, setting in known.items() if name == wanted or name.startswith(f"{wanted}.")]
    for setting in known.values():
        if (other := setting.uses[0].same_as) and wanted.startswith(f"{setting.key}."):
            return find(other + wanted.removeprefix(setting.key))
    found = [block for command in COMMANDS if (block := blocks(command).get(wanted)) and wanted]
    if found:
        below = (f"{wanted}.", f"{wanted}[].")
        return found, [setting for name, setting in known.items() if name.startswith(below)]
    raise ConfigError(f"unknown setting {key!r}{_near(wanted, list(known))} jackpot config lists all of them")


def _near(key: str, known: Sequence[str]) -> str:
    """Return a guess of what an unknown key means: keys of the same last name, or that are spelled alike."""
    near = similar_settings(key, known) or get_close_matches(key, known, n=5)
    if not near:
        names = get_close_matches(key.rpartition(".")[2], {other.rpartition(".")[2] for other in known}, n=2)
        near = [other for other in known if other.rpartition(".")[2] in names][:6]
    return f"; did you mean {_either(near)}?" if near else "."


@dataclass(frozen=True, slots=True)
class _Context:
    """Holds what every use of a class has in common: the command, and the choice that the class is of."""

    command: str
    variant: str = ""
    chosen: str = ""
    choices: int = 0


def _walk(kind: type[BaseModel], prefix: str, context: _Context) -> Iterator[_Walked]:
    """Yield the blocks and the (key, use) of every setting below a class of settings."""
    for name, field in kind.model_fields.items():
        key, classes = prefix + name, model_classes(field.annotation)
        mark = next((mark for mark in field.metadata if isinstance(mark, Differences)), None)
        if mark is not None:
            yield key, _use(context, (kind.__name__, name), f"settings of {mark.key}", field, same_as=mark.key)
        elif classes:
            if plain := _plain_values(field):
                yield key, _use(context, (kind.__name__, name), f"{_either(plain)} or a block", field)
            yield from _walk_block(key, field, classes, context)
        elif name != "name" or field.is_required():  # else it chooses this class: a setting of the block
            definer = next(cls for cls in kind.__mro__ if name in get_annotations(cls))
            yield (
                key,
                _use(context, (definer.__name__, name), _either(_values(field.annotation, field.metadata)), field),
            )


def _walk_block(key: str, field: FieldInfo, classes: Sequence[type[BaseModel]], context: _Context) -> Iterator[_Walked]:
    """Yield a block, the setting that chooses its class where there is a choice, and everything below it."""
    names = [cls.model_fields["name"].default for cls in classes] if len(classes) > 1 else []
    variants = tuple(zip(names, map(_paragraph, classes), strict=False))
    yield Block(
        key=key,
        command=context.command,
        default=_default(field),
        meaning=_one_line(field.description),
        variants=variants,
    )
    below = f"{key}[]." if get_origin(field.annotation) is tuple else f"{key}."
    if names:
        yield f"{below}name", _use(context, (classes[0].__name__, "name"), _either(names), field)
    for cls, name in zip(classes, names or [""], strict=True):
        yield from _walk(cls, below, _Context(context.command, name, key, len(names)) if names else context)


def _use(context: _Context, origin: tuple[str, str], values: str, field: FieldInfo, same_as: str = "") -> Use:
    return Use(
        same_as=same_as,
        command=context.command,
        variant=context.variant,
        chosen=context.chosen,
        choices=context.choices,
        origin=origin,
        values=values,
        default=_default(field),
        meaning=_one_line(field.description),
        may_change=MAY_CHANGE in field.metadata,
    )


def _paragraph(kind: type[BaseModel]) -> str:
    """Return the first paragraph of a class's docstring as one line."""
    return _one_line((kind.__doc__ or "").partition("\n\n")[0])


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def _values(annotation: Any, metadata: Sequence[Any] = ()) -> list[str]:
    """Say in words what each alternative of an annotation allows, with the bounds in its metadata."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [item for mark in parts[1:] for item in (mark.metadata if isinstance(mark, FieldInfo) else [mark])]
        return _values(parts[0], [*inner, *metadata])
    if origin is Literal:
        return [_yaml(value) for value in parts]
    if origin is tuple and parts[1:] == (...,):
        several = " (at least one)" if any(getattr(mark, "min_length", None) for mark in metadata) else ""
        return [f"list of {_KINDS[parts[0]]}s{several}"]
    if origin is tuple:
        return [f"list of {len(parts)}: each {_either(_values(parts[0]))}"]
    if origin is dict:
        return ["mapping"]
    if parts:
        return [text for part in parts for text in _values(part)]
    if annotation is bool:
        return ["true", "false"]
    bounds = [f"{sign} {bound:g}" for mark in metadata for bound, sign in _bounds(mark)]
    number = " ".join([_KINDS[annotation], " and ".join(bounds).replace("and < inf", "and finite")]).strip()
    return [number, "null"] if NULL_IS_INFINITE in metadata else [number]


def _plain_values(field: FieldInfo) -> list[str]:
    """Say what a field allows in place of a block; nothing where that is null alone."""
    if get_origin(field.annotation) is tuple:  # a list of blocks
        return []
    parts = [part for part in get_args(field.annotation) if part is not type(None) and not model_classes(part)]
    return [text for part in parts for text in _values(part)]


def _bounds(mark: Any) -> Iterator[tuple[float, str]]:
    """Yield the bounds in one piece of metadata, each with its sign."""
    return ((getattr(mark, name), sign) for name, sign in _SIGNS.items() if getattr(mark, name, None) is not None)


def _either(names: Sequence[str]) -> str:
    return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, BaseModel):
        return getattr(default, "name", "")
    if isinstance(default, tuple) and any(isinstance(item, BaseModel) for item in default):
        return _yaml([getattr(item, "name", "") for item in default])
    return _yaml(default)


def _yaml(value: Any) -> str:
    """Return a value as it is written in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_yaml, value))}]"
    return str(value).replace("inf", ".inf") if isinstance(value, float) else str(value) or '""'
