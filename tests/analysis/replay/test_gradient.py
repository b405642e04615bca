"""The factors, the bias and the variance of `jackpot replay` against sums over every token, coin and sign."""

import itertools
from dataclasses import replace

import pytest
import torch

from jackpot.analysis.replay.distributions import StateDistributions
from jackpot.analysis.replay.factors import factors, inputs_of
from jackpot.analysis.replay.gradient import exact_numbers, state_sums, state_values
from jackpot.analysis.replay.settings import CorrectionSetting, settings_of
from jackpot.config.recipes import resolve
from jackpot.objectives.losses import clipped_surrogate
from jackpot.objectives.obrs import exact_z, known_z

STATES, VOCABULARY = 3, 4
SIGNS = [torch.tensor(signs, dtype=torch.float64) for signs in itertools.product((-1.0, 1.0), repeat=VOCABULARY)]
SETTINGS = {one.label: one for one in settings_of(None, []) if not one.weighs_whole_responses}
LABELS = ["none", "is", "tis", "icepop", "drop", "obrs", "obrs expected", "mask_only", "reweight_only", "z_only"]
SAMPLED = ("obrs", "mask_only")  # what they do to a token depends on its coin


@pytest.fixture(scope="module")
def states() -> StateDistributions:
    """At the first step on a batch: old and new policy are one."""
    generator = torch.Generator().manual_seed(5)
    rollout, new = (
        (2.0 * torch.randn(STATES, VOCABULARY, generator=generator, dtype=torch.float64)).log_softmax(-1)
        for _ in range(2)
    )
    advantages = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)

    return StateDistributions(
        at=torch.ones(1, STATES, dtype=torch.bool),
        held=torch.ones(STATES, dtype=torch.bool),
        rollout=rollout,
        new=new,
        old=new,
        advantages=advantages,
    )


def inputs(setting: CorrectionSetting, states: StateDistributions, uniforms: float):
    z = exact_z(states.rollout, states.new, setting.objective.correction.lam).unsqueeze(-1).expand_as(states.new)
    mask, coins = torch.ones_like(states.new, dtype=torch.bool), torch.full_like(states.new, uniforms)
    return replace(inputs_of(setting, states.rollout, states.new, states.new, mask, known_z(z)), uniforms=coins)


def loss_gradients(setting: CorrectionSetting, states: StateDistributions, coin: float) -> torch.Tensor:
    """d loss / d logits of each state, where each token was sampled with an advantage of 1: [S, V, V].

    By autograd through the loss that training has; the ascent direction.
    """
    given = inputs(setting, states, coin)
    correction = setting.objective.correction.apply(given, {})
    logits = states.new.unsqueeze(1).repeat(1, VOCABULARY, 1).requires_grad_()
    log_probs = logits.log_softmax(-1).diagonal(dim1=1, dim2=2)  # of the token of each row
    clips = (setting.objective.clip_low, setting.objective.clip_high)
    ones = torch.ones_like(log_probs)
    surrogate = clipped_surrogate(log_probs, given.proximal_log_probs, ones, given.response_mask, *clips)
    (correction.accept_mask * correction.weights).mul(surrogate.value).sum().backward()
    return logits.grad


def by_hand(setting: CorrectionSetting, states: StateDistributions):
    """Squared norms summed over states, by enumeration of tokens, coins and the signs of every token's advantage."""
    coins = 200 if setting.label in SAMPLED else 1
    seen = torch.stack([loss_gradients(setting, states, (number + 0.5) / coins) for number in range(coins)])
    first, second = seen.mean(0), seen.square().sum(-1).mean(0)  # over coins: [S, V, V], [S, V]
    signs = torch.stack(SIGNS)
    estimator = both = exact = noise = 0.0
    for state in range(STATES):
        p_inf, p_new, size = states.rollout[state].exp(), states.new[state].exp(), states.advantages[state].abs()
        advantages = size * signs  # [signs, V]
        mean = (advantages * p_inf) @ first[state]
        squares = (advantages.square() * p_inf) @ second[state]
        target = (advantages * p_new) @ (torch.eye(VOCABULARY, dtype=torch.float64) - p_new)
        estimator += mean.square().sum(-1).mean()
        both += (mean * target).sum(-1).mean()
        exact += target.square().sum(-1).mean()
        noise += (squares - mean.square().sum(-1)).mean()

    return estimator, both, exact, noise


def of_states(setting: CorrectionSetting, states: StateDistributions):
    found = factors(setting, inputs(setting, states, 0.5), states.new, None, {})
    return state_sums(state_values(found, states), states)


@pytest.mark.parametrize("label", LABELS)
def test_the_sums_are_those_of_training_loss_enumerated(label, states):
    found = of_states(SETTINGS[label], states)
    estimator, both, exact, noise = by_hand(SETTINGS[label], states)
    within = {"rel": 0.02 if label in SAMPLED else 1e-9}  # 200 coins are not all coins

    assert float(found["exact"].value) == pytest.approx(float(exact), rel=1e-9)
    assert float(found["estimator"].value) == pytest.approx(float(estimator), **within)
    assert float(found["product"].value) == pytest.approx(float(both), **within)
    assert float(found["noise"].value) == pytest.approx(float(noise), **within)

    bias = float((1 - both**2 / (estimator * exact)).clamp(min=0).sqrt())
    assert exact_numbers(found)["bias"] == pytest.approx(bias, abs=0.02)


def test_importance_sampling_has_neither_bias_nor_drift(states):
    found = of_states(SETTINGS["is"], states)
    numbers = exact_numbers(found)
    assert numbers["bias"] == pytest.approx(0.0, abs=1e-7) and numbers["drift"] == pytest.approx(0.0, abs=1e-7)
    assert float(found["product"].value) == pytest.approx(float(found["exact"].value))

    own = replace(states, rollout=states.new)
    assert exact_numbers(of_states(SETTINGS["is"], own))["variance"] == pytest.approx(1.0)


def test_drift_without_a_correction_is_a_pull_to_the_sampler(states):
    """A (p_inf - p_new), the gradient of a constant advantage, for which the exact one is 0."""
    found = of_states(SETTINGS["none"], states)
    squares = states.advantages.square()
    pull = (squares * (states.rollout.exp() - states.new.exp()).square().sum(-1)).sum()
    exact = found["exact"].value
    scale = found["product"].value / exact

    assert exact_numbers(found)["drift"] == pytest.approx(float((pull / (scale**2 * exact)).sqrt()))


def test_expected_obrs_is_truncated_importance_sampling_on_z_rho(states):
    """a min(w, c1) = min(Z rho, c1), DESIGN of the method: the coin adds variance and nothing else."""
    setting = SETTINGS["obrs expected"]
    found = factors(setting, inputs(setting, states, 0.5), states.new, None, {})
    z = exact_z(states.rollout, states.new, 1.0).unsqueeze(-1)

    expected = (z * (states.new - states.rollout).exp()).clamp(max=3.0)
    torch.testing.assert_close(found.mean, expected)
    torch.testing.assert_close(found.square, expected.square())

    sampled = factors(SETTINGS["obrs"], inputs(SETTINGS["obrs"], states, 0.5), states.new, None, {})
    torch.testing.assert_close(sampled.mean, expected)
    assert (sampled.square >= found.square - 1e-12).all() and (sampled.square > found.square + 1e-3).any()


def test_ppos_clip_goes_by_the_sign_of_the_advantage():
    setting = SETTINGS["none"]
    rollout = torch.zeros(1, 4, dtype=torch.float64)
    new = torch.tensor([[0.5, 0.5, -0.5, -0.5]], dtype=torch.float64)  # ratios 1.65 and 0.61
    mask = torch.ones_like(new, dtype=torch.bool)
    given = inputs_of(setting, rollout, rollout, new, mask, known_z(torch.ones_like(new)))
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]], dtype=torch.float64)

    found = factors(setting, given, new, advantages, {})

    assert found.clipped.tolist() == [[1.0, 0.0, 0.0, 1.0]]
    torch.testing.assert_close(found.mean, new.exp() * (1.0 - found.clipped))
    assert factors(setting, given, new, None, {}).clipped.tolist() == [[0.5] * 4]


@pytest.mark.parametrize("surrogate", ["cispo", "gspo"])
def test_another_surrogate_is_judged_as_training_maximizes_it(surrogate):
    """Of a stale response: the gradient of its value with respect to each log-prob, over the advantage, by hand."""
    config = resolve("quickstart", "none", [f"objective.surrogate={surrogate}"])
    setting = next(one for one in settings_of(config, ["none"]) if one.label == "none")
    rollout = torch.zeros(1, 3, dtype=torch.float64)
    new = torch.tensor([[0.5, -0.1, -0.2]], dtype=torch.float64)
    mask = torch.ones_like(new, dtype=torch.bool)
    given = inputs_of(setting, rollout, rollout, new, mask, known_z(torch.ones_like(new)))
    found = factors(setting, given, new, torch.ones_like(new), {})

    mean = new.mean().exp().expand_as(new)  # inside of the clip of 0.2
    torch.testing.assert_close(found.mean, new.exp().clamp(max=1.2) if surrogate == "cispo" else mean)
    assert setting.weighs_whole_responses == (surrogate == "gspo")


def test_corrections_of_an_oapl_run_are_judged_under_ppo():
    """It multiplies no advantage by a factor, so no correction could be judged under it."""
    (own,) = [one for one in settings_of(resolve("objectives", "oapl", []), []) if one.is_own]
    (wanted,) = [one for one in settings_of(None, ["none"]) if one.label == own.label == "none proximal=rollout"]
    assert (own.surrogate, own.objective) == ("ppo", wanted.objective)
