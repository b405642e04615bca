"""The public names keep their parameters: a user's code runs with the next version.

`python tests/check_docs/test_public_api.py` writes public_api.txt anew. A line that goes or changes there breaks
somebody's code: it needs a higher version, and a line in CHANGELOG.md that says what to write instead.
"""

import dataclasses
import inspect
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel

import jackpot
from jackpot.config.corrections import CORRECTION_SETTINGS
from jackpot.corrections import IN_THE_INPUTS

RECORDED = Path(__file__).with_name("public_api.txt")


def parameters(function: Any) -> str:
    """Return the parameters without annotations, which may change."""
    plain = []
    for parameter in inspect.signature(function).parameters.values():
        default = (
            Ellipsis if callable(parameter.default) and parameter.default is not parameter.empty else parameter.default
        )
        plain.append(parameter.replace(annotation=parameter.empty, default=default))
    return str(inspect.Signature(plain))


def settings(model: type[BaseModel]) -> str:
    """Return the settings of a correction with their defaults."""
    fields = {key: field.get_default(call_default_factory=True) for key, field in model.model_fields.items()}
    return "".join(f", {key}={default!r}" for key, default in fields.items() if key not in ("name", *IN_THE_INPUTS))


def described(name: str, value: Any) -> list[str]:
    """List a name's lines: one of a function, several of a module or a class."""
    if isinstance(value, ModuleType):
        own_names = [
            key for key, attribute in vars(value).items() if getattr(attribute, "__module__", None) == value.__name__
        ]
        return [line for key in own_names if key[0] != "_" for line in described(f"{name}.{key}", getattr(value, key))]
    if value is jackpot.CORRECTIONS:
        return [f"jackpot.correct({key!r}{settings(CORRECTION_SETTINGS[key])}, ...)" for key in sorted(value)]
    if not inspect.isclass(value):
        return [f"{name}{parameters(value)}"]
    if unpacked := getattr(value, "_fields", None):
        return [f"{name} = {', '.join(unpacked)}"]
    fields = {field.name for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
    members = sorted(fields | {key for key in vars(value) if not key.startswith("_")})
    attributes = {member: inspect.getattr_static(value, member, None) for member in members}
    lines = [
        f"{name}.{key}{parameters(attribute) if inspect.isfunction(attribute) else ''}"
        for key, attribute in attributes.items()
    ]

    return [f"{name} <- {value.__mro__[1].__name__}", *lines]


def public() -> str:
    """Return a line for each public name."""
    named = {f"jackpot.{name}": getattr(jackpot, name) for name in jackpot.__all__}
    return "".join(line + "\n" for name, value in named.items() for line in described(name, value))


def test_public_names_have_the_parameters_that_are_recorded() -> None:
    gone = set(RECORDED.read_text().splitlines()) - set(public().splitlines())
    assert not gone, f"public names are gone or have other parameters: {sorted(gone)}"
    assert RECORDED.read_text() == public(), f"new public names: python {Path(__file__).name} writes them down"


if __name__ == "__main__":
    RECORDED.write_text(public())
