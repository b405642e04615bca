"""Makes the names of default folders from a command's recipe, arm and overrides.

Two commands with different overrides never get the same folder.
"""

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from jackpot.config.reference import blocks, settings

LONGEST = 80  # most characters that all overrides together take in a name, characters
_WORD = re.compile(r"[\w.]+").fullmatch  # a value that can stand in a name
_FIRST = ("objective.", "policy.")  # if a last name occurs in several blocks, it means the setting in one of these


def run_folder(recipe: str, arm: str | None, overrides: Sequence[str], seed: int, more: str | None = None) -> Path:
    """Return the default folder of a run, runs/RECIPE-ARM-OVERRIDES-MORE-seedN with `seed` as N.

    Args:
        recipe: name of a recipe, or the path of its file, whose stem goes into the folder's name.
        arm, more: parts of the name; None: left out.
        overrides: settings as key=value; `seed` is left out of them, as the name has a part for it.
    """
    labels = [arm, *override_labels(overrides, without=["seed"]), more]
    return Path("runs") / "-".join(filter(None, [Path(recipe).stem, *labels, f"seed{seed}"]))


def override_labels(overrides: Sequence[str], without: Sequence[str] = ()) -> list[str]:
    """Return the parts of a folder's name that stand for overrides, in the order of their keys.

    A number stands right after the setting's shortest name, `lam2.0`, unless the name ends in a digit, `c1=10`; other
    values stand after `=`. Where the parts get too long, or a value has characters that a folder's name should not
    have, a hash of all overrides replaces some parts.

    >>> override_labels(["objective.correction.lam=2.0", "rollout_model.clip_low=0.1", "seed=1"], without=["seed"])
    ['lam2.0', 'rollout_model.clip_low0.1']

    Args:
        overrides: settings as key=value; of two with the same key the last one counts.
        without: keys that are left out.
    """
    all_values = dict(text.split("=", 1) for text in overrides)
    values = {key: value for key, value in sorted(all_values.items()) if key not in without}
    known = [*settings("train"), *blocks("train")] if values else []  # only where needed: reading all keys takes long

    # A label is left out if there is no room for it, or if its value has characters that a name should not have, so
    # that `_WORD` does not match.
    labels = [_label(key, value, known) for key, value in values.items()]
    plain = [label for label, value in zip(labels, values.values(), strict=True) if _is_number(value) or _WORD(value)]
    fitting = [label for index, label in enumerate(plain) if len("-".join(plain[: index + 1])) <= LONGEST]
    if fitting == labels:
        return labels

    digest = hashlib.sha256("\n".join(f"{key}={value}" for key, value in values.items()).encode()).hexdigest()
    return [*fitting, digest[:10]]


def _label(key: str, value: str, known: Sequence[str]) -> str:
    """Join a setting's name and value, by `=` unless a number can follow the name directly: `lam2.0`, but `c1=10`.

    The name is the shortest ending of `key`, such as `lam`, that means `key` (`_owner`).
    """
    words = key.split(".")
    names = [".".join(words[start:]) for start in reversed(range(len(words)))]  # shortest first
    name = next((name for name in names if _owner(name, known) == key), key)  # an unknown key stays whole
    return f"{name}{value}" if _is_number(value) and not name[-1].isdigit() else f"{name}={value}"


def _is_number(value: str) -> bool:
    """Return whether the text of a value is a number."""
    return re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", value, re.IGNORECASE) is not None


def _owner(name: str, known: Sequence[str]) -> str | None:
    """Return the known key that `name` means, such as `objective.correction.lam` for `lam`; None if it means none.

    A name means the key that equals it, or else the key that ends in it. Of several keys that end in it, it means the
    first in the blocks `_FIRST`, and none if all are outside of these.
    """
    if name in known:
        return name
    ending = [key for key in known if key.endswith(f".{name}")]
    preferred = [key for key in ending if key.startswith(_FIRST)]
    candidates = ending if len(ending) == 1 else preferred
    return candidates[0] if candidates else None
