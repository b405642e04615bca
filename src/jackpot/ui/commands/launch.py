"""Implements `jackpot launch`, which prints what starts a run on a cluster."""

import re
from pathlib import Path
from typing import Annotated

import typer

from jackpot.core.errors import ConfigError
from jackpot.ui.arguments import Arm, Overrides, Recipe
from jackpot.ui.lazy import lazy

with lazy():
    from jackpot.config import names, processes, recipes
    from jackpot.launch import checks
    from jackpot.launch import slurm as cluster


def _require_slurm(is_asked: bool) -> bool:
    """Refuse a command line without --slurm."""
    if not is_asked:
        raise ConfigError(
            "jackpot launch prints a batch script for a scheduler: add --slurm. torchrun and Ray need no such script "
            "(docs/distributed.md)"
        )
    return is_asked


def launch(
    recipe: Recipe,
    overrides: Overrides = None,
    arm: Arm = None,
    run: Annotated[
        Path | None, typer.Option(help="Run folder, on a disk that all nodes see; default that of jackpot train.")
    ] = None,
    slurm: Annotated[
        bool, typer.Option("--slurm", callback=_require_slurm, help="Print a batch script for SLURM's sbatch.")
    ] = False,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes.")] = 1,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of each node; 0: CPUs only.")] = 8,
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks on each node; default one for each GPU.")] = None,
    time: Annotated[str, typer.Option(help="Time limit of the job: hours:minutes:seconds.")] = "24:00:00",
) -> None:
    """Print the batch script that trains a recipe on a SLURM cluster, with torchrun on every node.

    `jackpot launch RECIPE --slurm > job.sh; sbatch job.sh`. The same script continues the run; options of sbatch, such
    as --partition, are given to it: docs/distributed.md.

    Status: never run on its target (a SLURM cluster).
    """
    changes = overrides or []
    config = recipes.resolve(recipe, arm, changes)
    if config.placement.launcher == "ray":
        raise ConfigError(
            "placement.launcher is 'ray', and the batch script starts ranks with torchrun; leave placement.launcher "
            "and placement.ranks out (--ranks counts them here), or have jackpot train start the run without a script"
        )
    folder = run or names.run_folder(recipe, arm, changes, config.seed)

    ranks = ranks or max(1, gpus)
    text = cluster.script(
        [recipe, *(["--arm", arm] if arm else []), *changes],
        str(folder),
        name="jackpot-" + re.sub(r"[^\w.=-]", "-", folder.name),
        nodes=nodes,
        gpus=gpus,
        ranks=ranks,
        time=time,
    )

    # The ranks check the start again when the job begins; here an error comes before the job waits in the queue.
    placed = processes.place_engines(config, ranks=nodes * ranks, on_gpu=gpus > 0, local_ranks=ranks)
    checks.check_start(placed, placed.model_paths(), ranks=nodes * ranks)

    typer.echo(text, nl=False)
