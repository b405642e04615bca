"""What every block of settings shares. Layer 0: pydantic only; frozen, unknown keys refused."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Positive = Annotated[float, Field(gt=0.0)]  # .inf is allowed: no cap, no clip
NonNegative = Annotated[float, Field(ge=0.0)]
Finite = Annotated[float, Field(gt=0.0, lt=float("inf"))]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
Count = Annotated[int, Field(ge=1)]

Names = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
    Field(strict=False, min_length=1),  # a list in YAML
]


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def by_name(default: str) -> BeforeValidator:
    """`correction: tis` is short for `correction: {name: tis}`; a block without a name has the default one."""

    def named(value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        return {"name": default, **value} if isinstance(value, Mapping) else value

    return BeforeValidator(named)
