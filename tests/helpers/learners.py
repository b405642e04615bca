"""Tiny real models, batches that the real engine wrote, and a float64 reference of a whole optimizer step."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from helpers.engines.reference import EOS, tiny_model
from helpers.turns import Numbers, Tool
from jackpot.config.config import OptimizerConfig
from jackpot.config.engines import TransformersEngineConfig
from jackpot.config.sampling import Sampling
from jackpot.core.prng import fold_in, uniforms
from jackpot.core.types import Prompt, Rollout, Score, TokenBatch, TrainingSample, Version
from jackpot.corrections import make_correction
from jackpot.objectives.joint import (
    JointLoss,
    OldLogProbs,
    PolicyObjective,
    RolloutModelObjective,
    TokenScores,
    joint_loss,
    measured_inputs,
)
from jackpot.objectives.losses import DISTILLATIONS, LOSS_AGG_MODES, SURROGATES
from jackpot.rollout.engines.base import Request
from jackpot.rollout.engines.transformers.engine import TransformersEngine
from jackpot.rollout.multi_turn import generate_rollouts
from jackpot.training.batching import mini_batches
from jackpot.training.joint_learner import JointLearner
from jackpot.training.learner import StepResult
from jackpot.training.learner_options import LearnerOptions
from jackpot.training.optimizer import ModelOptimizer

VOCAB, MAX_NEW = 20, 8  # tokens, and tokens of a response
FIRST = Version(0, 0)  # of weights that no step has changed

# eps this large makes AdamW's step proportional to the gradient, so that equal parameters mean equal gradients
LINEAR = OptimizerConfig(learning_rate=0.5, eps=1.0, max_grad_norm=1e6)
OBRS = dict(lam=0.9, c1=1.3, c2=1.2, mask="sampled", kappa="prepass")


def smallest_model(seed: int) -> PreTrainedModel:
    """Return a model of one layer with random weights."""
    return tiny_model(seed, VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1).eval()


def write(
    model: PreTrainedModel,
    prompts: int = 4,
    group: int = 3,
    seed: int = 0,
    version: Version = FIRST,
    max_new: int = MAX_NEW,
    turn_end_token_ids: Sequence[int] = (),
    **sampling,
) -> list[TrainingSample]:
    """Sample responses of the model to random prompts, with random advantages, and a tool between turns."""
    draw = np.random.default_rng(seed)
    engine = TransformersEngine(
        copy.deepcopy(model), TransformersEngineConfig(max_num_seqs=64), eos_token_ids=(EOS,), version=version
    )
    settings = Sampling(**{"max_new_tokens": max_new, "num_top_log_probs": VOCAB} | sampling)
    requests = []
    for index in range(prompts):
        ids = tuple(draw.integers(2, VOCAB, 2 + index % 4).tolist())
        prompt = Prompt(uid=f"{seed}/{index}", text="", answer="", token_ids=ids)
        seeds = [int(draw.integers(2**62)) for _ in range(group)]
        requests += [
            Request(uid=f"{prompt.uid}#{n}", prompt=prompt, seed=s, sampling=settings) for n, s in enumerate(seeds)
        ]
    rollouts = generate_rollouts(engine, Tool(turn_end_token_ids, VOCAB), Numbers(), requests)
    engine.close()
    return [scored(rollout, draw.normal()) for rollout in rollouts]


def scored(rollout: Rollout, advantage: float) -> TrainingSample:
    """Return a rollout whose tokens have one advantage."""
    advantages = torch.full((len(rollout.token_ids),), advantage)
    return TrainingSample(rollout=rollout, score=Score(reward=0.0, correct=False), advantages=advantages)


def cut(item: TrainingSample, length: int) -> TrainingSample:
    """Return the same response, ended after `length` tokens."""
    names = ("token_ids", "rollout_log_probs", "sampled_mask", "top_ids", "top_log_probs", "versions")
    shorter = {name: getattr(item.rollout, name)[:length] for name in names}
    return replace(item, rollout=replace(item.rollout, **shorter), advantages=item.advantages[:length])


def batches(
    items: Sequence[TrainingSample], *, mini_batch_size=None, epochs=1, budget=10_000, seed=0
) -> list[list[TokenBatch]]:
    """Return the micro-batches of each optimizer step, in one step unless `mini_batch_size` is given."""
    mini_batch_size = mini_batch_size or len(items)
    return list(
        mini_batches(items, mini_batch_size=mini_batch_size, epochs=epochs, micro_batch_tokens=budget, seed=seed)
    )


def policy_objective(
    name="obrs", *, target="old", proximal="old", normalizer="topk", aggregate="token-mean", count="proposed", **numbers
) -> PolicyObjective:
    """Return the policy's objective; `numbers` are of the correction, over those of `OBRS`, or of the objective."""
    budget = numbers.pop("budget", None)
    tolerance, surrogate = numbers.pop("kappa_tolerance", 1e-3), numbers.pop("surrogate", "ppo")
    clips = {side: numbers.pop(side, 0.2) for side in ("clip_low", "clip_high")}
    numbers = OBRS | numbers if name == "obrs" else numbers
    return PolicyObjective(
        entropy_coeff=0.0,
        kl_loss_coef=0.0,
        correction=make_correction(name, **numbers),
        target=target,
        proximal=proximal,
        normalizer=normalizer,
        budget=budget,
        surrogate=SURROGATES[surrogate],
        aggregate=LOSS_AGG_MODES[aggregate],
        count=count,
        kappa_tolerance=tolerance,
        **clips,
    )


def rollout_model_objective(*, distill="forward", aggregate="token-mean", **changes) -> RolloutModelObjective:
    """Return the rollout model's objective, PPO with TIS and distillation."""
    settings = dict(
        correction=make_correction("tis", cap=1.2),
        proximal="old",
        clip_low=0.2,
        clip_high=0.2,
        ppo_weight=0.8,
        distill_weight=0.6,
        distill=DISTILLATIONS[distill],
        aggregate=LOSS_AGG_MODES[aggregate],
    )
    return RolloutModelObjective(**settings | changes)


def make_learner(
    policy: PreTrainedModel,
    rollout_model: PreTrainedModel | None,
    *,
    objective: PolicyObjective | None = None,
    rollout_objective: RolloutModelObjective | None = None,
    optimizer: OptimizerConfig = LINEAR,
    is_frozen: bool = False,
    total_steps: int = 10,
    **changes,
) -> JointLearner:
    """Make a learner on copies of the models; `changes` are of its options, or its further parts."""
    models = {"policy": copy.deepcopy(policy)} | (
        {"rollout_model": copy.deepcopy(rollout_model)} if rollout_model else {}
    )
    trained_roles = [role for role in models if role == "policy" or not is_frozen]
    settings = dict(temperature=1.0, num_top_log_probs=VOCAB, max_length=MAX_NEW, advantage="grpo")
    settings |= dict(exact_engines=("policy", "rollout_model"))
    parts = {name: changes.pop(name) for name in ("critic", "reference", "gathered") if name in changes}
    return JointLearner(
        models,
        {role: ModelOptimizer(models[role].parameters(), optimizer, total_steps) for role in trained_roles},
        objective or policy_objective(),
        (rollout_objective or rollout_model_objective()) if "rollout_model" in trained_roles else None,
        LearnerOptions(**settings | changes),
        **parts,
    )


def train(learner: JointLearner, steps: Sequence[Sequence[TokenBatch]]) -> list[StepResult]:
    """Take all steps and return their results."""
    return [learner.update(step)[0] for step in learner.compute_old_log_probs(steps)]


def parameters(learner: JointLearner, role: str) -> Tensor:
    """Return all weights of a learner's model as one vector."""
    return torch.cat([tensor.flatten().clone() for _, tensor in learner.weights(role)])


def flat(model: PreTrainedModel) -> Tensor:
    """Return all weights of a model as one vector."""
    return torch.cat([parameter.detach().flatten().clone() for parameter in model.parameters()])


def assert_same_move(weights: Tensor, expected: Tensor, start: Tensor, tolerance: float = 1e-4) -> None:
    """Two updates of the same weights agree, measured by the largest step; float32 keeps 1e-7 of a sum in any order."""
    largest = (expected.double() - start.double()).abs().max().item()
    assert largest > 1e-3, "nothing moved: the comparison would be empty"
    assert (weights.double() - expected.double()).abs().max().item() <= tolerance * largest


# The reference: float64 copies, one sequence at a time, logits of the whole vocabulary, plain loops.


def vocabulary_log_probs(model: PreTrainedModel, rollout: Rollout, temperature: float) -> Tensor:
    """Return the log-probs of all tokens of the vocabulary at each token of a response, [T, V]."""
    ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.token_ids.tolist()]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(rollout.prompt.token_ids) - 1 : -1]
    return torch.log_softmax(logits.double() / temperature, -1)


def sampled_log_probs(model: PreTrainedModel, rollout: Rollout, temperature: float) -> Tensor:
    """Return the log-probs of the tokens of a response, [T]."""
    return vocabulary_log_probs(model, rollout, temperature).gather(-1, rollout.token_ids[:, None])[:, 0]


def double(model: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(model).double()


def loss_of(
    policy: PolicyObjective,
    rollout_model: RolloutModelObjective | None,
    batch: TokenBatch,
    scores: TokenScores,
    old: OldLogProbs,
    max_length: int,
) -> JointLoss:
    """Return the joint loss on a micro-batch, without sums over a step."""
    inputs, _ = measured_inputs(policy, batch, old, OldLogProbs.of(scores))
    return joint_loss(policy, rollout_model, batch, scores, old, inputs, {}, max_length)


def reference_losses(
    now: dict[str, PreTrainedModel],
    old: dict[str, PreTrainedModel],
    items: Sequence[TrainingSample],
    *,
    epoch=0,
    target="old",
    proximal="old",
    mask="sampled",
    aggregate="token-mean",
    count="proposed",
    temperature=1.0,
    numbers=OBRS,
    budget=None,
) -> tuple[Tensor, Tensor]:
    """Return the losses of both models, over the tokens that were sampled; `now` carries the gradients.

    They are eq. 5, and eqs. 6 and 7 with the numbers of `rollout_model_objective`. `old["rollout_model"]` is the model
    that wrote: Z is the sum over its whole vocabulary; `budget` chooses lam so that it is that. The uniforms are those
    of seed 0.
    """
    lam = numbers["lam"]
    c1, c2 = numbers["c1"], numbers["c2"]

    tokens = []  # (row, advantage, acceptance, Z, uniform, lam, and log-probs) of each token
    for row, item in enumerate(items):
        policy, rollout_model = (vocabulary_log_probs(now[role], item.rollout, temperature) for role in now)
        with torch.no_grad():
            old_policy, writer = (vocabulary_log_probs(old[role], item.rollout, temperature) for role in now)
        draws = uniforms([fold_in(0, "accept", item.rollout.uid, epoch)], torch.arange(len(item.rollout.token_ids)))
        for t, token in enumerate(item.rollout.token_ids.tolist()):
            if not item.rollout.sampled_mask[t]:
                continue
            aim = (old_policy if target == "old" else policy.detach())[t]
            if budget is not None:
                lam = _lam_by_bisection(writer[t].exp(), aim.exp(), budget)
            z = torch.minimum(writer[t].exp(), aim.exp() / lam).sum().item()
            p_inf = item.rollout.rollout_log_probs[t].item()
            a = min(1.0, math.exp(aim[token].item() - p_inf) / lam)
            new, omega = policy[t, token], rollout_model[t, token]
            start = {"old": old_policy[t, token].item(), "new": new.item(), "rollout": p_inf}[proximal]
            kl = (policy[t].detach().exp() * (policy[t].detach() - rollout_model[t])).sum()
            log_probs = (p_inf, aim[token].item(), start, writer[t, token].item(), kl, new, omega)
            tokens.append((row, item.advantages[t].item(), a, z, draws[t].item(), lam, *log_probs))

    kappa = math.fsum(token[2] for token in tokens) / math.fsum(token[3] for token in tokens)  # acceptance over Z
    policy_rows, omega_rows = [[] for _ in items], [[] for _ in items]
    for row, advantage, a, z, u, lam, p_inf, aim, start, wrote, kl, new, omega in tokens:
        accept = a if mask == "expected" else float(u < a)
        weight = min(kappa * z * max(lam, math.exp(aim - p_inf)), c1) * min(math.exp(start - aim), c2)
        loss = -accept * weight * _ppo(new - start, advantage)
        policy_rows[row].append((loss, accept if count == "accepted" else 1.0))
        ppo = -min(math.exp(wrote - p_inf), 1.2) * _ppo(omega - wrote, advantage)
        omega_rows[row].append((0.8 * ppo + 0.6 * kl, 1.0))
    return _aggregate(policy_rows, aggregate), _aggregate(omega_rows, aggregate)


def _lam_by_bisection(p_inf: Tensor, p_target: Tensor, budget: float) -> float:
    """Return the lam at which Z is `budget`."""
    low, high = 1e-6, 1e6
    for _ in range(100):
        lam = math.sqrt(low * high)
        low, high = (lam, high) if torch.minimum(p_inf, p_target / lam).sum().item() > budget else (low, lam)
    return lam


def _ppo(log_ratio: Tensor, advantage: float) -> Tensor:
    """Return the minimum of ratio A and clipped ratio A, clipped at 0.8 and 1.2."""
    ratio = log_ratio.exp()
    is_clipped = ratio > 1.2 if advantage > 0 else ratio < 0.8
    return (1.2 if advantage > 0 else 0.8) * advantage * torch.ones_like(ratio) if is_clipped else ratio * advantage


def _aggregate(rows: list[list[tuple[Tensor, float]]], aggregate: str) -> Tensor:
    """Aggregate (loss, count) of the tokens of each response."""
    sums = [(sum(loss for loss, _ in row), sum(count for _, count in row)) for row in rows]
    if aggregate == "seq-mean-token-mean":
        present = [loss / count for loss, count in sums if count > 0]
        return sum(present) / len(present)
    total = sum(loss for loss, _ in sums)
    return total / (len(rows) * MAX_NEW if aggregate == "seq-mean-token-sum-norm" else sum(count for _, count in sums))


class ReferenceAdamW:
    """AdamW, arXiv 1711.05101 algorithm 2, on one flat float64 vector, without decay and without a schedule."""

    def __init__(self, config: OptimizerConfig) -> None:
        self.config, self.steps = config, 0
        self.first, self.second = 0.0, 0.0  # moments

    def step(self, weights: Tensor, gradient: Tensor) -> Tensor:
        """Return the weights after another step."""
        beta1, beta2 = self.config.betas
        self.steps += 1
        self.first = beta1 * self.first + (1 - beta1) * gradient
        self.second = beta2 * self.second + (1 - beta2) * gradient.square()
        mean, variance = self.first / (1 - beta1**self.steps), self.second / (1 - beta2**self.steps)
        return weights - self.config.learning_rate * mean / (variance.sqrt() + self.config.eps)


def gradient(loss: Tensor, model: PreTrainedModel) -> Tensor:
    """Return the gradient of a loss by all weights of a model as one vector."""
    return torch.cat([tensor.flatten() for tensor in torch.autograd.grad(loss, list(model.parameters()))])
