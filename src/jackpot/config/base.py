"""The base class of every block of settings, and the types of numbers and names that the blocks share."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

# A cap, clip or limit. null is .inf, which JSON does not have: folders of runs say null.
NULL_IS_INFINITE = BeforeValidator(lambda value: math.inf if value is None else value)
Bound = Annotated[float, Field(gt=0.0), NULL_IS_INFINITE]
NonNegative = Annotated[float, Field(ge=0.0, lt=float("inf"))]
Finite = Annotated[float, Field(gt=0.0, lt=float("inf"))]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
Count = Annotated[int, Field(ge=1)]
ImportPath = Annotated[str, Field(pattern=r"^\w+(\.\w+)*:\w+$")]  # package.module:name

Conflicts = list[tuple[Any, str]]  # whether settings are as they cannot be together, and what to say then

ONE_IS_ENOUGH = BeforeValidator(lambda value: (value,) if isinstance(value, str | Mapping) else value)
AnyNames = Annotated[tuple[str, ...], ONE_IS_ENOUGH, Field(strict=False)]  # a list in YAML
Names = Annotated[AnyNames, Field(min_length=1)]


class Strict(BaseModel):
    """A block of settings: frozen, without conversions of types, and unknown keys are refused.

    The docstring below a field is its description, which `jackpot config KEY` prints.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    removed: ClassVar[Mapping[str, Any]] = {}
    """Settings of earlier versions with their defaults, by which the folders of older runs stay readable."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out_removed(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {name: value for name, value in given.items() if name not in cls.removed or value != cls.removed[name]}

    def conflicts(self) -> Conflicts:
        """Return which settings of this block cannot be together: whether they are so, and what to say then."""
        return []

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> Self:
        for is_so, message in self.conflicts():
            if is_so:
                raise ValueError(message)
        return self


@dataclass(frozen=True, slots=True)
class Differences:
    """Marks a block that is written as what differs from another block with the same settings."""

    key: str  # dotted key of the other block
    own: tuple[str, ...] = ()  # names of settings that are not taken from there


@dataclass(frozen=True, slots=True)
class MayChange:
    """Marks a setting that may have another value when a run continues: no number computed before came from it.

    A change of device, memory or speed may still change later numbers by rounding.
    """


MAY_CHANGE = MayChange()


def model_classes(annotation: Any) -> list[type[BaseModel]]:
    """Return the classes of settings that a field's annotation allows, such as those of a union, each once."""
    if isinstance(annotation, type):
        return [annotation] if issubclass(annotation, BaseModel) else []
    parts = getattr(annotation, "__args__", ())
    return list(dict.fromkeys(cls for part in parts for cls in model_classes(part)))


@cache
def fields_below(kind: type[BaseModel], above: str = "") -> tuple[tuple[str, FieldInfo], ...]:
    """Return the dotted key of every setting and block below a class of settings, with its field."""
    fields: list[tuple[str, FieldInfo]] = []
    for name, field in kind.model_fields.items():
        fields.append((above + name, field))
        for cls in model_classes(field.annotation):
            fields += fields_below(cls, f"{above}{name}.")
    return tuple(fields)


def by_name(default: str) -> BeforeValidator:
    """Let `correction: tis` stand for `correction: {name: tis}`, and a block without a name be the default one."""

    def named(value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        return {"name": default, **value} if isinstance(value, Mapping) else value

    return BeforeValidator(named)
