"""Turns token ids into readable text.

Saved rollouts contain the text of their own tokens. The text of a token that is only in a top-k list comes from the
tokenizer's file, if this file is on the machine.
"""

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from jackpot.config.config import Config
from jackpot.core.errors import ModelError
from jackpot.models.hub import resolve_path

_FILE = "tokenizer.json"
_MARKS_OF_BYTES = ("Ġ", "Ċ")  # letters of a space and a newline, where every byte is represented by a letter
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
# The byte that each letter stands for in byte-level tokenizers.
_LETTERS = {letter: byte for byte, letter in bytes_to_unicode().items()}


@dataclass(slots=True)
class TokenTexts:
    """The token ids of a page, and the tokenizer's strings of those that are known."""

    raw: dict[int, str] = field(default_factory=dict)  # id: the tokenizer's string
    needed: set[int] = field(default_factory=set)  # ids whose text the page shows

    def add_known(self, ids: np.ndarray, tokens: Sequence[str | None]) -> None:
        """Store the tokenizer's strings of these ids; an id that only pads the output layer has None."""
        self.needed |= set(ids.tolist())
        self.raw |= {token_id: token for token_id, token in zip(ids.tolist(), tokens, strict=True) if token is not None}

    def add_needed(self, ids: np.ndarray) -> None:
        """Note that the page needs the text of these ids; `texts_of` looks it up."""
        self.needed |= set(np.unique(ids).tolist())


def texts_of(words: TokenTexts, run: Path, config: Config) -> dict[str, str]:
    """Return the text of every token id that a run's page shows, by the id as a string; id 17 without text is `#17`.

    Args:
        words: these ids, and the tokenizer's strings of those that the saved rollouts name.
    """
    # The tokenizer's strings that the files give, and from the tokenizer those of other ids that the page needs.
    raw = dict(words.raw)
    missing = words.needed - raw.keys()
    if missing and (path := _tokenizer_file(run, config)):
        tokenizer = Tokenizer.from_file(str(path))
        raw |= {token_id: token for token_id in missing if (token := tokenizer.id_to_token(token_id)) is not None}

    # Whether the tokenizer writes every byte as a letter, for example a space as Ġ.
    in_bytes = any(mark in token for token in raw.values() for mark in _MARKS_OF_BYTES)
    texts = {token_id: readable(token, in_bytes) for token_id, token in raw.items()}
    return {str(token_id): texts.get(token_id, f"#{token_id}") for token_id in sorted(words.needed | raw.keys())}


def readable(token: str, in_bytes: bool) -> str:
    """Turn a tokenizer's string into text: `Ġthe` and `▁the` become ` the`, a part of a character its bytes, ⟨E2⟩.

    Args:
        token: the string in the tokenizer's vocabulary.
        in_bytes: whether the tokenizer is byte-level: each character of its strings stands for one byte.
    """
    if match := _BYTE.fullmatch(token):
        content = bytes([int(match[1], 16)])  # `<0x0A>` is one byte
    elif in_bytes and all(letter in _LETTERS for letter in token):
        content = bytes(_LETTERS[letter] for letter in token)
    else:
        return token.replace("▁", " ")  # in other tokenizers `▁` stands for a space, and other letters for themselves
    try:
        return content.decode()
    except UnicodeDecodeError:  # a part of a character
        return "".join(f"⟨{byte:02X}⟩" for byte in content)


def _tokenizer_file(run: Path, config: Config) -> Path | None:
    """Return tokenizer.json of the newest checkpoint, else of the policy at the start; nothing is downloaded."""
    folders = [run / "checkpoints" / "last" / "policy"]
    with contextlib.suppress(ModelError):  # the folder may have been deleted since the run began
        folders.append(Path(resolve_path(config.policy.path)))
    return next((folder / _FILE for folder in folders if (folder / _FILE).is_file()), None)
