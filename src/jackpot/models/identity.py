"""Is it still the same model? Layer 3."""

import hashlib
from pathlib import Path

from jackpot.models.load import load_config, resolve_path

_WHAT_COUNTS = (".json", ".safetensors", ".model", ".txt", ".jinja")  # weights, configs, tokenizer, chat template


def model_digest(path: str | Path) -> str:
    """What changes when the model or its tokenizer does: a hash of the folder's files, or the hub's commit.

    It reads all weights once, about a second for each gigabyte.

    Raises:
        ModelError: no such folder, or the hub cannot be reached.
    """
    source = Path(resolve_path(path))
    if not source.is_dir():
        return f"commit {load_config(path)._commit_hash}"
    whole = hashlib.sha256()
    for file in sorted(one for one in source.iterdir() if one.suffix in _WHAT_COUNTS):
        with file.open("rb") as content:
            whole.update(f"{file.name} {hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode())
    return f"sha256 {whole.hexdigest()}"
