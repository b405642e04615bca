"""Names default folders after commands, so that two commands with different overrides never share one."""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from jackpot.config.reference import blocks, settings

LONGEST = 80  # longest text of all overrides in a name, characters
_WORD = re.compile(r"[\w.]+").fullmatch  # a value that can stand in a name
_FIRST = ("objective.", "policy.")  # blocks whose settings have the short names, where others end the same


def run_folder(recipe: str, arm: str | None, overrides: Sequence[str], seed: int, more: str | None = None) -> Path:
    """Return the default folder of a run, runs/RECIPE-ARM-OVERRIDES-MORE-seedN."""
    labels = [arm, *override_labels(overrides, without=["seed"]), more]
    return Path("runs") / "-".join(filter(None, [Path(recipe).stem, *labels, f"seed{seed}"]))


def override_labels(overrides: Sequence[str], without: Sequence[str] = ()) -> list[str]:
    """Return the parts of a folder's name that stand for overrides, in the order of their keys.

    A number stands behind the setting's last name, `lam2.0`; other values behind `=`. Where that is too long, or a
    value has characters that do not belong in a name, a hash of all overrides follows what fits.

    >>> override_labels(["objective.correction.lam=2.0", "rollout_model.clip_low=0.1", "seed=1"], without=["seed"])
    ['lam2.0', 'rollout_model.clip_low0.1']

    Args:
        overrides: settings as key=value; of two with the same key the last one counts.
        without: keys that have a place of their own in the name.
    """
    given = dict(text.split("=", 1) for text in overrides)
    given = {key: value for key, value in sorted(given.items()) if key not in without}
    known = [*settings("train"), *blocks("train")] if given else []
    labels = [_label(key, value, known) for key, value in given.items()]
    plain = [label for label, value in zip(labels, given.values(), strict=True) if _is_number(value) or _WORD(value)]
    fits = [label for number, label in enumerate(plain) if len("-".join(plain[: number + 1])) <= LONGEST]
    if fits == labels:
        return labels
    digest = hashlib.sha256("\n".join(f"{key}={value}" for key, value in given.items()).encode()).hexdigest()
    return [*fits, digest[:10]]


def _label(key: str, value: str, known: Sequence[str]) -> str:
    """Join the shortest name of a setting that is its own, and its value."""
    parts = key.split(".")
    names = [".".join(parts[start:]) for start in reversed(range(len(parts)))]
    name = next((name for name in names if _owner(name, known) == key), key)
    return f"{name}{value}" if _is_number(value) and not name[-1].isdigit() else f"{name}={value}"


def _is_number(value: str) -> bool:
    return re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", value, re.IGNORECASE) is not None


def _owner(name: str, known: Sequence[str]) -> str | None:
    """Return the key that the last parts of a key stand for; None where they could stand for several."""
    if name in known:
        return name
    ending = [key for key in known if key.endswith(f".{name}")]
    preferred = [key for key in ending if key.startswith(_FIRST)]
    return ending[0] if len(ending) == 1 else preferred[0] if preferred else None
