"""Compares placements of engines and learner on some GPUs, and says who goes where in a run.

Status: experimental.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from jackpot.analysis.plan.cost_model import GPUS, Hours
from jackpot.analysis.plan.estimate import Estimator
from jackpot.analysis.plan.sharding import Blocks, Shard, shard, without_learner
from jackpot.config.config import Config
from jackpot.config.engines import EngineConfig, ServerEngineConfig, VLLMEngineConfig
from jackpot.core.errors import ConfigError

AHEAD = (0, 1, 3, 7)  # values of batch.ahead that are compared; an even one takes as long as the one before it
TRIED = 16  # splits at most of a number of GPUs; of fewer GPUs all
HERE = "this process"


class Placement(NamedTuple):
    """Names the GPUs that generate and those that train: two groups, or the same GPUs, one after the other."""

    generating: int
    training: int
    is_shared: bool

    def __str__(self) -> str:
        return "shared" if self.is_shared else f"{self.generating} + {self.training}"

    @property
    def gpus(self) -> int:
        """Return the number of all GPUs."""
        return self.training if self.is_shared else self.generating + self.training


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedRun:
    """Holds what a run takes on one placement."""

    placement: Placement
    generating: Shard  # memory of each GPU that generates; of shared ones the same as `training`
    training: Shard
    by_ahead: dict[int, Hours]  # of the run with each batch.ahead; of shared GPUs only 0; none without the room


def placed_runs(config: Config, plan: Estimator, kind: str, gpus: int) -> list[PlacedRun]:
    """Return the run on shared GPUs, then on every split of `gpus` GPUs; of more than `TRIED` in equal steps.

    Raises:
        ConfigError: no placement has the room.
        ModelError: as `plan_memory`.
    """
    step = math.ceil(gpus / TRIED)
    splits = [Placement(generating, gpus - generating, False) for generating in range(step, gpus, step)]
    runs = [_shared(plan, kind, gpus), *(_split(config, plan, kind, split) for split in splits)]
    if not any(run.by_ahead for run in runs):
        raise ConfigError(f"the run fits on no placement on these GPUs ({kind}); give more of them by --gpus")
    return runs


def cheapest(runs: Sequence[PlacedRun], ahead: Sequence[int] = AHEAD) -> tuple[PlacedRun, int]:
    """Return the placement and the batch.ahead, one of those given, with the fewest hours, evaluations included."""
    hours = [(run.by_ahead[number].all, number, run) for run in runs for number in ahead if number in run.by_ahead]
    _, number, run = min(hours, key=lambda row: row[:2])
    return run, number


def _shared(plan: Estimator, kind: str, gpus: int) -> PlacedRun:
    row = plan.row(kind, gpus)
    return PlacedRun(
        placement=Placement(gpus, gpus, True),
        generating=row.shard,
        training=row.shard,
        by_ahead={0: row.hours} if row.hours else {},
    )


def _split(config: Config, plan: Estimator, kind: str, split: Placement) -> PlacedRun:
    gpu, memory = GPUS[kind], plan.memory

    engines = replace(memory, weights=0, optimizer=0, gradients=0, training=0)
    generating = shard(engines, Blocks(0, 0, 0, 0), without_learner(plan.needs), gpu, split.generating)
    learner, offloads = replace(memory, generation=0), config.placement.offload
    training = shard(learner, plan.blocks, {}, gpu, split.training, offloads)

    fits = generating.fits and training.fits
    return PlacedRun(
        placement=split,
        generating=generating,
        training=training,
        by_ahead={ahead: plan.split_hours(gpu, split.generating, split.training, ahead) for ahead in AHEAD if fits},
    )


def residents(config: Config, ranks: int) -> dict[str, list[str]]:
    """Return who goes where in a run of this version: what each place holds, by place.

    Args:
        ranks: that the learner is shared out to. The engines of this process are rank 0's.
    """
    here = HERE if ranks == 1 else "rank 0"
    models = ["policy", "rollout model" if config.rollout_model else "", "critic" if config.critic else ""]
    models.append("reference" if config.objective.reference else "")
    learner = f"learner of {', '.join(filter(None, models))}"
    places = {here: [learner if ranks == 1 else f"1/{ranks} of the {learner}"]}

    def add(settings: EngineConfig, holds: str) -> None:
        place = here
        if isinstance(settings, ServerEngineConfig):
            place = f"servers {', '.join(settings.urls)}"
        elif config.placement.engines:
            place = f"each of {config.placement.engines} engine processes"
            place += ", on the ranks' GPUs, asleep while these train" if config.shares_gpus else ""
        elif isinstance(settings, VLLMEngineConfig) and settings.device is not None:
            place = f"{here}, GPU {settings.device}"
        places.setdefault(place, []).append(f"{settings.name} engine of {holds}")

    role, settings = "rollout model" if config.rollout_model else "policy", config.evaluation.engine
    add(config.engine, f"{role}, for rollouts")
    if config.rollout_model or settings:
        add(settings or config.engine, "policy, for " + "rollouts and " * config.is_mixed + "evaluations")
    if ranks > 1:
        places["rank 1" if ranks == 2 else f"each of ranks 1 to {ranks - 1}"] = places[here][:1]
    return places
