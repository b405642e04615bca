"""What every block of settings shares. Pydantic only; frozen, unknown keys refused."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Positive = Annotated[float, Field(gt=0.0)]  # .inf is allowed: no cap, no clip
NonNegative = Annotated[float, Field(ge=0.0)]
Finite = Annotated[float, Field(gt=0.0, lt=float("inf"))]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
Count = Annotated[int, Field(ge=1)]

_one_is_enough = BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
AnyNames = Annotated[tuple[str, ...], _one_is_enough, Field(strict=False)]  # a list in YAML
Names = Annotated[AnyNames, Field(min_length=1)]


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def by_name(default: str) -> BeforeValidator:
    """`correction: tis` is short for `correction: {name: tis}`; a block without a name has the default one."""

    def named(value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        return {"name": default, **value} if isinstance(value, Mapping) else value

    return BeforeValidator(named)
