"""Where corrections, OAPL and baselines are unbiased, and where not: by enumeration of all responses of two small
models that read the whole prefix.
"""

import itertools
import math
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from jackpot.corrections import make_correction
from jackpot.objectives.advantages import compute_advantages
from jackpot.objectives.corrections import CorrectionInputs
from jackpot.objectives.losses import oapl
from jackpot.objectives.obrs import known_z

VOCABULARY = 3
LENGTH = 4


@dataclass(frozen=True)
class Enumeration:
    """Every response once [N, T]: log-probs of its tokens under both models, a value of each prefix, and a reward."""

    rollout: Tensor
    target: Tensor
    values: Tensor
    scores: Tensor  # derivatives of the target's log-probs by a factor of the values, added to its logits
    rewards: Tensor  # [N]

    def apply(self, name: str, **settings) -> tuple[Tensor, Tensor]:
        """Return w and m of the correction, [N, T] each, with the rewards as advantages."""
        inputs = CorrectionInputs(
            rollout_log_probs=self.rollout,
            target_log_probs=self.target,
            proximal_log_probs=self.target,
            response_mask=torch.ones_like(self.rollout, dtype=torch.bool),
            uniforms=torch.zeros_like(self.rollout),
            advantages=self.rewards[:, None].expand(self.rollout.shape),
            z=known_z(torch.ones_like(self.rollout)),
        )
        result = make_correction(name, **settings).apply(inputs, {})
        return result.weights, result.accept_mask

    def mean(self, factors: Tensor | float, log_probs: Tensor | None = None) -> list[float]:
        """Return the mean of `factors` of each token, the first first, over the responses of a model.

        The model is the rollout model, or that of the log-probs.
        """
        chances = (self.rollout if log_probs is None else log_probs).sum(-1).exp()
        return (chances @ (factors * torch.ones_like(self.rollout))).tolist()


@cache
def enumeration() -> Enumeration:
    """Enumerate the responses of two models with random tables of next tokens."""
    draw = torch.Generator().manual_seed(0)
    responses = list(itertools.product(range(VOCABULARY), repeat=LENGTH))
    prefixes = [prefix for t in range(LENGTH) for prefix in itertools.product(range(VOCABULARY), repeat=t)]
    tables = [
        {prefix: torch.randn(VOCABULARY, generator=draw, dtype=torch.float64).log_softmax(-1) for prefix in prefixes}
        for _ in range(2)
    ]

    def log_probs_by(table: dict[tuple[int, ...], Tensor]) -> Tensor:
        return torch.stack(
            [torch.stack([table[response[:t]][response[t]] for t in range(LENGTH)]) for response in responses]
        )

    def value(prefix: tuple[int, ...]) -> float:
        return math.sin(7.0 * sum(prefix) + len(prefix))

    def score(prefix: tuple[int, ...], token: int) -> float:
        _, target_table = tables
        chances = target_table[prefix].exp().tolist()
        return value((*prefix, token)) - sum(p * value((*prefix, token_id)) for token_id, p in enumerate(chances))

    values = [[value(response[: t + 1]) for t in range(LENGTH)] for response in responses]
    scores = [[score(response[:t], response[t]) for t in range(LENGTH)] for response in responses]
    rewards = [1.0 if sum(response) % 2 else -1.0 for response in responses]
    rollout_table, target_table = tables
    return Enumeration(
        rollout=log_probs_by(rollout_table),
        target=log_probs_by(target_table),
        values=torch.tensor(values, dtype=torch.float64),
        scores=torch.tensor(scores, dtype=torch.float64),
        rewards=torch.tensor(rewards, dtype=torch.float64),
    )


def test_prefix_corrects_states_and_a_tokens_ratio_does_not():
    """E_inf of w f(prefix, token) = E_target of f."""
    models = enumeration()
    target_means = models.mean(models.values, models.target)

    prefix_weights, _ = models.apply("prefix", low=math.inf, high=math.inf)
    assert models.mean(prefix_weights * models.values) == pytest.approx(target_means, rel=1e-10)

    token_weights, _ = models.apply("is")
    token_means = models.mean(token_weights * models.values)

    assert token_means[0] == pytest.approx(target_means[0], rel=1e-10)
    assert token_means[-1] != pytest.approx(target_means[-1], rel=0.05)


def test_min_prefix_is_unbiased_for_two_tokens_only():
    """E_inf of the product is 1 at every token; with the smallest ratio in its place it falls below."""
    models = enumeration()
    weights, _ = models.apply("min_prefix", cap=math.inf)
    target_means = models.mean(models.values, models.target)

    weighted_means = models.mean(weights * models.values)

    assert weighted_means[:2] == pytest.approx(target_means[:2], rel=1e-10)
    assert weighted_means[3] != pytest.approx(target_means[3], rel=0.05)

    mean_weights = models.mean(weights)
    assert mean_weights[:2] == pytest.approx([1.0, 1.0], rel=1e-10)
    assert mean_weights[2] < 1.0
    assert mean_weights[3] < mean_weights[2]


def test_min_prefix_is_unbiased_for_the_token_given_its_prefix():
    """The mean of w over the next token is the smallest ratio of the prefix, whatever the token's distributions are."""
    models = enumeration()
    weights, _ = models.apply("min_prefix", cap=math.inf)
    ratios = (models.target - models.rollout).exp()
    smallest = torch.cummin(ratios, -1).values

    for t in range(1, LENGTH):
        by_prefix = (weights[:, t] * models.rollout[:, t].exp()).unflatten(0, (VOCABULARY**t, VOCABULARY, -1))[:, :, 0]
        smallest_before = smallest[:, t - 1].unflatten(0, (VOCABULARY**t, -1))[:, 0]
        torch.testing.assert_close(by_prefix.sum(-1), smallest_before, rtol=1e-12, atol=0.0)


def test_f_tis_is_unbiased_for_good_responses_alone():
    """E_inf of w m A f, f = 1: above that of `is` by just what the far bad responses held."""
    models = enumeration()
    weights, mask = models.apply("f_tis", cap=math.inf, max_kl=0.5)
    ratios, _ = models.apply("is")
    is_good = models.rewards[:, None] > 0

    assert models.mean(weights * mask * is_good) == pytest.approx(models.mean(ratios * is_good), rel=1e-12)

    gradient = models.mean(weights * mask * models.rewards[:, None])
    unbiased_gradient = models.mean(ratios * models.rewards[:, None])
    is_far = (models.rollout - models.target).sum(-1, keepdim=True) > 0.5
    omitted_gradient = models.mean(ratios * (is_far & ~is_good))
    assert min(omitted_gradient) > 0.01  # there are such responses
    sums = [sum(pair) for pair in zip(unbiased_gradient, omitted_gradient, strict=True)]
    assert gradient == pytest.approx(sums, rel=1e-10)


def test_dppo_is_unbiased_for_tokens_inside_the_region():
    """E_inf of w m f given the prefix is the policy's mean of f over the tokens that stay; the others lack both their
    probability and their gradient, and all of these move the policy away from the rollout model."""
    models = enumeration()
    weights, mask = models.apply("dppo", max_tv=0.15, cap=math.inf)
    is_outside = (models.target.exp() - models.rollout.exp()).abs() > 0.15
    moves_away = models.rewards[:, None] * (models.target - models.rollout) > 0
    is_dropped = is_outside & moves_away

    assert torch.equal(mask == 0.0, is_dropped)
    assert 0 < is_dropped.sum() < is_outside.sum()  # not all tokens outside

    weighted_probs = models.rollout.exp() * weights * mask
    torch.testing.assert_close(weighted_probs, torch.where(is_dropped, 0.0, models.target.exp()))


def test_ipo_is_unbiased_for_tokens_inside_the_region():
    """As `dppo`, but all tokens outside are lost: those that would move the policy back as well."""
    models = enumeration()
    weights, mask = models.apply("ipo", max_tv=0.15)
    is_outside = (models.target.exp() - models.rollout.exp()).abs() > 0.15
    moves_back = models.rewards[:, None] * (models.target - models.rollout) < 0

    assert torch.equal(mask == 0.0, is_outside)
    assert 0 < (is_outside & moves_back).sum() < is_outside.sum()

    weighted_probs = models.rollout.exp() * weights * mask
    torch.testing.assert_close(weighted_probs, torch.where(is_outside, 0.0, models.target.exp()))


# OAPL


BETAS = [0.2, 1.0, 3.0]


@dataclass(frozen=True)
class Group:
    """Every response of two tokens as often as a sampler writes it: log-probs and rewards, with OAPL's advantages."""

    sampler: Tensor  # [16, 2], log-probs of its tokens, 1 / 4 or 3 / 4 whatever stands before
    rewards: Tensor  # [16]
    advantages: Tensor  # [16]


def group_of(beta: float) -> Group:
    """Return the group of four times four responses, with the advantages of this beta."""
    tokens = torch.tensor([0, 1, 1, 1])  # as often as they are sampled
    responses = torch.cartesian_prod(tokens, tokens)
    sampler = torch.tensor([0.25, 0.75], dtype=torch.float64).log()[responses]
    rewards = torch.tensor([[0.5, -1.0], [0.0, 2.0]], dtype=torch.float64)[responses[:, 0], responses[:, 1]]
    groups = torch.zeros(16, dtype=torch.int64)
    return Group(sampler, rewards, compute_advantages("oapl", rewards, groups, beta=beta))


def surrogate_of(group: Group, log_probs: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return S and its gradient, [16, 2] each."""
    log_probs = log_probs.detach().requires_grad_()
    mask = torch.ones_like(group.sampler, dtype=torch.bool)
    advantages = group.advantages[:, None].expand(mask.shape)
    value = oapl(log_probs, group.sampler, advantages, mask, 0.2, 0.2, beta=beta).value
    return value.detach(), torch.autograd.grad(value.sum(), log_probs)[0]


@pytest.mark.parametrize("beta", BETAS)
def test_oapl_ends_at_the_sampler_tilted_by_the_reward(beta):
    """p_inf e^(r / beta) over its sum, the best of reward minus beta KL(policy || p_inf), has no loss left. A policy
    that writes a good response more often than that is pulled back."""
    group = group_of(beta)
    tilts = (group.rewards / beta).exp()
    mean_tilt = tilts.mean()  # over the group, which is the sum of p_inf e^(r / beta)
    best_probs = group.sampler.sum(-1).exp() * tilts / mean_tilt
    # half of a response's log-prob for each token; only their sum matters
    token_log_probs = 0.5 * best_probs.log()[:, None].expand(group.sampler.shape)

    value, gradient = surrogate_of(group, token_log_probs, beta)

    assert value.abs().max() < 1e-14
    assert gradient.abs().max() < 1e-12

    _, gradient = surrogate_of(group, token_log_probs + 0.1, beta)
    assert gradient.max() < 0.0


@pytest.mark.parametrize("beta", BETAS)
def test_oapl_has_the_papers_gradient_over_two_beta(beta):
    """Its loss: the sum of (beta log p_new / p_inf - (r - V))^2 over responses, V the log of the mean of e^(r / beta)
    over the group, times beta; the parts of a response add up to it."""
    group = group_of(beta)
    log_probs = enumeration().target[:16, :2].clone().requires_grad_()  # any policy's
    best_value = beta * (group.rewards / beta).exp().mean().log()
    errors = beta * (log_probs - group.sampler).sum(-1) - (group.rewards - best_value)
    (papers_gradient,) = torch.autograd.grad(errors.square().sum(), log_probs)

    value, gradient = surrogate_of(group, log_probs, beta)

    torch.testing.assert_close(gradient, -papers_gradient / (2.0 * beta), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(value.sum(-1), -errors.detach().square() / (2.0 * beta), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("advantage", "share"), [("rloo", 1.0), ("dr_grpo", 0.5)])
@pytest.mark.parametrize(("correction", "is_exact"), [({"name": "is"}, True), ({"name": "tis", "cap": 1.0}, False)])
def test_a_baseline_adds_no_bias_where_the_correction_has_none(advantage, share, correction, is_exact):
    """Groups of a response of each model: E of A w score is E of r w score, or half, where the mean has the own reward.
    Under a cap the mean of w score is not 0, and the baseline's own mean gets into the gradient."""
    models = enumeration()
    weights, _ = models.apply(**correction)
    count = len(models.rewards)
    pairs = torch.cartesian_prod(torch.arange(count), torch.arange(count))  # of the rollout model, of the policy
    groups = torch.arange(count**2).repeat_interleave(2)
    advantages = compute_advantages(advantage, models.rewards[pairs].flatten(), groups).unflatten(0, (count, count, 2))
    mean_advantages = advantages[..., 0] @ models.target.sum(-1).exp()

    gradient = models.mean(mean_advantages[:, None] * weights * models.scores)

    gradient_by_rewards = models.mean(models.rewards[:, None] * weights * models.scores)
    expected_gradient = [share * derivative for derivative in gradient_by_rewards]
    assert (gradient == pytest.approx(expected_gradient, rel=1e-9)) == is_exact
