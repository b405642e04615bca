"""Breaks on purpose what a sharded learner must not forget: a test of `training/test_sharded.py` must notice."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from helpers import sharded
from jackpot.core import shards
from jackpot.models import forward, lora
from jackpot.models.gathered import Gathered
from jackpot.training import batching, joint_learner, kappa, optimizer
from jackpot.training.old_policy import OldPolicySnapshot
from training import test_sharded
from training.test_sharded import QUICK, SLOW, check

pytestmark = pytest.mark.mutants
NOTICED = (AssertionError, ProcessRaisedException, ProcessExitedException)
THREE = QUICK["three micro-batches"]
REPAIRED = SLOW["three, read again for kappa, on a sampler's support"]
Patch = Callable[[pytest.MonkeyPatch], Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the models that the sharded learners load."""
    folder = tmp_path_factory.mktemp("models")
    sharded.save_models(folder)
    return folder


def backward_of_parameters(patch: pytest.MonkeyPatch) -> None:
    """Let backward passes name the sharded parameters, which stand in no graph."""
    known_parameters = []
    original_init = optimizer.ModelOptimizer.__init__
    original_backward = torch.Tensor.backward

    def init(self, parameters, *rest):
        parameters = list(parameters)
        known_parameters.extend(parameters)
        original_init(self, parameters, *rest)

    patch.setattr(optimizer.ModelOptimizer, "__init__", init)
    patch.setattr(torch.Tensor, "backward", lambda self: original_backward(self, inputs=known_parameters))


def deal_one_less(batches, ranks):
    """Deal batches to ranks, and one less to all but the first rank."""
    return [dealt[: len(dealt) - bool(rank)] for rank, dealt in enumerate(batching.deal(batches, ranks))]


def batches_new_to_this_rank(batches):
    """Return the batches with a rollout that no earlier batch of this rank has."""
    earlier_uids = accumulate((set(batch.uids) for batch in batches), set.union, initial=set())
    return [batch for batch, uids in zip(batches, earlier_uids, strict=False) if not uids.issuperset(batch.uids)]


def norm_of_local_shards(tensors):
    return torch.stack([shards.local(tensor).double().norm() for tensor in tensors]).norm()


MUTANTS: dict[str, tuple[test_sharded.Case, Patch]] = {
    "gradients are divided by the number of ranks": (
        THREE,
        lambda patch: patch.setattr(FSDPModule, "set_gradient_divide_factor", lambda self, factor: None),
    ),
    "backward names the sharded parameters": (THREE, backward_of_parameters),
    "one micro-batch less on a rank": (THREE, lambda patch: patch.setattr(sharded, "deal", deal_one_less)),
    "the norm of a rank's own shards": (
        SLOW["one micro-batch, clipped gradients"],
        lambda patch: patch.setattr(optimizer, "norm", norm_of_local_shards),
    ),
    "kappa from a rank's own micro-batches": (
        REPAIRED,
        lambda patch: patch.setattr(kappa, "all_reduce_sums", lambda sums: sums),
    ),
    "as many repairs as a rank's own": (
        REPAIRED,
        lambda patch: patch.setattr(kappa, "max_over_ranks", lambda number: number),
    ),
    "old log-probs of a rank's own rollouts": (
        SLOW["frozen rollout model, two epochs, dealt anew"],
        lambda patch: patch.setattr(OldPolicySnapshot, "fetch", lambda self, batches: None),
    ),
    "old log-probs where a rank itself lacks them": (
        SLOW["frozen rollout model, two epochs, dealt anew"],
        lambda patch: patch.setattr(joint_learner, "first_readings", batches_new_to_this_rank),
    ),
    "two passes where a rank's prompts are shared": (
        SLOW["one-token responses in one of two micro-batches, padded"],
        lambda patch: patch.setattr(forward, "FSDPModule", ()),
    ),
    "a base that is merged with a shard of its adapter": (
        SLOW["reference, lora and critic"],
        lambda patch: patch.setattr(lora, "_delta", lambda layer, *_: shards.local(layer.get_delta_weight("default"))),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_takes_other_steps_or_none(name, folder, tmp_path, monkeypatch):
    case, mutate = MUTANTS[name]

    mutate(monkeypatch)

    with pytest.raises(NOTICED):
        check(case, folder, tmp_path)


def test_a_root_that_stays_gathered_reads_old_weights(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(Gathered, "__call__", nn.Module.__call__)
    with pytest.raises(NOTICED):
        test_sharded.check_weights_are_current(folder, tmp_path)
