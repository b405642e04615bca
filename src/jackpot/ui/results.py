"""Writes the results of a command into a folder: a page with charts, and all numbers as JSON."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jackpot.core.files import write_whole
from jackpot.ui.charts import Section
from jackpot.ui.html import write_page


def write_results(folder: Path, name: str, title: str, sections: Mapping[str, Section], numbers: Any) -> list[Path]:
    """Write NAME.html and NAME.json; return the files in that order.

    Args:
        numbers: dicts, lists, strings and numbers; a number that is not finite becomes null.
    """
    page = folder / f"{name}.html"
    data = folder / f"{name}.json"
    folder.mkdir(parents=True, exist_ok=True)

    # numbers first: they are kept if drawing fails
    write_whole(data, (json.dumps(to_json(numbers), indent=1, allow_nan=False) + "\n").encode())
    write_page(page, title, list(sections.values()))
    return [page, data]


def to_json(value: Any) -> Any:
    """Return the value with tuples as lists and None for every number that is not finite, which JSON lacks."""
    if isinstance(value, Mapping):
        return {key: to_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def default_folder(command: str, model: str) -> Path:
    """Return runs/COMMAND-MODEL, the folder of a command's results; the model is a path, a hub name or starter:NAME."""
    return Path("runs") / f"{command}-{model.strip('/.').replace('/', '-').replace(':', '-')}"
