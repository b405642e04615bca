"""`jackpot train`: a run, its plan or its tiny version."""

from contextlib import closing
from pathlib import Path

from rich.console import Console

from jackpot.analysis.plan.estimate import estimate, is_large
from jackpot.analysis.plan.memory import plan_memory
from jackpot.analysis.plan.sizes import model_sizes, prompt_lengths
from jackpot.analysis.plan.tiny import tiny_run
from jackpot.config.published import GpusConfig
from jackpot.config.recipes import load_recipe, resolve
from jackpot.config.recipes.notes import recipe_notes
from jackpot.config.run import Config
from jackpot.core.errors import ConfigError
from jackpot.launch.local import launch
from jackpot.training.run.folder import RunFolder
from jackpot.ui.terminal.plan import show_needs, show_tiny
from jackpot.ui.terminal.train import live_progress, show_plan, show_result


def train(
    recipe: str, overrides: list[str] | None, arm: str | None, run: Path | None, dry_run: bool, tiny: bool
) -> None:
    """Train or continue the run, or print its plan with `dry_run`."""
    console = Console()
    config = resolve(recipe, arm, overrides or [])
    name = "-".join(filter(None, [Path(recipe).stem, arm, "tiny" if tiny else None, f"seed{config.seed}"]))
    folder = run or Path("runs") / name
    if tiny:
        if dry_run:
            raise ConfigError("--tiny runs the recipe and --dry-run does not; give one of them")
        with tiny_run(config, folder / "tiny") as small:
            show_tiny(console, small)
            _train_and_show(console, small.config, folder)
    elif dry_run:
        _plan(console, config, recipe_notes(recipe, load_recipe(recipe)).gpus, folder)
    else:
        _train_and_show(console, config, folder)


def _plan(console: Console, config: Config, gpus: GpusConfig | None, folder: Path) -> None:
    sizes, prompts = model_sizes(config), prompt_lengths(config)
    if is_large(sizes):
        show_plan(console, config, sizes, None, folder)
        show_needs(console, config, estimate(config, sizes, prompts, gpus))
    else:
        show_plan(console, config, sizes, plan_memory(config, sizes, prompts.longest), folder)


def _train_and_show(console: Console, config: Config, folder: Path) -> None:
    with live_progress(console, config) as listen, closing(launch(config, folder, listen)) as trainer:
        if trainer.iteration == config.iterations:
            console.print(f"This run is finished ({config.iterations} iterations); use --run for a new one.")
        finished = trainer.train()
    show_result(console, config, RunFolder(folder).read("metrics.jsonl"), folder, finished)
