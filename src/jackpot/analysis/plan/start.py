"""The command that starts a planned run, after all checks that the start itself will make."""

from collections.abc import Sequence
from pathlib import Path
from shlex import join, quote

from jackpot.analysis.plan.cost_model import GPUS
from jackpot.analysis.plan.estimate import CostEstimate
from jackpot.analysis.plan.sharding import degree, engine_needs
from jackpot.config.config import Config
from jackpot.config.names import run_folder
from jackpot.config.processes import place_engines
from jackpot.config.published import GpusConfig
from jackpot.config.recipes import resolve
from jackpot.core.process_rank import process_rank
from jackpot.launch.build import learner_paths
from jackpot.launch.checks import check_start
from jackpot.models.hub import is_downloaded

MACHINE = 8  # most GPUs of one machine; on several machines, Ray places engines beside the ranks
NO_MACHINE = (
    "No command trains this: it fits on none of these GPUs, or an engine does not, which in the process that trains "
    "computes on one GPU. Take GPUs with more memory, give vllm more of it (engine.gpu_memory_utilization) and plan "
    "again, or start servers with tensor parallelism and take engine=vllm_server (docs/vllm.md)."
)


def start(recipe: str, arm: str | None, overrides: Sequence[str], run: Path | None, gpus: int) -> str:
    """Return the command that trains a recipe on `gpus` GPUs, each of which has a rank and an engine, as in the plan.

    Args:
        recipe: name of the recipe, or the path of its file.
        arm: name of an arm; None: the recipe alone.
        overrides: settings as key=value, as they were typed.
        run: the run folder, if one was typed.
        gpus: number of GPUs.

    Raises:
        JackpotError: the run would refuse to start, as `launch.checks.check_start` says.
    """
    # The launcher may need further settings, so the run is checked with these.
    config = resolve(recipe, arm, overrides)
    program, added = _launcher(config, gpus)
    placed = place_engines(resolve(recipe, arm, [*overrides, *added]), gpus, on_gpu=True)
    check_start(placed, placed.model_paths(), gpus)

    if added and run is None:  # the default folder is named after settings, and must not change with the added ones
        run = run_folder(recipe, arm, overrides, config.seed)
    words = [recipe, *(["--arm", arm] if arm else []), *overrides, *added, *(["--run", str(run)] if run else [])]
    return join([*program, "train", *words])


def _launcher(config: Config, gpus: int) -> tuple[list[str], list[str]]:
    """Return the words before `train` in the command that starts `gpus` ranks, and the settings that must be added."""
    if gpus == 1 or config.placement.launcher == "ray":
        return ["jackpot"], []
    if gpus <= MACHINE or process_rank().size > 1:
        return ["torchrun", "--nproc-per-node", str(gpus), "-m", "--", "jackpot"], []
    return ["jackpot"], ["placement.launcher=ray", f"placement.ranks={gpus}"]


def machines(config: Config, needs: CostEstimate, is_asked: bool) -> list[GpusConfig]:
    """Return the GPUs on which a large run can start.

    These are the GPUs that the user asked about. If the user asked about none, they are the GPUs that the recipe names
    (else one H100), or if the run does not fit on those, the fewest of a kind on which it fits; then those of this
    machine. Left out are GPUs on which the run does not fit, or on which an engine needs more than one of them.

    Args:
        config: settings of the run.
        needs: estimates of the run on several kinds and numbers of GPUs.
        is_asked: whether the user asked about GPUs, which are then the stated ones.
    """
    stated = needs.stated
    counts = [(stated.kind, stated.shard.gpus if stated.shard.fits else 0)]  # (kind, number of GPUs; 0: no fit)
    if not is_asked:
        # Of the stated GPUs and the fewest of each kind, the first on which the run fits; then this machine's GPUs.
        fitting = [(kind, count) for kind, count in (*counts, *needs.fewest.items()) if count]
        counts = [*fitting[:1], *((row.kind, row.shard.gpus) for row in needs.this_machine if row.shard.fits)]

    # `degree` returns, for a single GPU, 1 if a vLLM engine fits on it and 0 if not; for any other engine 1.
    engines = engine_needs(config, needs.prompts.longest).values()
    return [
        GpusConfig.model_validate({"kind": kind, "count": count})
        for kind, count in dict.fromkeys(counts)
        if count and all(degree(engine, GPUS[kind], gpus=1) for engine in engines)
    ]


def downloads(config: Config) -> list[str]:
    """Return the commands that download those models of a run that are only on the hub.

    Models that are downloaded before the start are there for all ranks, which would else all download them.
    """
    paths = dict.fromkeys(learner_paths(config).values())
    return [f"hf download {quote(path)}" for path in paths if not is_downloaded(path)]
