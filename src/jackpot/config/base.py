"""The base class of every block of settings, and the types of numbers and names that the blocks share."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

# Bound is a cap, clip or limit. JSON has no infinity, so a run folder has null where a recipe may have .inf.
NULL_IS_INFINITE = BeforeValidator(lambda value: math.inf if value is None else value)
Bound = Annotated[float, Field(gt=0.0), NULL_IS_INFINITE]
NonNegative = Annotated[float, Field(ge=0.0, lt=float("inf"))]
Finite = Annotated[float, Field(gt=0.0, lt=float("inf"))]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
Count = Annotated[int, Field(ge=1)]
ImportPath = Annotated[str, Field(pattern=r"^\w+(\.\w+)*:\w+$")]  # package.module:name

Conflicts = list[tuple[Any, str]]  # pairs (a condition, the error where the condition holds)

ONE_IS_ENOUGH = BeforeValidator(lambda value: (value,) if isinstance(value, str | Mapping) else value)
AnyNames = Annotated[tuple[str, ...], ONE_IS_ENOUGH, Field(strict=False)]  # written in YAML as a list or as one name
Names = Annotated[AnyNames, Field(min_length=1)]


class Strict(BaseModel):
    """A block of settings: frozen, without conversion of types and without unknown keys.

    The docstring below a field is the field's description, which `jackpot config KEY` prints.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    def conflicts(self) -> Conflicts:
        """Return pairs (condition, error where it holds) for the settings of this block that exclude each other."""
        return []

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> Self:
        """Raise the first error of `conflicts` whose condition holds."""
        for is_conflict, message in self.conflicts():
            if is_conflict:
                raise ValueError(message)
        return self


@dataclass(frozen=True, slots=True)
class Differences:
    """A mark on a block of settings: a recipe writes in it only what differs from another block, named `key`."""

    key: str  # dotted key of the other block
    excluded: tuple[str, ...] = ()  # names of settings that are not taken from the other block


@dataclass(frozen=True, slots=True)
class MayChange:
    """A mark on a setting whose value may change when a run continues, since no number computed so far depends on it.

    A change of device, memory or speed may still change later numbers by rounding.
    """


MAY_CHANGE = MayChange()


def model_classes(annotation: Any) -> list[type[BaseModel]]:
    """Return the classes of settings that a field's annotation allows, each once; several where it is a union."""
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    alternatives = getattr(annotation, "__args__", ())
    return list(dict.fromkeys(cls for alternative in alternatives for cls in model_classes(alternative)))


@cache
def fields_below(kind: type[BaseModel], above: str = "") -> tuple[tuple[str, FieldInfo], ...]:
    """Return (dotted key, field) of every setting and block below a class of settings.

    A key that several classes of a union have comes once for each class.

    Args:
        kind: the class of settings.
        above: text before every key: empty, or the key of the block with a dot at its end.
    """
    fields: list[tuple[str, FieldInfo]] = []
    for name, field in kind.model_fields.items():
        fields.append((above + name, field))
        for cls in model_classes(field.annotation):
            fields += fields_below(cls, f"{above}{name}.")
    return tuple(fields)


def by_name(default: str | None = None) -> BeforeValidator:
    """Make a validator of a block of settings, which may be written as its name alone: `correction: tis`.

    The validator turns that into `{name: tis}`, and gives a block that has no `name` the name `default`, if there is
    one.
    """

    def named(value: Any) -> Any:
        """Return the block, with its `name`, that a text or a mapping stands for; other values as they are."""
        if isinstance(value, str):
            return {"name": value}
        return {"name": default, **value} if isinstance(value, Mapping) and default is not None else value

    return BeforeValidator(named)
