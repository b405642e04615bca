"""The command line. Layer 7: parse, call, show; no logic of its own."""

import json
import sys
from contextlib import closing, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import transformers
import typer
from rich.console import Console
from rich.markup import escape

from jackpot.config import Config
from jackpot.console import (
    live_progress,
    show_answers,
    show_diagnosis,
    show_plan,
    show_report,
    show_result,
    starter_progress,
)
from jackpot.errors import JackpotError
from jackpot.lab.diagnose import diagnose as diagnosis_of
from jackpot.launch.local import launch
from jackpot.launch.plan import model_sizes
from jackpot.launch.sample import sample_answers
from jackpot.models.starters import make_starters
from jackpot.recipes import recipe_names, resolve
from jackpot.report.build import watch as watch_runs
from jackpot.report.build import write_report
from jackpot.report.tokens import MAX_TOKENS
from jackpot.telemetry import RunFolder, run_config

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Train a large language model by reinforcement learning on text that a smaller, cheaper model wrote.",
)

RecipeArgument = Annotated[
    str, typer.Argument(help=f"A recipe ({', '.join(recipe_names())}) or the path of a .yaml file.")
]


@app.command()
def train(
    recipe: RecipeArgument,
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings as key=value, e.g. iterations=20.")] = None,
    arm: Annotated[str | None, typer.Option(help="One of the recipe's arms.")] = None,
    run: Annotated[Path | None, typer.Option(help="Run folder; default runs/RECIPE-ARM-seedN.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
) -> None:
    """Train, or continue the run that is in the folder from its newest checkpoint that is not corrupt.

    Ctrl-C or SIGTERM stops after the iteration, with a checkpoint; the second one at once. A kill costs at most the
    iterations since the last checkpoint.

    Not yet run on a GPU.
    """
    console = Console()
    config = resolve(recipe, arm, overrides or [])
    folder = run or Path("runs") / "-".join(filter(None, [Path(recipe).stem, arm, f"seed{config.seed}"]))
    if dry_run:
        show_plan(console, config, model_sizes(config), folder)
        return
    finished = _train(console, config, folder)
    show_result(console, config, RunFolder(folder).read("metrics.jsonl"), folder, finished)


def _train(console: Console, config: Config, folder: Path) -> bool:
    with live_progress(console, config) as listen, closing(launch(config, folder, listen)) as trainer:
        if trainer.iteration == config.iterations:
            console.print(f"This run is finished ({config.iterations} iterations); use --run for a new one.")
        return trainer.train()


@app.command()
def sample(
    run: Annotated[Path, typer.Argument(help="The folder of a run with a checkpoint.")],
    problems: Annotated[int, typer.Option(min=1, help="How many held-out problems.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Of the sampling.")] = 0,
) -> None:
    """Show both models answering held-out problems, before and after training."""
    show_answers(Console(), sample_answers(run, problems, seed))


@app.command()
def diagnose(
    run: Annotated[Path, typer.Argument(help="The folder of a run, finished or still going.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say whether a run is healthy, or what is wrong, since when, which metric says so and what to try.

    Exit code 0: healthy, or too early to say; 1: sick; 2: no run there.
    """
    config, folder = run_config(run), RunFolder(run)
    found = diagnosis_of(folder.read("metrics.jsonl"), folder.read("events.jsonl"), config)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
    else:
        show_diagnosis(Console(), found)
    if found.verdict == "sick":
        raise typer.Exit(1)


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold some.")],
    out: Annotated[
        Path | None, typer.Option(help="The file; default report.html in or beside the run folders.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=0, help="Saved tokens in the page.")] = MAX_TOKENS,
    watch: Annotated[bool, typer.Option("--watch", help="Write it again while a run goes on; Ctrl-C ends.")] = False,
    every: Annotated[float, typer.Option(min=1.0, help="With --watch: seconds between two looks.")] = 10.0,
) -> None:
    """Write one HTML file about runs, finished or going on: every metric with arms overlaid, and every saved token."""
    tell = partial(show_report, Console())
    if not watch:
        tell(write_report(runs, out, max_tokens))
        return
    with suppress(KeyboardInterrupt):
        watch_runs(runs, out, max_tokens, every, tell)


@app.command()
def starter(
    folder: Annotated[Path, typer.Argument(help="Where to write the folders policy and rollout_model.")],
    seed: Annotated[int, typer.Option(min=0, help="Of weights and examples; 0 is what the package carries.")] = 0,
) -> None:
    """Make the two starter models again from nothing."""
    console = Console()
    with starter_progress(console) as progress:
        make_starters(folder, seed, progress)
    console.print(f"Wrote {folder / 'policy'} and {folder / 'rollout_model'}", soft_wrap=True)


def main() -> None:
    """Entry point: an error made by the user is printed, not traced."""
    transformers.utils.logging.disable_progress_bar()  # one bar for every model that is read would hide our own
    try:
        app()
    except JackpotError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(2)
