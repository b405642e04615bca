"""Implements `jackpot plan`, which compares placements of engines and learner on some GPUs."""

import json
from pathlib import Path

import typer
from rich.console import Console

from jackpot.analysis.plan.cost_model import ACCEPTANCE
from jackpot.analysis.plan.estimate import Estimator
from jackpot.analysis.plan.placement import placed_runs
from jackpot.analysis.plan.sizes import model_sizes, prompt_lengths
from jackpot.config.published import GpusConfig
from jackpot.config.recipes import load_recipe, recipe_notes, resolve
from jackpot.config.run import Config
from jackpot.core.errors import ConfigError
from jackpot.launch.checks import check_start
from jackpot.launch.local import model_paths
from jackpot.training.run.folder import RunFolder, run_config
from jackpot.ui.results import to_json
from jackpot.ui.terminal.placements import plan_numbers, show_placements
from jackpot.ui.terminal.progress import status

_NEWEST = 4  # the share of a run's iterations that its mean response is taken from is one in so many


def plan(
    recipe: str,
    overrides: list[str] | None,
    arm: str | None,
    gpus: int | None,
    kind: str | None,
    run: Path | None,
    response_length: float | None,
    as_json: bool,
) -> None:
    """Count the hours of the recipe on every placement; print the cheapest and a table of all, or JSON."""
    console = Console(stderr=as_json)
    config = resolve(recipe, arm, overrides or [])
    response, source = _response(config, run, response_length)
    acceptance, accepted = _acceptance(run)
    sources = {"response": source, "acceptance": accepted}
    check_start(config, model_paths(config, None), 1)
    named = recipe_notes(recipe, load_recipe(recipe)).gpus
    machine = GpusConfig.model_validate(
        {"kind": kind or (named.kind if named else "H100"), "count": gpus or (named.count if named else 8)}
    )
    with status(console, "counting memory"):
        prompts = prompt_lengths(config)
        estimator = Estimator(config, model_sizes(config), prompts, response, acceptance)
        runs = placed_runs(config, estimator, machine.kind, machine.count)
    if as_json:
        numbers = plan_numbers(estimator, machine.kind, runs, sources)
        typer.echo(json.dumps(to_json(numbers), indent=2, allow_nan=False))
    else:
        show_placements(console, config, estimator, machine.kind, runs, prompts, sources)


def _response(config: Config, run: Path | None, given: float | None) -> tuple[float, str]:
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
    return measured or (ACCEPTANCE, "assumed; --run FOLDER of a run with engine.draft measures it")


def _newest_mean(run: Path, metric: str) -> tuple[float, str] | None:
    """Return the mean of a metric over a run's newest iterations, and which these are; None where it has none.

    Raises:
        CheckpointError: `run` is not a run folder.
    """
    run_config(run)
    values = [line[metric] for line in RunFolder(run).read("metrics.jsonl") if line.get(metric) is not None]
    newest = values[-max(1, len(values) // _NEWEST) :]
    return (sum(newest) / len(newest), f"the mean of the last {len(newest)} iterations of {run}") if newest else None
