"""The factors, the bias and the variance that `jackpot replay` states equal sums over every token, coin and sign."""

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
SETTINGS = {setting.label: setting for setting in settings_of(None, []) if not setting.weighs_whole_responses}
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
    """What the correction sees of every token of the vocabulary, each with the coin `uniforms`."""
    z = exact_z(states.rollout, states.new, setting.objective.correction.lam).unsqueeze(-1).expand_as(states.new)
    mask, coins = torch.ones_like(states.new, dtype=torch.bool), torch.full_like(states.new, uniforms)
    return replace(inputs_of(setting, states.rollout, states.new, states.new, mask, known_z(z)), uniforms=coins)


def loss_gradients(setting: CorrectionSetting, states: StateDistributions, coin: float) -> torch.Tensor:
    """d loss / d logits of each state, where each token was sampled with an advantage of 1: [S, V, V].

    By autograd through the loss that training has; the ascent direction.
    """
    correction_inputs = inputs(setting, states, uniforms=coin)
    correction = setting.objective.correction.apply(correction_inputs, {})
    logits = states.new.unsqueeze(1).repeat(1, VOCABULARY, 1).requires_grad_()
    log_probs = logits.log_softmax(-1).diagonal(dim1=1, dim2=2)  # of the token of each row
    clips = (setting.objective.clip_low, setting.objective.clip_high)
    ones = torch.ones_like(log_probs)
    surrogate = clipped_surrogate(
        log_probs, correction_inputs.proximal_log_probs, ones, correction_inputs.response_mask, *clips
    )
    (correction.accept_mask * correction.weights).mul(surrogate.value).sum().backward()
    return logits.grad


def by_hand(setting: CorrectionSetting, states: StateDistributions):
    """Squared norms summed over states, by enumeration of tokens, coins and the signs of every token's advantage."""
    coins = 200 if setting.label in SAMPLED else 1
    seen = torch.stack([loss_gradients(setting, states, (index + 0.5) / coins) for index in range(coins)])
    first, second = seen.mean(0), seen.square().sum(-1).mean(0)  # over coins: [S, V, V], [S, V]
    signs = torch.stack(SIGNS)
    estimator, both = 0.0, 0.0
    exact, noise = 0.0, 0.0

    for state in range(STATES):
        p_inf, p_new = states.rollout[state].exp(), states.new[state].exp()
        size = states.advantages[state].abs()
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
    """The sums that `jackpot replay` keeps of the states."""
    of_tokens = factors(setting, inputs(setting, states, uniforms=0.5), states.new, advantages=None, totals={})
    return state_sums(state_values(of_tokens, states), states)


@pytest.mark.parametrize("label", LABELS)
def test_the_sums_are_those_of_training_loss_enumerated(label, states):
    sums = of_states(SETTINGS[label], states)
    estimator, both, exact, noise = by_hand(SETTINGS[label], states)
    within = {"rel": 0.02 if label in SAMPLED else 1e-9}  # 200 coins are not all coins

    assert float(sums["exact"].value) == pytest.approx(float(exact), rel=1e-9)
    assert float(sums["estimator"].value) == pytest.approx(float(estimator), **within)
    assert float(sums["product"].value) == pytest.approx(float(both), **within)
    assert float(sums["noise"].value) == pytest.approx(float(noise), **within)

    bias = float((1 - both**2 / (estimator * exact)).clamp(min=0).sqrt())
    assert exact_numbers(sums)["bias"] == pytest.approx(bias, abs=0.02)


def test_importance_sampling_has_neither_bias_nor_drift(states):
    sums = of_states(SETTINGS["is"], states)
    numbers = exact_numbers(sums)
    assert numbers["bias"] == pytest.approx(0.0, abs=1e-7) and numbers["drift"] == pytest.approx(0.0, abs=1e-7)
    assert float(sums["product"].value) == pytest.approx(float(sums["exact"].value))

    without_gap = replace(states, rollout=states.new)
    assert exact_numbers(of_states(SETTINGS["is"], without_gap))["variance"] == pytest.approx(1.0)


def test_drift_without_a_correction_is_a_pull_to_the_sampler(states):
    """A (p_inf - p_new), the gradient of a constant advantage, for which the exact one is 0."""
    sums = of_states(SETTINGS["none"], states)
    squares = states.advantages.square()
    pull = (squares * (states.rollout.exp() - states.new.exp()).square().sum(-1)).sum()
    exact = sums["exact"].value
    scale = sums["product"].value / exact

    assert exact_numbers(sums)["drift"] == pytest.approx(float((pull / (scale**2 * exact)).sqrt()))


def test_expected_obrs_is_truncated_importance_sampling_on_z_rho(states):
    """a min(w, c1) = min(Z rho, c1), DESIGN of the method: the coin adds variance and nothing else."""
    setting = SETTINGS["obrs expected"]

    masked = factors(setting, inputs(setting, states, uniforms=0.5), states.new, advantages=None, totals={})

    z = exact_z(states.rollout, states.new, 1.0).unsqueeze(-1)
    expected = (z * (states.new - states.rollout).exp()).clamp(max=3.0)
    torch.testing.assert_close(masked.mean, expected)
    torch.testing.assert_close(masked.square, expected.square())

    sampled = factors(
        SETTINGS["obrs"], inputs(SETTINGS["obrs"], states, uniforms=0.5), states.new, advantages=None, totals={}
    )
    torch.testing.assert_close(sampled.mean, expected)
    assert (sampled.square >= masked.square - 1e-12).all() and (sampled.square > masked.square + 1e-3).any()


def test_ppos_clip_goes_by_the_sign_of_the_advantage():
    setting = SETTINGS["none"]
    rollout = torch.zeros(1, 4, dtype=torch.float64)
    new = torch.tensor([[0.5, 0.5, -0.5, -0.5]], dtype=torch.float64)  # ratios 1.65 and 0.61
    mask = torch.ones_like(new, dtype=torch.bool)
    correction_inputs = inputs_of(setting, rollout, rollout, new, mask, known_z(torch.ones_like(new)))
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]], dtype=torch.float64)

    clipped_factors = factors(setting, correction_inputs, new, advantages, {})

    assert clipped_factors.clipped.tolist() == [[1.0, 0.0, 0.0, 1.0]]
    torch.testing.assert_close(clipped_factors.mean, new.exp() * (1.0 - clipped_factors.clipped))
    assert factors(setting, correction_inputs, new, advantages=None, totals={}).clipped.tolist() == [[0.5] * 4]


@pytest.mark.parametrize("surrogate", ["cispo", "gspo"])
def test_another_surrogate_is_judged_as_training_maximizes_it(surrogate):
    """Of a stale response: the gradient of its value with respect to each log-prob, over the advantage, by hand."""
    config = resolve("quickstart", "none", [f"objective.surrogate={surrogate}"])
    setting = next(candidate for candidate in settings_of(config, ["none"]) if candidate.label == "none")
    rollout = torch.zeros(1, 3, dtype=torch.float64)
    new = torch.tensor([[0.5, -0.1, -0.2]], dtype=torch.float64)
    mask = torch.ones_like(new, dtype=torch.bool)
    correction_inputs = inputs_of(setting, rollout, rollout, new, mask, known_z(torch.ones_like(new)))

    token_factors = factors(setting, correction_inputs, new, torch.ones_like(new), {})

    mean = new.mean().exp().expand_as(new)  # inside of the clip of 0.2
    torch.testing.assert_close(token_factors.mean, new.exp().clamp(max=1.2) if surrogate == "cispo" else mean)
    assert setting.weighs_whole_responses == (surrogate == "gspo")


def test_corrections_of_an_oapl_run_are_judged_under_ppo():
    """It multiplies no advantage by a factor, so no correction could be judged under it."""
    (of_run,) = [setting for setting in settings_of(resolve("objectives", "oapl", []), []) if setting.is_own]
    (plain,) = [
        setting for setting in settings_of(None, ["none"]) if setting.label == of_run.label == "none proximal=rollout"
    ]

    assert (of_run.surrogate, of_run.objective) == ("ppo", plain.objective)
