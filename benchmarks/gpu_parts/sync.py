"""Times new weights on their way to the engine, in one process: the update with its digest, and the digest alone.

The floor reads every fp32 weight of the learner once and writes it once in bf16, at the rate of a large copy.
"""

from collections.abc import Callable
from functools import partial

import torch
from gpu_parts.machine import Machine
from gpu_parts.models import device_model, learner_of, make_config, make_engine
from gpu_parts.results import Result, Row

from jackpot.core.digest import weights_digest
from jackpot.core.types import Version
from jackpot.training.joint_learner import JointLearner

NAMES = ("Qwen3 0.6B", "Qwen3 1.7B")


def rows(machine: Machine) -> list[Row]:
    found = [Row(f"{name}, weights into the engine", partial(update, machine, name)) for name in NAMES]
    return found + [Row(f"{name}, digest of the learner's weights", partial(digest, machine, name)) for name in NAMES]


def update(machine: Machine, name: str) -> Result:
    learner = learner_of(make_config("fp32", 1), [device_model(name, machine)])
    engine = make_engine(device_model(name, machine, torch.bfloat16), 8, dtype="bf16")
    return rates(machine, learner, lambda: engine.update_weights(learner.weights("policy"), Version(1, 1)))


def digest(machine: Machine, name: str) -> Result:
    learner = learner_of(make_config("fp32", 1), [device_model(name, machine)])
    return rates(machine, learner, lambda: weights_digest(learner.weights("policy"), torch.bfloat16))


def rates(machine: Machine, learner: JointLearner, run: Callable[[], object]) -> Result:
    seconds = machine.seconds(run)
    numbers = sum(weight.numel() for _, weight in learner.weights("policy"))
    floor = (4 + 2) * numbers / machine.copy_rate()
    result = {"s": seconds, "GB/s of bf16": 2 * numbers / seconds / 1e9, "of the floor": floor / seconds}
    return result | {"extra GB": machine.extra_gb(run)} | machine.profile(run)
