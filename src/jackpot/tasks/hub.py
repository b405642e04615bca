"""Rows of data sets on the Hugging Face hub. Layer 3; the only file that needs `datasets`."""

from collections.abc import Iterator, Mapping
from typing import Any

from jackpot.errors import DataError
from jackpot.tasks.files import Record


def read_hub(path: str, subset: str | None, split: str, streaming: bool, instead: str) -> Iterator[Record]:
    """Every row of a data set, in its order. It is downloaded once into the cache of `datasets`, or with `streaming`
    fetched anew as it is read.

    Args:
        path: OWNER/NAME, or what else `datasets.load_dataset` takes.
        instead: for errors, what to do where there is no hub.

    Raises:
        DataError: the package or the data set cannot be had, or has no such subset or split.
    """
    name = f"{path} ({', '.join(filter(None, [subset, split]))})"
    rows = _load(path, subset, split, streaming, name, instead)
    number = 0
    try:
        for number, row in enumerate(rows, start=1):
            yield Record(f"{name} row {number}", row)
    except Exception as error:  # a connection that breaks: each of its libraries has errors of its own
        raise DataError(f"{name} ends after row {number}: {_short(error)}; {instead}") from error


def _load(
    path: str, subset: str | None, split: str, streaming: bool, name: str, instead: str
) -> Iterator[Mapping[str, Any]]:
    try:
        from datasets import load_dataset  # a second to import, and most runs have files or no data at all
    except ImportError as error:
        raise DataError(f"{name} needs the package datasets: pip install 'jackpot-rl[train]'; or {instead}") from error
    try:
        return load_dataset(path, name=subset, split=split, streaming=streaming)
    except Exception as error:  # of datasets, huggingface_hub, httpx, fsspec, pyarrow
        raise DataError(
            f"{name} cannot be had from the hub: {_short(error)}. Check its name, subset and split, and the connection "
            f"(a private one needs HF_TOKEN); or {instead}"
        ) from error


def _short(error: Exception) -> str:
    """The first line: some have the whole traceback of another process in them."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:500]
