"""Compares placements of engines and learner on some GPUs by arithmetic: which generate, which train (docs/cost.md).

    python -m research.placements joint_8b --gpus 8 --response-length 2048

The formulas are those of `jackpot train RECIPE --dry-run`, whose hours are those of shared GPUs. Nothing is loaded.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rich.console import Console

from jackpot.analysis.plan.cost_model import GPUS, Gpu, Hours
from jackpot.analysis.plan.estimate import Estimator, without_learner
from jackpot.analysis.plan.sharding import Blocks, Shard, shard
from jackpot.analysis.plan.sizes import model_sizes, prompt_lengths
from jackpot.config.batch import batches_in_reserve
from jackpot.config.config import Config
from jackpot.config.recipes import resolve
from jackpot.core.errors import ConfigError
from jackpot.ui.terminal.output import print_line, show_table

AHEAD = (0, 1, 3, 7)  # values of batch.ahead that are compared; an even one takes as long as the one before it
TRIED = 16  # splits at most of a number of GPUs; of fewer GPUs all
GB = 1e9
_COLUMNS = ("generate + train", "GB each", *(f"ahead {ahead}" for ahead in AHEAD), "eval h", "hours")


class Placement(NamedTuple):
    """Names the GPUs that generate and those that train: two groups, or the same GPUs, one after the other."""

    generating: int
    training: int
    is_shared: bool

    def __str__(self) -> str:
        return "shared" if self.is_shared else f"{self.generating} + {self.training}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedRun:
    """Holds what a run takes on one placement."""

    placement: Placement
    generating: Shard  # memory of each GPU that generates; of shared ones the same as `training`
    training: Shard
    by_ahead: dict[int, Hours]  # of the run with each batch.ahead; of shared GPUs only 0; none without the room


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--arm")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--kind", choices=GPUS, default="H100")
    parser.add_argument("--response-length", type=float, required=True, help="mean length of responses, tokens")
    typed = parser.parse_intermixed_args()

    config = resolve(typed.recipe, typed.arm, typed.overrides)
    plan = Estimator(config, model_sizes(config), prompt_lengths(config), typed.response_length)
    runs = placed_runs(config, plan, typed.kind, typed.gpus)

    console = Console()
    title = f"Seconds an iteration on {typed.gpus} {typed.kind}, by arithmetic (docs/cost.md)"
    show_table(console, title, _COLUMNS, [_row(config, run) for run in runs], _COLUMNS[1:])
    best, ahead = cheapest(runs)
    print_line(console, f"Cheapest: {best.placement}, batch.ahead {ahead}: {best.by_ahead[ahead].all:.1f} hours.")


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


def cheapest(runs: Sequence[PlacedRun]) -> tuple[PlacedRun, int]:
    """Return the placement and the batch.ahead with the fewest hours, evaluations included."""
    hours = [(run.by_ahead[ahead].all, ahead, run) for run in runs for ahead in run.by_ahead]
    _, ahead, run = min(hours, key=lambda row: row[:2])
    return run, ahead


def _row(config: Config, run: PlacedRun) -> list[str]:
    if not run.by_ahead:
        return [str(run.placement), "OOM", *["-"] * (len(_COLUMNS) - 2)]
    memory = [f"{shard.peak / GB:.0f}" for shard in (run.generating, run.training)]
    each = memory[0] if run.placement.is_shared else " + ".join(memory)
    seconds = [
        f"{run.by_ahead[ahead].iterations * 3600 / config.iterations:.1f}" if ahead in run.by_ahead else "-"
        for ahead in AHEAD
    ]
    best = min(run.by_ahead.values(), key=lambda hours: hours.all)
    return [str(run.placement), each, *seconds, f"{best.evaluating:.1f}", f"{best.all:.1f}"]


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
        by_ahead={ahead: split_hours(plan, gpu, split.generating, split.training, ahead) for ahead in AHEAD if fits},
    )


def split_hours(plan: Estimator, gpu: Gpu, generating: int, training: int, ahead: int) -> Hours:
    """Return the hours of the run where some GPUs generate and others train.

    Its generation is what the learner waits for it: all of it without `ahead`, as the two then take turns.
    """
    shares = plan.shares(gpu, generating, without_learner(plan.needs))
    batches = batches_at_once(ahead)
    at_once = replace(shares.work, sequences=batches * shares.work.sequences)

    in_turn = plan.run_hours(replace(shares, work=at_once))
    in_turn = in_turn._replace(
        generation=in_turn.generation / batches,
        training=plan.run_hours(plan.shares(gpu, training)).training,
        evaluating=plan.evaluating(shares),
    )
    return overlapped(in_turn, batches) if ahead else in_turn


def batches_at_once(ahead: int) -> int:
    """Return how many rollout batches engines generate between two updates of their weights.

    Training on a batch begins with `batches_in_reserve` later ones at least, `ahead` at most; weights are sent again
    where no more than the reserve is left (`rollout/sampler.py`).
    """
    return ahead - batches_in_reserve(ahead) + 1


def overlapped(in_turn: Hours, batches: int) -> Hours:
    """Return the hours of a run whose engines generate, on GPUs of their own, while the learner trains.

    Weights are sent once for all batches that are generated at once, and nothing else is done meanwhile.

    Returns:
        As generation, what the learner waits for it.

    Args:
        in_turn: if all were done one after the other, with weights sent for each batch.
        batches: generated at once, `batches_at_once`.
    """
    waiting = max(0.0, in_turn.generation - in_turn.training)
    return in_turn._replace(generation=waiting, sending=in_turn.sending / batches)


if __name__ == "__main__":
    main()
