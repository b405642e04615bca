"""Implements `jackpot starter`, which trains the small models of the package again."""

from pathlib import Path

from rich.console import Console

from jackpot.core.errors import ConfigError
from jackpot.launch.lessons import write_word_problems
from jackpot.launch.toy_models import STUDY_MODELS, TEXT_MODELS, TOY_MODELS, make_toy_models
from jackpot.ui.terminal.answer import show_next
from jackpot.ui.terminal.progress import print_line, progress


def starter(folder: Path, seed: int, text: bool, study: bool) -> None:
    """Train each starter model into a folder of its own below `folder`.

    Raises:
        ConfigError: both `text` and `study` are given.
    """
    if text and study:
        raise ConfigError("--text and --study make different models; give one of them")
    console = Console()
    specs = TEXT_MODELS if text else STUDY_MODELS if study else TOY_MODELS
    with progress(console) as shown:

        def listen(name: str, done: int, total: int, loss: float) -> None:
            shown.update(name, done, total, {"loss": f"{loss:.3f} nats/token"}, noun=" steps", is_due=done == total)

        make_toy_models(folder, specs, seed, listen)
    written = [folder / name for name in specs] + (write_word_problems(folder) if text else [])
    print_line(console, f"Wrote {', '.join(map(str, written))}")
    if not (text or study):
        models = f"policy.path={folder / 'policy'} rollout_model.path={folder / 'rollout_model'}"
        show_next(console, {f"jackpot train quickstart {models}": "train with them"})
