"""`jackpot starter`: the small models of the package, trained again."""

from pathlib import Path

from rich.console import Console

from jackpot.launch.starters import STARTERS, STUDY_STARTERS, make_starters
from jackpot.ui.terminal.train import starter_progress


def starter(folder: Path, seed: int, study: bool) -> None:
    """Train each starter model into a folder of its own below `folder`."""
    console = Console()
    specs = STUDY_STARTERS if study else STARTERS
    with starter_progress(console) as progress:
        make_starters(folder, specs, seed, progress)
    console.print(f"Wrote {', '.join(str(folder / name) for name in specs)}", soft_wrap=True)
