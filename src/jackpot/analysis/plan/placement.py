"""Says who goes where, and simulates a run on each placement of engines and learner on some GPUs.

Status: experimental.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from jackpot.analysis.plan.cost_model import GPUS, Drafts, EngineSpeed, Gpu, Hours, Lengths
from jackpot.analysis.plan.estimate import Estimator, ShareHours
from jackpot.analysis.plan.events import Cluster, Response, Simulated, Speed, simulate
from jackpot.analysis.plan.sharding import Blocks, Shard, shard, without_learner
from jackpot.config.engines import EngineConfig, ServerEngineConfig, VLLMEngineConfig
from jackpot.config.run import Config
from jackpot.core.errors import ConfigError

AHEAD = (0, 1, 3, 5, 7)  # values of batch.ahead that are simulated; an even one takes as long as the one before it
IN_FLIGHT = (1, 3, 5)  # those that are simulated with engines that take weights while they generate
TRIED = 16  # splits at most of a number of GPUs; of fewer GPUs all
HERE = "this process"
BETWEEN_DEATHS = (3600.0, 600.0)  # mean seconds between two deaths of one engine that are simulated
RESTART = 120.0
"""Seconds from the death of an engine until it generates again. Assumed."""


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
    iterations: int
    evaluating: float  # hours of all evaluations, in which nothing else is done
    by_ahead: dict[int, Simulated]  # iterations with each batch.ahead; of shared GPUs only 0; none without the room
    in_flight: dict[int, Simulated]  # the same if engines took weights while they generate, which nothing does today

    def hours(self, ahead: int) -> float:
        """Return the hours of the whole run, evaluations included."""
        return self.by_ahead[ahead].seconds * self.iterations / 3600 + self.evaluating


class ClusterPlan(NamedTuple):
    """Holds the simulations of a run on all placements on some GPUs."""

    kind: str  # name of the GPU, a key of GPUS
    lengths: Lengths  # of prompts and responses
    drafts: Drafts | None  # that the policy's engine verifies
    arithmetic: Hours | None  # of the shared placement as `--dry-run` counts it; None where it has no room
    micro_batches: int  # of an optimizer step, if all are full
    runs: list[PlacedRun]  # of placements that have the room, the shared one first
    no_room: list[Placement]
    deaths: dict[float, Simulated]  # of the placement with the shortest iterations, by mean seconds between two deaths

    def cheapest(self, ahead: Sequence[int] = AHEAD) -> tuple[PlacedRun, int]:
        """Return the placement and the batch.ahead among the given ones with the fewest hours, evaluations included.

        Raises:
            ConfigError: no placement has the room.
        """
        found = [(run.hours(number), number, run) for run in self.runs for number in ahead if number in run.by_ahead]
        if not found:
            raise ConfigError(f"the run fits on no placement on these GPUs ({self.kind}); give more of them by --gpus")
        _, number, run = min(found, key=lambda one: one[:2])
        return run, number

    def fastest(self, ahead: Sequence[int] = AHEAD, in_flight: bool = False) -> tuple[PlacedRun, int]:
        """Return the placement and the batch.ahead among the given ones with the shortest iterations."""
        found = [
            (one.seconds, number, run)
            for run in self.runs
            for number, one in (run.in_flight if in_flight else run.by_ahead).items()
            if number in ahead
        ]
        _, number, run = min(found, key=lambda one: one[:2])
        return run, number


class Placements:
    """Simulates a run on placements of engines and learner.

    Args:
        plan: with the mean response that a run measured, or that was given.
        seed: of lengths of responses, and of deaths.
    """

    def __init__(self, config: Config, plan: Estimator, kind: str, seed: int) -> None:
        self._config, self._plan, self._kind, self._gpu, self._seed = config, plan, kind, GPUS[kind], seed
        self._needs = without_learner(plan.needs)
        self._scale = plan.lengths.scale
        self._drawn: dict[int, list[Response]] = {}
        batch, lengths = config.batch, plan.lengths
        step = (batch.mini_batch_size or batch.rollouts) * (lengths.prompt + lengths.mean)
        self.micro_batches = math.ceil(step / batch.micro_batch_tokens)

    def plan(self, gpus: int, restart: float, show: Callable[[str], None] = lambda text: None) -> ClusterPlan:
        """Simulate the shared placement and every split of `gpus` GPUs that has the room.

        Of more than `TRIED` GPUs splits are tried in equal steps.

        Args:
            restart: seconds from the death of an engine until it generates again.
            show: called with what is simulated next.

        Raises:
            ConfigError: no placement has the room.
            ModelError: as `plan_memory`.
        """
        runs, no_room = [], []
        for placement in tried(gpus):
            show(f"simulating {placement} of {gpus} GPUs")
            run = self._run(placement)
            if run.by_ahead:
                runs.append(run)
            else:
                no_room.append(placement)
        shared = self._plan.row(self._kind, gpus).hours if runs and runs[0].placement.is_shared else None
        found = ClusterPlan(
            self._kind, self._plan.lengths, self._plan.drafts, shared, self.micro_batches, runs, no_room, {}
        )
        found.cheapest()  # there is one
        fastest, ahead = found.fastest()
        show(f"simulating deaths of engines on {fastest.placement}")
        return found._replace(deaths=self._deaths(fastest, ahead, restart))

    def _run(self, placement: Placement) -> PlacedRun:
        """Return what the run takes on a placement; without simulations where it has no room."""
        memory, train, gpu = self._plan.memory, placement.training, self._gpu
        if placement.is_shared:
            generating = training = self._plan.shard(self._kind, train)
        else:
            alone = replace(memory, weights=0, optimizer=0, gradients=0, training=0)
            generating = shard(alone, Blocks(0, 0, 0, 0), self._needs, gpu, placement.generating)
            offloads = self._config.placement.offload
            training = shard(replace(memory, generation=0), self._plan.blocks, {}, gpu, train, offloads)
        fits = generating.fits and training.fits
        ahead = () if not fits else AHEAD[:1] if placement.is_shared else AHEAD
        in_flight = [one for one in ahead if one in IN_FLIGHT]
        return PlacedRun(
            placement=placement,
            generating=generating,
            training=training,
            iterations=self._config.iterations,
            evaluating=self._plan.evaluating(self._generators(placement)) if fits else 0.0,
            by_ahead={one: self.simulate(self.cluster(placement, one)) for one in ahead},
            in_flight={one: self.simulate(replace(self.cluster(placement, one), in_flight=True)) for one in in_flight},
        )

    def cluster(self, placement: Placement, ahead: int) -> Cluster:
        """Return engines and learner of a placement."""
        shares, iterations = self._generators(placement), self._config.iterations
        speeds = [shares.rollout_model]
        if self._config.is_mixed:
            speeds.append(replace(shares.beside, drafts=self._plan.drafts))
        spread = max(speed.gpus for speed in speeds)  # of engines that take turns, on the same GPUs
        busy = min(placement.training, self.micro_batches)  # a rank without a micro-batch only waits
        hours = self._plan.run_hours(self._plan.shares(self._gpu, busy))
        return Cluster(
            engines=placement.generating // spread,
            models=[self._speed(replace(speed, gpus=spread), self._gpu) for speed in speeds],
            prompt=self._plan.lengths.prompt,
            training=hours.training * 3600 / iterations,
            sending=hours.sending * 3600 / iterations,
            ahead=ahead,
            seed=self._seed,
        )

    def simulate(self, cluster: Cluster, times: int = 3) -> Simulated:
        """Simulate `times` as many batches as are begun at once, at least 12, after those that fill the cluster."""
        first = 2 * (cluster.ahead + 1)
        count = first + max(12, times * (cluster.ahead + 1)) + cluster.ahead
        return simulate(cluster, [self.batch(number) for number in range(count)], first)

    def _generators(self, placement: Placement) -> ShareHours:
        needs = None if placement.is_shared else self._needs
        return self._plan.shares(self._gpu, placement.generating, needs)

    def _speed(self, engine: EngineSpeed, gpu: Gpu) -> Speed:
        lengths = self._plan.lengths
        return Speed(
            decode=engine.decoding(gpu).seconds,
            prefill=engine.prefill(lengths.prompt),
            slots=int(engine.concurrent(math.inf, lengths)),
        )

    def batch(self, number: int) -> list[Response]:
        """Return the responses of a batch; the shares of the models are those of an iteration anywhere in the run."""
        if number not in self._drawn:
            config = self._config
            draws = random.Random(f"{self._seed}/{number}")
            iteration = 1 + int(draws.random() * config.iterations)
            share = config.rollout_model.share_at(iteration) if config.rollout_model and config.is_mixed else 1.0
            count = round(config.batch.rollouts * self._plan.work().generated)
            own = round(share * count)
            self._drawn[number] = [Response(self._length(draws), int(place >= own)) for place in range(count)]
        return self._drawn[number]

    def _length(self, draws: random.Random) -> int:
        """Draw the length of a response that ends after each token with one probability, or at the limit."""
        limit = self._plan.lengths.limit
        return limit if math.isinf(self._scale) else min(limit, math.ceil(draws.expovariate(1 / self._scale)))

    def _deaths(self, run: PlacedRun, ahead: int, restart: float) -> dict[float, Simulated]:
        """Return the simulations of a placement by the mean seconds between two deaths of one engine."""
        cluster, found = replace(self.cluster(run.placement, ahead), restart=restart), {}
        for between in (math.inf, *BETWEEN_DEATHS):
            found[between] = self.simulate(replace(cluster, between_deaths=between), times=max(8, 96 // (ahead + 1)))
        return found


def tried(gpus: int) -> list[Placement]:
    """Return the shared placement and splits in equal steps, of up to `TRIED` GPUs all."""
    step = math.ceil(gpus / TRIED)
    splits = [Placement(number, gpus - number, False) for number in range(step, gpus, step)]
    return [Placement(gpus, gpus, True), *splits]


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
