"""The summary of a run: what the run had spent, and how accurate its models were, at every evaluation."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from jackpot.analysis.diagnose.collapse import Collapse, collapse_of
from jackpot.config.changes import settings_of
from jackpot.config.config import Config
from jackpot.core.errors import CheckpointError
from jackpot.training.limits import problems_of
from jackpot.training.run_folder.environment import Environment
from jackpot.training.run_folder.folder import Measure, RunFolder, measure_of, run_config

Lines = Sequence[Mapping[str, Any]]
PHASES = ("rollout", "score", "train", "sync")  # phases of an iteration whose time counts: all but evaluations


class Spent(NamedTuple):
    """The costs of a run from its start to some moment, without its evaluations."""

    iterations: float
    flops: float  # FLOPs of generating the rollouts
    all_flops: float  # FLOPs of generating the rollouts and of training both models
    cpu_seconds: float  # processor time of the run's own process, seconds
    seconds: float  # wall-clock time, seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationPoint:
    """An evaluation of a run with the costs until then; means are over the iterations since the previous evaluation."""

    iteration: int
    sequences: float  # generated responses, also those that group filtering dropped
    tokens: float  # generated response tokens
    flops: float  # FLOPs of generating the responses
    training_flops: float  # FLOPs of training policy and rollout model
    seconds: float  # wall-clock time without evaluations, seconds
    cpu_seconds: float  # processor time of the run's own process without evaluations, seconds
    policy_accuracy: float  # accuracy of the policy, or its mean reward where `RunSummary.measure` is reward
    rollout_model_accuracy: float | None  # the same of the rollout model; None where the run has none
    acceptance: float | None  # mean acceptance probability of OBRS at the correction's lam
    kl: float | None  # KL(rollout model || policy), nats per token
    policy_accuracy_stderr: float | None = None  # standard error over problems; None in runs that did not log it

    @property
    def spent(self) -> Spent:
        """Return the costs of the run up to this evaluation."""
        return Spent(self.iteration, self.flops, self.flops + self.training_flops, self.cpu_seconds, self.seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """The evaluations, settings and environment of one seed of one arm."""

    arm: str
    seed: int
    points: tuple[EvaluationPoint, ...]  # at least one evaluation, in their order
    iterations: int  # number of iterations in the settings
    problems: int  # number of problems in each evaluation
    collapse: Collapse | None
    settings: dict[str, Any]  # the resolved config
    environment: dict[str, Any]
    measure: Measure = "accuracy"  # what `policy_accuracy` is; the mean reward for a task without a verdict
    sampling: str = "sampled"  # how the answers of evaluations were sampled, `Sampling.described`

    @property
    def last(self) -> EvaluationPoint:
        """Return the run's last evaluation."""
        return self.points[-1]

    @property
    def is_done(self) -> bool:
        """Return whether the run has finished or collapsed."""
        return self.collapse is not None or self.last.iteration >= self.iterations

    def spent_until(self, accuracy: float) -> Spent | None:
        """Return the costs of the run until its policy first reached an accuracy; None if the policy never did.

        Between two evaluations, accuracy and costs are taken to rise along straight lines.
        """
        if self.points[0].policy_accuracy >= accuracy:
            return self.points[0].spent

        for before, after in pairwise(self.points):
            if before.policy_accuracy < accuracy <= after.policy_accuracy:
                share = (accuracy - before.policy_accuracy) / (after.policy_accuracy - before.policy_accuracy)
                costs = zip(before.spent, after.spent, strict=True)
                return Spent(*(start + share * (end - start) for start, end in costs))

        return None

    def to_json(self) -> str:
        """Return the summary as one line of JSON."""
        return json.dumps(asdict(self), allow_nan=False)


def summarize(run: Path, arm: str) -> RunSummary:
    """Summarize the run in a folder, finished or not.

    Args:
        run: the run folder.
        arm: name of the run's arm.

    Raises:
        CheckpointError: the folder has no run, or the run has no evaluation yet.
    """
    config = run_config(run)
    folder = RunFolder(run)
    environment = Environment(run)
    lines = folder.read("metrics.jsonl")
    points = tuple(points_of(lines, config))
    if not points:
        raise CheckpointError(f"{run} has no evaluation yet; line 0 of metrics.jsonl is the first, so wait for it")

    return RunSummary(
        arm=arm,
        seed=config.seed,
        points=points,
        iterations=config.iterations,
        problems=problems_of(lines, config),
        collapse=collapse_of(lines, folder.read("events.jsonl"), config),
        settings=settings_of(config),
        environment=environment.newest | {"threads": environment.threads},
        measure=next(measure for line in lines if (measure := measure_of(line))),
        sampling=config.evaluation_sampling.described,
    )


def points_of(lines: Lines, config: Config) -> Iterable[EvaluationPoint]:
    """Yield one point for every evaluation in the lines of metrics.jsonl, in their order."""
    costs = ("sequences", "tokens", "flops", "training_flops", "seconds", "cpu_seconds")
    spent: dict[str, float] = dict.fromkeys(costs, 0.0)
    since: list[Mapping[str, Any]] = []  # lines since the previous evaluation

    for line in lines:
        for name, value in _spent(line, config).items():
            spent[name] += value

        since.append(line)
        if measure := measure_of(line):  # accuracy or reward; None: no evaluation was made here
            yield EvaluationPoint(
                iteration=line["iteration"],
                **spent,
                policy_accuracy=line[f"eval/policy_{measure}"],
                policy_accuracy_stderr=line.get(f"eval/policy_{measure}_stderr"),
                rollout_model_accuracy=line[f"eval/rollout_model_{measure}"] if config.rollout_model else None,
                acceptance=_mean(since, "obrs/acceptance"),
                kl=_mean(since, config.kl_metric),
            )
            since = []


def _spent(line: Mapping[str, Any], config: Config) -> dict[str, float]:
    """Return the costs of one iteration by name; line 0 is only an evaluation and has none."""
    if line["iteration"] == 0:
        return {}

    # `sampling/gen_batches`: how many batches were generated, several where groups are filtered; None counts as 1.
    return {
        "sequences": (line.get("sampling/gen_batches") or 1.0) * config.batch.rollouts,
        "tokens": line["tokens/rollout"],
        "flops": line["flops/rollout"],
        "training_flops": line["flops/train"],
        "seconds": sum(line.get(f"seconds/{phase}") or 0.0 for phase in PHASES),
        "cpu_seconds": sum(line.get(f"cpu_seconds/{phase}") or 0.0 for phase in PHASES),
    }


def _mean(lines: Lines, metric: str) -> float | None:
    """Return the mean of a metric over the lines that have the metric; None where no line has it."""
    values = [line[metric] for line in lines if line.get(metric) is not None]
    return sum(values) / len(values) if values else None
