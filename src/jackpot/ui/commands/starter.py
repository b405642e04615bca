"""Implements `jackpot starter`, which copies the small models of the package into a folder."""

from pathlib import Path
from shutil import copytree

from rich.console import Console

from jackpot.core.errors import ConfigError
from jackpot.models.load import starter_path
from jackpot.ui.terminal.answer import show_next
from jackpot.ui.terminal.progress import print_line


def starter(folder: Path, text: bool) -> None:
    """Copy each model of a pair into a folder of its own below `folder`.

    Raises:
        ConfigError: a model's folder exists already.
    """
    names = ("text_policy", "text_rollout_model") if text else ("policy", "rollout_model")
    if existing := [folder / name for name in names if (folder / name).exists()]:
        raise ConfigError(f"{', '.join(map(str, existing))} exists already; give another folder, or move it away")
    for name in names:
        copytree(starter_path(name), folder / name)

    console = Console()
    print_line(console, f"Wrote {', '.join(str(folder / name) for name in names)}")
    if not text:
        models = f"policy.path={folder / 'policy'} rollout_model.path={folder / 'rollout_model'}"
        show_next(console, {f"jackpot train quickstart {models}": "train with them"})
