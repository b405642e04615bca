"""What kappa costs in an update of several micro-batches, over one in which it is not measured.

    python benchmarks/kappa.py                                         # the quickstart, in 4 to 5 micro-batches a step
    python benchmarks/kappa.py --prompts 8 --budget 400 --share 0.5    # the policy generates half of the responses

The quickstart's two models as they come, which stay so: the learning rates are 1e-12. Every round has new prompts and
responses; advantages are random numbers, one for each response. The ways take turns in one process, with a learner
each; CPU seconds of one thread, and a first round that is not counted:

    none           kappa is 1
    auto, left     one pass with the kappa of the step before, rescaled at the end, and no repair
    auto           the same, repaired where `kappa_tolerance` says so
    prepass        one more forward pass, before the first backward pass
"""

import argparse
import time
from collections import defaultdict
from dataclasses import replace
from statistics import mean, median

import torch
from interleaved import about, cell, table
from obrs_overhead import batches_of

from jackpot.config.config import Config
from jackpot.config.recipes import resolve
from jackpot.core.roles import Role
from jackpot.core.types import Rollout, TokenBatch, Version
from jackpot.launch.build import load_trained, make_learner
from jackpot.launch.engines import make_engine
from jackpot.models.load import load_tokenizer
from jackpot.rollout.engines.base import Engine, Request
from jackpot.rollout.tasks.base import Task
from jackpot.rollout.tasks.registry import make_task
from jackpot.training.joint_learner import JointLearner
from jackpot.training.learner import StepResult

CPU = torch.device("cpu")
WAYS = {
    "none": {"kappa": "none"},
    "auto, left": {"kappa": "auto", "kappa_tolerance": 1e9},
    "auto": {"kappa": "auto"},
    "prepass": {"kappa": "prepass"},
}
STILL = [f"{role}.optimizer.learning_rate=1e-12" for role in ("policy", "rollout_model")]


def learner_of(config: Config, models: dict[Role, str]) -> JointLearner:
    loaded = {role: load_trained(config, role, path, CPU, False) for role, path in models.items()}
    return make_learner(config, loaded, list(models))


def rollouts_of(config: Config, task: Task, engines: dict[Role, Engine], share: float, number: int) -> list[Rollout]:
    """The rollout batch of a round: of each group the rollout model generates this share."""
    group, found = config.batch.group_size, []
    by_rollout_model = round(share * group)
    for role, members in (("rollout_model", range(by_rollout_model)), ("policy", range(by_rollout_model, group))):
        requests = [
            Request(uid=f"{i}/{j}", prompt=task.prompt("train", i), seed=group * i + j, sampling=config.sampling)
            for i in range(number * config.batch.prompts, (number + 1) * config.batch.prompts)
            for j in members
        ]
        found += [replace(one, sampled_by=role) for one in (engines[role].generate(requests) if requests else ())]
    return found


def update(learner: JointLearner, batches: list[TokenBatch]) -> tuple[float, StepResult]:
    """CPU seconds of an optimizer step on responses of the weights of now, and its result."""
    now = torch.tensor(learner.version)
    batches = [replace(batch, versions=now.expand_as(batch.versions).clone()) for batch in batches]
    before = time.process_time()
    [step] = learner.compute_old_log_probs([batches])
    result, _ = learner.update(step, trace=False)
    return time.process_time() - before, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--budget", type=int, default=800, help="tokens of a micro-batch")
    parser.add_argument("--share", type=float, default=1.0, help="of the responses that the rollout model generates")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    batch = [f"batch.prompts={args.prompts}", f"batch.micro_batch_tokens={args.budget}"]
    overrides = [*STILL, *batch, f"rollout_model.share={args.share}"]
    configs = {
        way: resolve(
            "quickstart", None, [*overrides, *(f"objective.correction.{key}={one}" for key, one in of.items())]
        )
        for way, of in WAYS.items()
    }
    config = configs["none"]
    models: dict[Role, str] = {"policy": config.policy.path, "rollout_model": config.rollout_model.path}
    task = make_task(config.task, load_tokenizer(config.policy.path))
    engines = {role: make_engine(config.engine, path, CPU, Version(0, 0)) for role, path in models.items()}
    learners = {way: learner_of(one, models) for way, one in configs.items()}
    spent: dict[str, list[float]] = defaultdict(list)
    metrics: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    counts: list[int] = []
    for number in range(args.rounds + 1):
        batches = batches_of(config, rollouts_of(config, task, engines, args.share, number), number)
        for way, learner in learners.items():
            seconds, result = update(learner, batches)
            if not number:
                continue
            spent[way].append(seconds)
            for name in ("obrs/kappa_error", "obrs/repaired_sequences"):
                if name in result.metrics:
                    metrics[way][name].append(float(result.metrics[name].value))
        counts.append(len(batches))
    print(", ".join(f"{key} {one}" for key, one in about("").items() if one))
    print(f"{args.rounds} rounds, micro-batches in each {min(counts[1:])} to {max(counts[1:])}\n")
    rows = []
    for way, seconds in spent.items():
        over = [100 * (one / none - 1) for one, none in zip(seconds, spent["none"], strict=True)]
        errors, repaired = (metrics[way][name] for name in ("obrs/kappa_error", "obrs/repaired_sequences"))
        rows.append(
            (
                way,
                cell((1e3 * one for one in seconds), 0),
                f"{100 * (median(seconds) / median(spent['none']) - 1):.1f}; {cell(over, 1)}",
                f"{sum(one > 0 for one in repaired)}; {100 * mean(repaired):.1f} %" if repaired else "",
                f"{median(errors):.1e}, at most {max(errors):.1e}" if errors else "",
            )
        )
    columns = ("kappa", "CPU ms an update", "over none, percent: of medians; by rounds")
    table([*columns, "steps repaired; sequences read again", "estimated error"], rows)


if __name__ == "__main__":
    main()
