"""Compares the settings in a folder with those of a command that is to continue the run or evaluation there.

Settings marked with `MAY_CHANGE` may differ. All others decided numbers that are computed already, and must be equal.
"""

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from pydantic import BaseModel

from jackpot.config.base import MAY_CHANGE, fields_below
from jackpot.config.config import Config


class Change(NamedTuple):
    """A setting whose value differs between a folder and a command; None stands for null or no setting."""

    key: str
    old: Any  # value in the folder, as JSON has it
    new: Any  # value in the command

    def __str__(self) -> str:
        return f"{self.key}: {json.dumps(self.old)} in the folder, {json.dumps(self.new)} now"


def changes(old: Any, new: Any, key: str = "") -> Iterator[Change]:
    """Yield every setting that differs between two nested mappings of settings, in the order of the keys.

    Args:
        old: the mapping in the folder.
        new: the mapping of the command.
        key: dotted key at which both mappings stand; empty: at the top.
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in sorted(old.keys() | new.keys()):
            yield from changes(old.get(name), new.get(name), f"{key}.{name}" if key else name)
    elif old != new:
        yield Change(key, old, new)


@cache
def changeable(kind: type[BaseModel]) -> frozenset[str]:
    """Return the dotted keys of those settings in a class, and in its blocks, that are marked with `MAY_CHANGE`."""
    return frozenset(key for key, field in fields_below(kind) if MAY_CHANGE in field.metadata)


def fixed_changes(kind: type[BaseModel], old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Return which settings differ and must not: those that the class `kind` does not mark with `MAY_CHANGE`."""
    return [change for change in changes(old, new) if change.key not in changeable(kind)]


def settings_of(config: BaseModel) -> dict[str, Any]:
    """Return all settings as plain values, as YAML and JSON files have them."""
    return json.loads(config.model_dump_json())


def falling_rates(config: Config) -> list[str]:
    """Return the keys of the learning-rate schedules that depend on `iterations`, e.g. `policy.optimizer.schedule`."""
    models = {"policy": config.policy, "rollout_model": config.rollout_model, "critic": config.critic}
    return [
        f"{role}.optimizer.schedule"
        for role, settings in models.items()
        if settings and settings.optimizer and settings.optimizer.schedule != "constant"
    ]
