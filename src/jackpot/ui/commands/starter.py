"""Implements `jackpot starter`, which copies the small models of the package into a folder."""

from pathlib import Path
from shutil import copytree
from typing import Annotated

import typer
from rich.console import Console

from jackpot.core.errors import ConfigError
from jackpot.ui.lazy import lazy
from jackpot.ui.terminal.output import print_line, show_next

with lazy():
    from jackpot.models import hub


def starter(
    folder: Annotated[Path, typer.Argument(help="Folder in which each model gets a folder.")],
    text: Annotated[
        bool, typer.Option("--text", help="Copy the pair for word problems, not the pair that adds.")
    ] = False,
) -> None:
    """Copy two small models of the package, a policy and a rollout model, into a folder.

    Status: supported.
    """
    names = ("text_policy", "text_rollout_model") if text else ("policy", "rollout_model")
    if existing := [folder / name for name in names if (folder / name).exists()]:
        raise ConfigError(f"{', '.join(map(str, existing))} exists already; give another folder, or move it away")
    for name in names:
        copytree(hub.starter_path(name), folder / name)

    console = Console()
    print_line(console, f"Wrote {', '.join(str(folder / name) for name in names)}")
    if not text:
        models = f"policy.path={folder / 'policy'} rollout_model.path={folder / 'rollout_model'}"
        show_next(console, {f"jackpot train quickstart {models}": "train with them"})
