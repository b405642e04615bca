"""Compares the settings in a folder with those of a command that would continue what stands there."""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from pydantic import BaseModel

from jackpot.config.base import MAY_CHANGE, fields_below
from jackpot.config.config import Config


class Change(NamedTuple):
    """Names a setting whose value differs between a folder and a command; None: there is no such setting."""

    key: str
    old: Any  # in the folder, as JSON has it
    new: Any  # in the command

    def __str__(self) -> str:
        return f"{self.key}: {json.dumps(self.old)} in the folder, {json.dumps(self.new)} now"


def changes(old: Any, new: Any, key: str = "") -> Iterator[Change]:
    """Yield the settings that differ between two mappings of them, by their dotted keys."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in sorted(old.keys() | new.keys()):
            yield from changes(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield Change(key, old, new)


@cache
def changeable(kind: type[BaseModel]) -> frozenset[str]:
    """Return the dotted keys of the settings below a class of them that are marked with `MAY_CHANGE`."""
    return frozenset(key for key, field in fields_below(kind) if MAY_CHANGE in field.metadata)


def fixed_changes(kind: type[BaseModel], old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Return the changes of settings that decide numbers which were computed before."""
    return [change for change in changes(old, new) if change.key not in changeable(kind)]


def settings_of(config: BaseModel) -> dict[str, Any]:
    """Return all settings as they are written to YAML and JSON."""
    return json.loads(config.model_dump_json())


def falling_rates(config: Config) -> list[str]:
    """Name the models whose learning rate at a step depends on the number of iterations."""
    models = {"policy": config.policy, "rollout_model": config.rollout_model, "critic": config.critic}
    optimizers = {role: settings.optimizer for role, settings in models.items() if settings}
    return [f"{role}.optimizer.schedule" for role, one in optimizers.items() if one and one.schedule != "constant"]
