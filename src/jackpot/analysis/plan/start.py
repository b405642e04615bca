"""Says what to type so that a planned run starts, and asks what the start will ask (`launch.checks.check_start`)."""

from collections.abc import Sequence
from pathlib import Path
from shlex import join
from typing import NamedTuple

from jackpot.analysis.plan.cost_model import GPUS
from jackpot.analysis.plan.estimate import CostEstimate
from jackpot.analysis.plan.sharding import degree, engine_needs
from jackpot.config.config import Config
from jackpot.config.engines import check_ranks, is_remote, sleeps
from jackpot.config.names import run_folder
from jackpot.config.published import GpusConfig
from jackpot.config.recipes import resolve
from jackpot.core.errors import ConfigError
from jackpot.core.process_rank import process_rank
from jackpot.launch.checks import check_start

MACHINE = 8  # most GPUs of one machine; on more than one, Ray places engines beside the ranks
NO_MACHINE = (
    "No command trains this: it fits on none of these GPUs, or an engine does not, which in this version computes on "
    "one GPU. Take GPUs with more memory, or give vllm more of it (engine.gpu_memory_utilization) and plan again."
)


class Start(NamedTuple):
    """Holds what starts a run on some GPUs."""

    command: str
    refusal: str  # of the settings as they were typed, on as many processes; empty where they start


def start(recipe: str, arm: str | None, overrides: Sequence[str], run: Path | None, gpus: int) -> Start:
    """Return what trains a recipe on so many GPUs, each with a rank and an engine, as memory and hours are counted.

    Args:
        run: the run folder, where it was typed.

    Raises:
        JackpotError: as `check_start`; nothing starts it.
    """
    config = resolve(recipe, arm, overrides)
    program, added = _placed(config, gpus)
    check_start(resolve(recipe, arm, [*overrides, *added]), config.model_paths(), gpus)
    if added and run is None:  # a folder is named after settings: it stays that of the plan
        run = run_folder(recipe, arm, overrides, config.seed)
    words = [recipe, *(["--arm", arm] if arm else []), *overrides, *added, *(["--run", str(run)] if run else [])]
    command = join([*program, "train", *words])
    try:
        check_ranks(config.engine, config.evaluation.engine, processes=config.placement.engines, ranks=gpus)
    except ConfigError as error:
        return Start(command, str(error))
    return Start(command, "")


def _placed(config: Config, gpus: int) -> tuple[list[str], list[str]]:
    """Return the program that starts as many ranks, and settings of placement that it needs beside the typed ones."""
    if gpus == 1 or config.placement.launcher == "ray":
        return ["jackpot"], []
    torchrun = ["torchrun", "--nproc-per-node", str(gpus), "-m", "--", "jackpot"]
    if process_rank().size > 1:
        return torchrun, []
    engines = [config.engine, config.evaluation.engine or config.engine]
    has_own = config.placement.engines or all(is_remote(one) for one in engines)
    added = [] if has_own else [f"placement.engines={gpus}"]
    if gpus <= MACHINE:
        return torchrun, added
    sleep = [] if has_own or any(map(sleeps, engines)) else ["engine.enable_sleep_mode=true"]  # on the ranks' GPUs
    return ["jackpot"], ["placement.launcher=ray", f"placement.ranks={gpus}", *added, *sleep]


def machine(config: Config, needs: CostEstimate) -> GpusConfig | None:
    """Return the GPUs on which a large run starts: those that its recipe names, else the fewest of a kind.

    None where it fits on none, or an engine needs more than one of them, which no engine of this version has.
    """
    stated = needs.stated
    wanted = [(stated.kind, stated.shard.gpus if stated.shard.fits else 0), *needs.fewest.items()]
    engines = engine_needs(config, needs.prompts.longest).values()
    for kind, count in wanted:
        if count and all(degree(engine, GPUS[kind], 1) for engine in engines):
            return GpusConfig.model_validate({"kind": kind, "count": count})
    return None
