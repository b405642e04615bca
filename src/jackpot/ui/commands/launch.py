"""Implements `jackpot launch`, which prints what starts a run on a cluster."""

import re
from pathlib import Path

import typer

from jackpot.config.names import run_folder
from jackpot.config.recipes import resolve
from jackpot.core.errors import ConfigError
from jackpot.launch.checks import check_start
from jackpot.launch.local import model_paths
from jackpot.launch.slurm import Job, script, server_settings, without_replaced


def launch(
    recipe: str,
    overrides: list[str] | None,
    arm: str | None,
    run: Path | None,
    slurm: bool,
    nodes: int,
    servers: int,
    gpus: int,
    ranks: int | None,
    time: str,
) -> None:
    """Print the batch script of a run for SLURM."""
    if not slurm:
        raise ConfigError(
            "jackpot launch prints a batch script; say for which scheduler: --slurm. torchrun and Ray need none: "
            "docs/distributed.md"
        )
    given = overrides or []
    config = resolve(recipe, arm, given)
    folder = run or run_folder(recipe, arm, given, config.seed)
    job = Job(
        name="jackpot-" + re.sub(r"[^\w.=-]", "-", folder.name),
        nodes=nodes,
        servers=servers,
        gpus=gpus,
        ranks=ranks or max(1, gpus),
        time=time,
    )
    given = without_replaced(config, job, given) if servers else given
    text = script(config, job, [recipe, *(["--arm", arm] if arm else []), *given], str(folder))
    if servers:
        placeholders = ("engine.urls=http://127.0.0.1:8000", "engine.weights_folder=weights")
        config = resolve(recipe, arm, [*given, *server_settings(config, job), *placeholders])
    check_start(config, model_paths(config, None), nodes * job.ranks)
    typer.echo(text, nl=False)
