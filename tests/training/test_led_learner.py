"""A learner that leads two ranks does what one that is alone does."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from helpers.disks import largest_file
from helpers.learners import batches, make_learner, parameters, policy_objective, smallest_model, write
from helpers.led import Ended, fork_ranks
from helpers.sharded import config_of, learner_of, samples_of, save_models
from jackpot.config.sampling import Sampling
from jackpot.core.errors import CheckpointError, ConfigError
from jackpot.core.shards import local
from jackpot.core.types import ScoredRollout
from jackpot.models.load import load_model
from jackpot.training.joint_learner import JointLearner
from jackpot.training.learner import Learner
from jackpot.training.ranks import LedLearner, Ranks, follow

POLICY, ROLLOUT_MODEL = smallest_model(0), smallest_model(1)
ROLES = ("policy", "rollout_model")


def small_learner(part: object = None) -> JointLearner:
    """A learner of both models, whatever the part of the weights that a rank is to hold."""
    return make_learner(
        POLICY, ROLLOUT_MODEL, objective=policy_objective(kappa="prepass", target="new", count="accepted")
    )


def two_ranks(
    run: Path,
    lead: Callable[[Ranks], None],
    build: Callable[[object], Learner] = small_learner,
    timeout: float = 60.0,
    patience: float = 30.0,
) -> Ended:
    """How two ranks end of which the first leads and the second follows, with learners of `build`."""

    def work(rank: int) -> None:
        store = f"file://{run}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=timeout))
        ranks = Ranks(run, timeout)
        if rank:
            follow(ranks, build)
        else:
            lead(ranks)
            ranks.end()

    return fork_ranks(2, work, run, patience)


def outcome(learner: Learner) -> dict[str, torch.Tensor]:
    """All that a learner gives on 12 rollouts: two steps of several micro-batches, traces, log-probs and weights."""
    steps = batches(write(ROLLOUT_MODEL, num_top_log_probs=2), mini_batch_size=6, budget=60)
    assert [len(step) for step in steps] == [2, 1], "one rank should get an empty micro-batch"
    tensors = {f"before/{uid}": row for uid, row in learner.score("policy", steps[0], Sampling(top_k=5)).items()}

    results, gaps = learner.train(steps, trace=True)
    tensors |= {f"gap/{uid}": gap for uid, gap in gaps.items()}
    for index, result in enumerate(results):
        tensors |= {f"{index}/{uid}/{name}": row for uid, rows in result.traces.items() for name, row in rows.items()}
        tensors[f"{index}/loss"] = result.metrics["policy/loss"].value

    tensors |= {role: parameters(learner, role) for role in ROLES}
    return tensors | {"version": torch.tensor(learner.version)}


def test_two_ranks_learn_what_one_learns(tmp_path: Path) -> None:
    def lead(ranks: Ranks) -> None:
        local_learner, _ = ranks.carry_out("build", [None, None], small_learner)
        led = LedLearner(local_learner, ranks)
        assert led.score("policy", [], Sampling()) == {}
        assert led.pads == local_learner.pads
        torch.save({name: tensor.clone() for name, tensor in outcome(led).items()}, tmp_path / "led.pt")

    ended = two_ranks(tmp_path, lead)
    assert ended.codes == [0, 0], ended.printed

    led_outcome = torch.load(tmp_path / "led.pt", weights_only=True)
    lone_outcome = outcome(small_learner())

    assert led_outcome.keys() == lone_outcome.keys()
    for name, expected_tensor in lone_outcome.items():
        assert torch.allclose(led_outcome[name].double(), expected_tensor.double(), rtol=1e-5, atol=1e-6), name
    assert not torch.allclose(lone_outcome["policy"], parameters(small_learner(), "policy"))


@pytest.mark.slow
def test_a_rank_with_a_full_disk_costs_the_checkpoint_alone(tmp_path: Path) -> None:
    """Rank 1 has no room until it builds its learner anew."""
    save_models(tmp_path)
    config, disk = config_of(tmp_path), ExitStack()
    steps = batches(write(ROLLOUT_MODEL, num_top_log_probs=4))

    def build(attempt: int) -> JointLearner:
        if attempt == 1:
            disk.enter_context(largest_file(2000))  # bytes
        if attempt == 2:
            disk.close()
        return learner_of(config, is_sharded=True)

    def lead(ranks: Ranks) -> None:
        for attempt in (1, 2):
            local_learner, _ = ranks.carry_out("build", [0, attempt], build)
            led = LedLearner(local_learner, ranks)
            led.train(steps, trace=False)
            if attempt == 1:
                with pytest.raises(CheckpointError, match=r"^rank 1: .*File too large"):
                    led.save(tmp_path / "full", ROLES)
                assert led.score("policy", steps[0], Sampling())  # the ranks understand each other

        files = led.save(tmp_path / "room", ROLES)
        assert {*files} == {
            f"{folder}-0000{rank}-of-00002.safetensors"
            for rank in (1, 2)
            for folder in ("policy/model", "rollout_model/model", "moments/policy", "moments/rollout_model")
        }
        saved_weights = dict(load_model(tmp_path / "room" / "policy", torch.float32).named_parameters())
        assert all(torch.equal(saved_weights[name], weight) for name, weight in led.weights("policy"))

    ended = two_ranks(tmp_path, lead, build)
    assert ended.codes == [0, 0], ended.printed


def test_a_rank_that_fails_gives_the_leader_its_reason(tmp_path: Path) -> None:
    def refuse(part: object) -> Learner:
        raise ConfigError("this rank has no model")

    ended = two_ranks(tmp_path, lambda ranks: ranks.carry_out("build", [None, None], small_learner), refuse)

    assert ended.codes == [2, 2]
    assert "failed in command 1 (build)" in ended.printed[0]
    assert "ConfigError: this rank has no model" in ended.printed[0]


def test_all_ranks_have_the_threads_of_the_leader(tmp_path: Path) -> None:
    def lead(ranks: Ranks) -> None:
        torch.set_num_threads(3)
        ranks.carry_out("build", [None, None], lambda part: None)

    def build(part: object) -> None:
        assert torch.get_num_threads() == 3

    ended = two_ranks(tmp_path, lead, build)
    assert ended.codes == [0, 0], ended.printed


@pytest.mark.slow
def test_advantages_are_whitened_over_all_ranks(tmp_path: Path) -> None:
    save_models(tmp_path)
    config = config_of(tmp_path, "objective.advantage=gae", "critic={optimizer: {learning_rate: 1e-3}}")
    scored = [
        ScoredRollout(rollout=item.rollout, score=replace(item.score, reward=float(index % 3)))
        for index, item in enumerate(samples_of(tmp_path))
    ]

    def build(is_sharded: bool) -> JointLearner:
        learner = learner_of(config, is_sharded)
        with torch.no_grad():  # a new critic's values are all 0
            for weight in learner.critic.model.parameters():
                local(weight).add_(0.05)
        return learner

    def lead(ranks: Ranks) -> None:
        led = LedLearner(ranks.carry_out("build", [True, True], build)[0], ranks)
        torch.save([sample.advantages for sample in led.compute_advantages(scored)], tmp_path / "led.pt")

    ended = two_ranks(tmp_path, lead, build)
    assert ended.codes == [0, 0], ended.printed

    expected_advantages = [sample.advantages for sample in build(is_sharded=False).compute_advantages(scored)]
    assert len({round(float(advantages[-1]), 3) for advantages in expected_advantages}) > 3
    assert all(
        torch.equal(*pair)
        for pair in zip(torch.load(tmp_path / "led.pt", weights_only=True), expected_advantages, strict=True)
    )


@pytest.mark.slow
def test_a_leader_may_pause_and_is_noticed_where_it_stands_still(tmp_path: Path) -> None:
    """A pause is longer than a rank waits for a sign of life."""

    def lead(ranks: Ranks) -> None:
        ranks.carry_out("build", [None, None], small_learner)
        time.sleep(2.5)  # seconds, of which a rank waits 1.0 for a sign of life
        ranks.carry_out("keep_weights", [{"role": "policy"}] * 2, lambda part: None)
        os.kill(os.getpid(), signal.SIGSTOP)

    ended = two_ranks(tmp_path, lead, timeout=1.0, patience=0.0)

    assert ended.codes == [-signal.SIGKILL, 2], ended.printed
    assert "error: rank 1 lost another rank in waiting for a command after command 2 (keep_weights)" in ended.printed[1]
