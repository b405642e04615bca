"""What token ids read like.

The saved rollouts have the text of the tokens that occur in them; those that stand in a top-k only come from the
tokenizer's own file, where it is on this machine.
"""

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from jackpot.config.run import Config
from jackpot.core.errors import ModelError
from jackpot.models.load import resolve_path

_FILE = "tokenizer.json"
_MARKS_OF_BYTES = ("Ġ", "Ċ")  # space and newline where every byte is written as a letter
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(slots=True)
class Words:
    """Ids that a page shows, with the tokenizer's own writing of those that are known."""

    raw: dict[int, str] = field(default_factory=dict)
    needed: set[int] = field(default_factory=set)

    def see(self, ids: np.ndarray, tokens: Sequence[str]) -> None:
        self.raw |= dict(zip(ids.tolist(), tokens, strict=True))

    def need(self, ids: np.ndarray) -> None:
        self.needed |= set(np.unique(ids).tolist())


def words_of(words: Words, run: Path, config: Config) -> dict[str, str]:
    """The text of every id, `#17` where nobody knows it."""
    raw = dict(words.raw)
    missing = words.needed - raw.keys()
    if missing and (path := _tokenizer_file(run, config)):
        tokenizer = Tokenizer.from_file(str(path))
        raw |= {number: token for number in missing if (token := tokenizer.id_to_token(number)) is not None}
    in_bytes = any(mark in token for token in raw.values() for mark in _MARKS_OF_BYTES)
    shown = {number: readable(token, in_bytes) for number, token in raw.items()}
    return {str(number): shown.get(number, f"#{number}") for number in sorted(words.needed | raw.keys())}


def readable(token: str, in_bytes: bool) -> str:
    """A tokenizer's writing as text: `Ġthe` and `▁the` are ` the`, half a character is its bytes."""
    if match := _BYTE.fullmatch(token):
        content = bytes([int(match[1], 16)])
    elif in_bytes and all(letter in _LETTERS for letter in token):
        content = bytes(_LETTERS[letter] for letter in token)
    else:
        return token.replace("▁", " ")
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "".join(f"⟨{byte:02X}⟩" for byte in content)


def _tokenizer_file(run: Path, config: Config) -> Path | None:
    """Of the newest checkpoint, else of the policy that the run began with; nothing is fetched."""
    folders = [run / "checkpoints" / "last" / "policy"]
    with contextlib.suppress(ModelError):  # it was there when the run began
        folders.append(Path(resolve_path(config.policy.path)))
    return next((folder / _FILE for folder in folders if (folder / _FILE).is_file()), None)


def _letters() -> dict[str, int]:
    """Which letter stands for which byte in byte-level tokenizers: printable ones for themselves, the others from 256
    on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


_LETTERS = _letters()
