"""A small joint training run through an engine, without a trainer: part of what every engine must pass."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from helpers.engines.reference import tiny_prompt
from jackpot.config.arms import build_config
from jackpot.config.config import Config
from jackpot.core.digest import weights_digest
from jackpot.core.metrics import Sums
from jackpot.core.prng import fold_in
from jackpot.core.types import Rollout, Score, TrainingSample, Version
from jackpot.launch.build import make_learner
from jackpot.models.load import load_model
from jackpot.objectives.advantages import compute_advantages
from jackpot.rollout.engines.base import Engine, Request
from jackpot.training.batching import mini_batches

ITERATIONS = 4
PROMPTS, GROUP = 4, 8  # prompts of an iteration, responses to each


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """What one iteration of the run generated and measured."""

    version: Version  # of the learner before its update
    rollouts: list[Rollout]
    metrics: Sums


def joint_run(engine: Engine, policy_folder: Path, rollout_folder: Path) -> list[Iteration]:
    """Train both models on the rollouts of the engine; the reward is the share of even tokens."""
    config = _config(engine)
    models = {
        "policy": load_model(policy_folder, torch.float32),
        "rollout_model": load_model(rollout_folder, torch.float32),
    }
    exact_engines = [] if engine.capabilities.quantized else ["rollout_model"]
    learner = make_learner(config, models, exact_engines=exact_engines)

    history: list[Iteration] = []
    for iteration in range(ITERATIONS):
        version = learner.version
        rollouts = engine.generate(_requests(config, iteration))
        steps = mini_batches(_scored(rollouts), mini_batch_size=len(rollouts), epochs=1, micro_batch_tokens=256, seed=0)
        [micro_batches] = learner.compute_old_log_probs(list(steps))
        result, _ = learner.update(micro_batches)
        history.append(Iteration(version=version, rollouts=rollouts, metrics=result.metrics))
        digest = engine.update_weights(learner.weights("rollout_model"), learner.version)
        assert digest == weights_digest(learner.weights("rollout_model"), engine.capabilities.dtype)
        assert engine.version == learner.version
    return history


def check_joint_run(make_engine: Callable[[Path, Version], Engine], policy: Path, rollout_model: Path, gap: float):
    """Check that the run learns, and that training computes the distributions from which the engine sampled.

    Args:
        gap: largest difference allowed between a token's probability in the engine and in training.
    """
    engine = make_engine(rollout_model, Version(0, 0))
    history = joint_run(engine, policy, rollout_model)
    engine.close()

    for iteration in history:
        token_versions = [version for rollout in iteration.rollouts for version in rollout.versions.tolist()]
        assert all(version == list(iteration.version) for version in token_versions)
        assert iteration.metrics["mismatch/engine_gap_max"].value < gap
    assert history[-1].version == Version(ITERATIONS - 1, ITERATIONS - 1)
    divergences = [float(iteration.metrics["mismatch/kl_rollout_policy"].value) for iteration in history]
    assert divergences[-1] < 0.8 * divergences[0]  # distillation: the engine's model follows the policy


def _config(engine: Engine) -> Config:
    """Return the settings of the run: a learning rate that shows within a few steps, and mostly distillation."""
    optimizer = {"learning_rate": 5e-3}
    return build_config(
        {
            "iterations": ITERATIONS,
            "policy": {"path": "", "optimizer": optimizer},
            "rollout_model": {"path": "", "optimizer": optimizer, "distill_weight": 5.0},
            "batch": {"prompts": PROMPTS, "group_size": GROUP},
            "sampling": {"max_new_tokens": 12, "num_top_log_probs": min(16, engine.capabilities.num_top_log_probs)},
        }
    )


def _requests(config: Config, iteration: int) -> list[Request]:
    """Return a group of requests for each prompt, with seeds of this iteration."""
    uids = [(f"{iteration}/{prompt}#{member}", prompt) for prompt in range(PROMPTS) for member in range(GROUP)]
    return [
        Request(uid=uid, prompt=tiny_prompt(3 + prompt), seed=fold_in("run", uid), sampling=config.sampling)
        for uid, prompt in uids
    ]


def _scored(rollouts: list[Rollout]) -> list[TrainingSample]:
    """Reward each rollout by its share of even tokens, with GRPO's advantages within a group."""
    rewards = torch.tensor([float((rollout.token_ids % 2 == 0).double().mean()) for rollout in rollouts])
    groups = torch.arange(PROMPTS).repeat_interleave(GROUP)
    advantages = compute_advantages("grpo", rewards, groups).tolist()
    return [
        TrainingSample(
            rollout=rollout,
            score=Score(reward=float(reward), correct=False),
            advantages=torch.full((len(rollout.token_ids),), advantage),
        )
        for rollout, reward, advantage in zip(rollouts, rewards, advantages, strict=True)
    ]
