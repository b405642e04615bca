"""Implements `jackpot starter`, which trains the small models of the package again."""

from pathlib import Path

from rich.console import Console

from jackpot.launch.toy_models import STUDY_MODELS, TOY_MODELS, make_toy_models
from jackpot.ui.terminal.progress import print_line, progress


def starter(folder: Path, seed: int, study: bool) -> None:
    """Train each starter model into a folder of its own below `folder`."""
    console = Console()
    specs = STUDY_MODELS if study else TOY_MODELS
    with progress(console) as shown:

        def listen(name: str, done: int, total: int, loss: float) -> None:
            shown.update(name, done, total, {"loss": f"{loss:.3f} nats/token"}, noun=" steps", is_due=done == total)

        make_toy_models(folder, specs, seed, listen)
    print_line(console, f"Wrote {', '.join(str(folder / name) for name in specs)}")
