"""The expected gradient of the whole pipeline, with every sequence and every acceptance mask enumerated.

Rollouts of the rollout model, corrected by OBRS with an infinite c1, gives in expectation

    sum_s d_inf(s) Z(s) sum_a p_target(a|s) A_inf(s, a) grad log p(a|s)

which is the on-policy gradient, up to Z, only where a response is one token. The left side runs through the head, the
scores, the correction, the surrogate and the aggregate; the right side is numpy's.
"""

import itertools
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch

from helpers import tabular
from helpers.learners import loss_of, policy_objective
from helpers.tabular import VOCAB, World
from jackpot.corrections import make_correction
from jackpot.objectives.joint import OldLogProbs, RolloutModelObjective, policy_loss
from jackpot.objectives.losses import DISTILLATIONS, LOSS_AGG_MODES

ATOL = 1e-13  # some 15 sequences of numbers near 1 in float64


def make_objective(name="obrs", **changes):
    """The policy's objective without any clip; OBRS with lam = 1 unless changed."""
    settings = dict(lam=1.0, c1=math.inf, c2=math.inf, mask="sampled", kappa="none") if name == "obrs" else {}
    return policy_objective(name, **settings | dict(clip_low=math.inf, clip_high=math.inf) | changes)


class ExpectedGradients(NamedTuple):
    """The loss's gradients in expectation, and the mean of its denominators."""

    policy: np.ndarray  # [S, V]
    rollout_model: torch.Tensor | None  # [V, S]
    mean_denominator: float


class Setting:
    """A random policy, an older one, a rollout policy and a reward for every sequence."""

    def __init__(self, horizon, seed, is_stale=False):
        generator = np.random.default_rng(seed)
        self.world = World(horizon)
        self.policy, self.rollout = (self.world.random_table(generator) for _ in range(2))
        self.old = self.world.random_table(generator) if is_stale else self.policy
        self.rewards = {sequence: generator.normal() for sequence in self.world.sequences}

    def acceptance(self, target, lam):
        """Compute min(1, p_target / (lam p_inf)) of every prefix and token: [S, V]."""
        p_inf, p_target = tabular.probabilities(self.rollout), tabular.probabilities(target)
        return np.minimum(1.0, p_target / (lam * p_inf))

    def z(self, target, lam, num_top=VOCAB):
        """Compute Z(s) from the `num_top` tokens of largest p_inf: [S]."""
        p_inf, p_target = tabular.probabilities(self.rollout), tabular.probabilities(target)
        accepted_mass = np.minimum(p_inf, p_target / lam)
        return np.array([row[np.argsort(q)[::-1][:num_top]].sum() for row, q in zip(accepted_mass, p_inf, strict=True)])

    def masks(self, sequence, objective):
        """Yield (probability, uniforms [1, T]) of all acceptance masks of one sequence."""
        if objective.correction.settings.get("mask", "expected") == "expected":
            yield 1.0, torch.full((1, len(sequence)), 0.5, dtype=torch.float64)
            return
        target = self.old if objective.target == "old" else self.policy
        acceptance = [self.acceptance(target, objective.correction.lam)[step] for step in self.world.steps(sequence)]
        for pattern in itertools.product((True, False), repeat=len(sequence)):
            probability = math.prod(x if is_kept else 1.0 - x for x, is_kept in zip(acceptance, pattern, strict=True))
            uniforms = [x / 2 if is_kept else (1.0 + x) / 2 for x, is_kept in zip(acceptance, pattern, strict=True)]
            if probability > 0.0:
                yield probability, torch.tensor([uniforms], dtype=torch.float64)

    def expected_gradients(self, objective, rollout_objective=None, num_top=VOCAB):
        """Average the loss's gradient over sequences of p_inf and acceptance masks; denominators are averaged alike."""
        policy_weight, rollout_weight = tabular.weight_of(self.policy), tabular.weight_of(self.rollout)
        old_weight = tabular.weight_of(self.old)
        distill = rollout_objective.distill if rollout_objective else None
        mean_denominator = 0.0
        for sequence in self.world.sequences:
            sequence_probability = tabular.sequence_probability(self.world, self.rollout, sequence)
            for probability, uniforms in self.masks(sequence, objective):
                rewards = [self.rewards[sequence]]
                batch = tabular.batch_of(self.world, self.rollout, [sequence], rewards, uniforms, num_top)
                sides = self.world, batch, [sequence]
                lam = objective.correction.lam
                anchor = OldLogProbs.of(tabular.scores_of(*sides, old_weight, rollout_weight, lam))
                scores = tabular.scores_of(*sides, policy_weight, rollout_weight, lam, distill=distill)
                loss = loss_of(objective, rollout_objective, batch, scores, anchor, self.world.horizon)
                (sequence_probability * probability * (loss.policy + loss.rollout_model)).backward()
                _, denominator = policy_loss(objective, loss.terms, loss.correction, self.world.horizon)
                mean_denominator += sequence_probability * probability * denominator.item()
        return ExpectedGradients(policy_weight.grad.numpy().T, rollout_weight.grad, mean_denominator)

    def formula(self, coefficients):
        """- sum_s d_inf(s) sum_a coefficients(s, a) A_inf(s, a) grad log p(a|s): the gradient of a loss, [S, V]."""
        d = tabular.visits(self.world, self.rollout)
        advantages = tabular.values(self.world, self.rollout, self.rewards)
        return -tabular.score_gradient(self.world, self.policy, d[:, None] * coefficients * advantages)


def test_sequences_and_masks_are_enumerated_completely():
    setting = Setting(horizon=3, seed=0)

    assert len(setting.world.prefixes) == 1 + 2 + 4  # VOCAB - 1 = 2 tokens go on after each prefix
    assert len(setting.world.sequences) == 1 + 2 + 4 * 3  # of one, two and three tokens

    total_probability = sum(
        tabular.sequence_probability(setting.world, setting.rollout, s) for s in setting.world.sequences
    )

    assert total_probability == pytest.approx(1.0, rel=1e-14)

    objective = make_objective()
    for sequence in setting.world.sequences:
        assert math.fsum(p for p, _ in setting.masks(sequence, objective)) == pytest.approx(1.0, rel=1e-14)


@pytest.mark.parametrize("mask", ["sampled", "expected"])
@pytest.mark.parametrize(("horizon", "seed", "lam"), [(2, 0, 0.4), (2, 0, 2.5), (3, 1, 1.0)])
def test_the_pipeline_follows_the_target_up_to_z(horizon, seed, lam, mask):
    setting = Setting(horizon, seed)

    gradient = setting.expected_gradients(make_objective(lam=lam, mask=mask)).policy

    z = setting.z(setting.policy, lam)
    expected_gradient = setting.formula(z[:, None] * tabular.probabilities(setting.policy))

    assert np.abs(expected_gradient).max() > 0.01
    np.testing.assert_allclose(gradient, expected_gradient, rtol=0, atol=ATOL)


@pytest.mark.parametrize("mask", ["sampled", "expected"])
def test_with_one_token_it_is_the_on_policy_gradient_up_to_z(mask):
    setting = Setting(horizon=1, seed=2)

    gradient = setting.expected_gradients(make_objective(lam=1.3, mask=mask)).policy

    table = torch.from_numpy(setting.policy.copy()).requires_grad_()
    rewards = torch.tensor([setting.rewards[(token,)] for token in range(VOCAB)], dtype=torch.float64)
    (-(table.softmax(-1) @ rewards).sum()).backward()

    z = setting.z(setting.policy, 1.3).item()

    assert 0.1 < z < 0.9
    np.testing.assert_allclose(gradient, z * table.grad.numpy(), rtol=0, atol=ATOL)


def test_longer_responses_are_not_the_on_policy_gradient():
    """What OBRS does not correct: states and returns stay those of the rollout model."""
    setting = Setting(horizon=2, seed=0)

    gradient = setting.expected_gradients(make_objective()).policy

    d = tabular.visits(setting.world, setting.policy)
    advantages = tabular.values(setting.world, setting.policy, setting.rewards)
    p, z = tabular.probabilities(setting.policy), setting.z(setting.policy, 1.0)
    on_policy_gradient = -tabular.score_gradient(setting.world, setting.policy, (d * z)[:, None] * p * advantages)

    assert np.abs(gradient - on_policy_gradient).max() > 0.01


@pytest.mark.parametrize("mask", ["sampled", "expected"])
def test_after_an_update_the_ratio_leads_on_to_the_new_policy(mask):
    """Target old, proximal old, no clip: the target's weight times p_new / p_old is the weight of the new policy."""
    setting = Setting(horizon=2, seed=3, is_stale=True)

    gradient = setting.expected_gradients(make_objective(lam=0.8, mask=mask)).policy
    z = setting.z(setting.old, 0.8)

    np.testing.assert_allclose(
        gradient, setting.formula(z[:, None] * tabular.probabilities(setting.policy)), rtol=0, atol=ATOL
    )


@pytest.mark.parametrize("mask", ["sampled", "expected"])
def test_with_target_and_proximal_new_z_is_of_the_new_policy(mask):
    setting = Setting(horizon=2, seed=4, is_stale=True)

    gradient = setting.expected_gradients(make_objective(target="new", proximal="new", lam=0.8, mask=mask)).policy
    z = setting.z(setting.policy, 0.8)

    assert np.abs(z - setting.z(setting.old, 0.8)).max() > 0.05
    np.testing.assert_allclose(
        gradient, setting.formula(z[:, None] * tabular.probabilities(setting.policy)), rtol=0, atol=ATOL
    )


def test_the_second_factor_carries_new_over_to_old():
    """p_target / p~ times p_old / p_new times the ratio p_new / p_old: the same expectation, by another route."""
    setting = Setting(horizon=2, seed=4, is_stale=True)

    gradient = setting.expected_gradients(make_objective(target="new", proximal="old", lam=0.8)).policy
    z = setting.z(setting.policy, 0.8)

    np.testing.assert_allclose(
        gradient, setting.formula(z[:, None] * tabular.probabilities(setting.policy)), rtol=0, atol=ATOL
    )


@pytest.mark.parametrize("mask", ["sampled", "expected"])
@pytest.mark.parametrize("lam", [0.5, 2.0])
def test_a_finite_c1_truncates_z_times_the_ratio_whatever_lam(lam, mask):
    """Expected OBRS is TIS on Z rho: sum_a p_inf min(Z rho, c1) A grad log p."""
    setting, c1 = Setting(horizon=2, seed=5), 1.2

    gradient = setting.expected_gradients(make_objective(lam=lam, c1=c1, mask=mask)).policy

    p_inf, p = tabular.probabilities(setting.rollout), tabular.probabilities(setting.policy)
    z = setting.z(setting.policy, lam)[:, None]

    if lam < 1.0:
        assert (z * p / p_inf > c1).any()
    np.testing.assert_allclose(gradient, setting.formula(p_inf * np.minimum(z * p / p_inf, c1)), rtol=0, atol=ATOL)


def test_truncated_importance_sampling_is_the_same_without_z():
    setting, cap = Setting(horizon=2, seed=5), 1.2

    gradient = setting.expected_gradients(make_objective("tis", cap=cap)).policy
    p_inf, p = tabular.probabilities(setting.rollout), tabular.probabilities(setting.policy)

    assert (p / p_inf > cap).any()
    np.testing.assert_allclose(gradient, setting.formula(p_inf * np.minimum(p / p_inf, cap)), rtol=0, atol=ATOL)


def test_without_correction_the_gradient_is_of_the_actions_taken():
    setting = Setting(horizon=2, seed=6)
    gradient = setting.expected_gradients(make_objective("none")).policy
    np.testing.assert_allclose(gradient, setting.formula(tabular.probabilities(setting.rollout)), rtol=0, atol=ATOL)


def test_ppo_is_starts_its_ratio_at_the_rollout_model():
    setting = Setting(horizon=2, seed=6, is_stale=True)
    gradient = setting.expected_gradients(make_objective("none", proximal="rollout")).policy
    np.testing.assert_allclose(gradient, setting.formula(tabular.probabilities(setting.policy)), rtol=0, atol=ATOL)


def test_a_z_of_the_top_k_scales_each_state_by_what_it_saw():
    setting = Setting(horizon=2, seed=7)

    gradient = setting.expected_gradients(make_objective(), num_top=1).policy
    z = setting.z(setting.policy, 1.0, num_top=1)

    assert (z < setting.z(setting.policy, 1.0) - 0.05).any()
    np.testing.assert_allclose(
        gradient, setting.formula(z[:, None] * tabular.probabilities(setting.policy)), rtol=0, atol=ATOL
    )


def test_the_denominators_are_tokens_proposed_or_accepted():
    setting, lam = Setting(horizon=2, seed=1), 1.5
    d, p_inf = tabular.visits(setting.world, setting.rollout), tabular.probabilities(setting.rollout)
    proposed_count = d.sum()
    accepted_count = (d[:, None] * p_inf * setting.acceptance(setting.policy, lam)).sum()

    for mask in ("sampled", "expected"):
        denominators = [
            setting.expected_gradients(
                make_objective(lam=lam, mask=mask, aggregate=aggregate, count=count)
            ).mean_denominator
            for aggregate, count in (
                ("token-mean", "proposed"),
                ("token-mean", "accepted"),
                ("seq-mean-token-sum-norm", "proposed"),
            )
        ]
        # one sequence times the horizon is 2
        assert denominators == pytest.approx([proposed_count, accepted_count, 2.0], rel=1e-12)


# The rollout model's own losses


def rollout_objective(name="tis", *, distill="forward", ppo_weight=1.0, distill_weight=0.0, proximal="old", **settings):
    """The rollout model's objective without any clip of PPO's; TIS with a cap of 3 unless changed."""
    settings = {"cap": 3.0} | settings if name == "tis" else settings
    return RolloutModelObjective(
        correction=make_correction(name, **settings),
        proximal=proximal,
        clip_low=math.inf,
        clip_high=math.inf,
        ppo_weight=ppo_weight,
        distill_weight=distill_weight,
        distill=DISTILLATIONS[distill],
        aggregate=LOSS_AGG_MODES["token-mean"],
    )


def test_the_rollout_model_follows_its_own_policy_gradient():
    """Eq. 6 with rollouts of the very weights in training is REINFORCE, rejected tokens included."""
    setting = Setting(horizon=2, seed=8)

    gradient = setting.expected_gradients(make_objective(lam=3.0), rollout_objective(ppo_weight=0.7)).rollout_model

    table = torch.from_numpy(setting.rollout.copy()).requires_grad_()
    log_probs = table.log_softmax(-1)
    reward = sum(
        torch.stack([log_probs[step] for step in setting.world.steps(sequence)]).sum().exp() * setting.rewards[sequence]
        for sequence in setting.world.sequences
    )
    (-0.7 * reward).backward()

    np.testing.assert_allclose(gradient.numpy().T, table.grad.numpy(), rtol=0, atol=ATOL)


@pytest.mark.parametrize("distill", ["forward", "reverse"])
def test_distillation_is_the_kl_at_every_visited_state(distill):
    setting = Setting(horizon=2, seed=9)
    objective = rollout_objective(distill=distill, ppo_weight=0.0, distill_weight=0.3)

    gradients = setting.expected_gradients(make_objective(lam=3.0), objective)

    table = torch.from_numpy(setting.rollout.copy()).requires_grad_()
    log_q, log_p = table.log_softmax(-1), torch.from_numpy(np.log(tabular.probabilities(setting.policy)))
    forward_kl, reverse_kl = log_p.exp() * (log_p - log_q), log_q.exp() * (log_q - log_p)
    kl = (forward_kl if distill == "forward" else reverse_kl).sum(-1)
    d = torch.from_numpy(tabular.visits(setting.world, setting.rollout))
    (0.3 * (d * kl).sum()).backward()

    np.testing.assert_allclose(gradients.rollout_model.numpy().T, table.grad.numpy(), rtol=0, atol=ATOL)

    policy_gradient_alone = setting.expected_gradients(make_objective(lam=3.0)).policy
    np.testing.assert_array_equal(gradients.policy, policy_gradient_alone)
