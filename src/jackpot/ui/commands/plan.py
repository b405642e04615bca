"""Implements `jackpot plan`, which compares placements of engines and learner on some GPUs."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from jackpot.core.errors import ConfigError
from jackpot.ui.arguments import Arm, AsJson, Overrides, Recipe
from jackpot.ui.lazy import lazy
from jackpot.ui.terminal.progress import status

with lazy():
    from jackpot.analysis.plan import cost_model, placement, sizes
    from jackpot.analysis.plan import estimate as estimating
    from jackpot.config import config as run_settings
    from jackpot.config import published, recipes
    from jackpot.launch import checks
    from jackpot.training.run_folder import folder as run_folder
    from jackpot.ui import results
    from jackpot.ui.terminal import placements

_NEWEST = 4  # the share of a run's iterations that its mean response is taken from is one in so many


def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    arm: Arm = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Number of GPUs; default those that the recipe names, or 8.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="A6000, A100, H100 or H200; default what the recipe names, or H100.")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(help="Run folder whose responses give the mean length, and its drafts their acceptance."),
    ] = None,
    response_length: Annotated[
        float | None, typer.Option(help="Mean length of responses in tokens, in place of --run.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare placements on a number of GPUs: how many generate, how many train, and which is cheapest.

    Counts the hours of every placement that fits the memory, with several values of batch.ahead, by the arithmetic of
    --dry-run (docs/cost.md). Nothing is loaded or run.

    Status: experimental. Its hours were never compared with a run of ours on GPUs.
    """
    console = Console(stderr=as_json)
    config = recipes.resolve(recipe, arm, overrides or [])
    response, source = _response(config, run, response_length)
    acceptance, accepted = _acceptance(run)
    sources = {"response": source, "acceptance": accepted}
    checks.check_start(config, config.model_paths(), 1)
    named = recipes.recipe_notes(recipe, recipes.load_recipe(recipe)).gpus
    machine = published.GpusConfig.model_validate(
        {"kind": kind or (named.kind if named else "H100"), "count": gpus or (named.count if named else 8)}
    )
    with status(console, "counting memory"):
        prompts = sizes.prompt_lengths(config)
        estimator = estimating.Estimator(config, sizes.model_sizes(config), prompts, response, acceptance)
        runs = placement.placed_runs(config, estimator, machine.kind, machine.count)
    if as_json:
        numbers = placements.plan_numbers(estimator, machine.kind, runs, sources)
        typer.echo(json.dumps(results.to_json(numbers), indent=2, allow_nan=False))
    else:
        placements.show_placements(console, config, estimator, machine.kind, runs, prompts, sources)


def check_length(run: Path | None, response_length: float | None, **_: Any) -> None:
    """Check, before anything is loaded, that one of the options gives the mean length of responses.

    Raises:
        ConfigError: none of them does, or both do.
    """
    if (run is None) == (response_length is None):
        raise ConfigError(
            "the plan needs the mean length of responses, which decides its numbers; give one of --run FOLDER, whose "
            "metrics have it, and --response-length TOKENS. jackpot train RECIPE --dry-run guesses it from "
            "sampling.max_new_tokens"
        )


def _response(config: "run_settings.Config", run: Path | None, given: float | None) -> tuple[float, str]:
    """Return the mean length of a response in tokens, and where it is from.

    Raises:
        CheckpointError: `run` is not a run folder.
        ConfigError: the run has no iteration yet, or the mean is beyond the limit.
    """
    limit = config.sampling.max_new_tokens
    measured = (given, "given by --response-length") if run is None else _newest_mean(run, "response/tokens")
    if measured is None:
        raise ConfigError(f"{run} has no iteration with responses yet; give another run or --response-length")
    mean, source = measured
    if not 1 <= mean <= limit:
        raise ConfigError(
            f"responses of {mean:,.0f} tokens in the mean ({source}) do not fit sampling.max_new_tokens {limit:,}; "
            "give a mean between 1 and that, or set sampling.max_new_tokens=N"
        )
    return mean, source


def _acceptance(run: Path | None) -> tuple[float, str]:
    """Return the chance that a draft is accepted, and where it is from: a run that drafted, or an assumption."""
    measured = _newest_mean(run, "draft/acceptance") if run else None
    return measured or (cost_model.ACCEPTANCE, "assumed; --run FOLDER of a run with engine.draft measures it")


def _newest_mean(run: Path, metric: str) -> tuple[float, str] | None:
    """Return the mean of a metric over a run's newest iterations, and which these are; None where it has none.

    Raises:
        CheckpointError: `run` is not a run folder.
    """
    run_folder.run_config(run)
    values = [line[metric] for line in run_folder.RunFolder(run).read("metrics.jsonl") if line.get(metric) is not None]
    newest = values[-max(1, len(values) // _NEWEST) :]
    return (sum(newest) / len(newest), f"the mean of the last {len(newest)} iterations of {run}") if newest else None
