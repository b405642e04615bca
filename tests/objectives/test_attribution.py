"""The arms that isolate Z, target and Bernoulli mask of OBRS, by exact enumeration over a vocabulary.

One batch holds every token of a small vocabulary once, in every state; a mean over tokens sampled from p_inf is then a
sum over the batch with p_inf as weights, and the mean of the Bernoulli mask is a(x).
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from jackpot.core.errors import ConfigError
from jackpot.corrections import make_correction
from jackpot.objectives.corrections import CorrectionInputs
from jackpot.objectives.obrs import known_z

STATES = 5
VOCAB = 7
LAMS = (0.3, 0.8, 1.0, 1.7, 4.0)


def softmax(logits):
    exp = np.exp(logits - logits.max(-1, keepdims=True))
    return exp / exp.sum(-1, keepdims=True)


def distributions(seed=0, spread=1.2):
    """Return p_inf, p_target and p_proximal, [S, V] each."""
    draw = np.random.default_rng(seed)
    start = draw.normal(size=(STATES, VOCAB))
    return tuple(softmax(start + scale * draw.normal(size=start.shape)) for scale in (0.0, spread, spread))


def z_of(p_inf, p_target, lam):
    """Return Z of each state, the sum over tokens of min(p_inf, p_target / lam)."""
    rows = zip(p_inf, p_target, strict=True)
    return np.array([math.fsum(min(p, q / lam) for p, q in zip(*row, strict=True)) for row in rows])


def inputs_of(p_inf, p_target, p_proximal, lam, uniform=0.5):
    """Return a batch with every token in every state, one uniform for all, and the exact Z."""
    z = np.repeat(z_of(p_inf, p_target, lam)[:, None], VOCAB, 1)
    return CorrectionInputs(
        rollout_log_probs=torch.from_numpy(np.log(p_inf)),
        target_log_probs=torch.from_numpy(np.log(p_target)),
        proximal_log_probs=torch.from_numpy(np.log(p_proximal)),
        response_mask=torch.ones(STATES, VOCAB, dtype=torch.bool),
        uniforms=torch.full((STATES, VOCAB), uniform, dtype=torch.float64),
        advantages=torch.ones(STATES, VOCAB, dtype=torch.float64),
        z=known_z(torch.from_numpy(z)),
    )


def factor(correction, inputs, totals=None):
    """Return the weight of every token, 0 where it is rejected."""
    result = correction.apply(inputs, totals or {})
    return (result.weights * result.accept_mask).numpy()


def mean_factor(correction, inputs, acceptance, totals=None):
    """Average the factor over the Bernoulli mask of every token: accepted with probability a(x), else rejected."""
    accepting_uniforms = torch.from_numpy(acceptance / 2)
    rejecting_uniforms = torch.from_numpy((1 + acceptance) / 2)
    accepted_factor = factor(correction, replace(inputs, uniforms=accepting_uniforms), totals)
    rejected_factor = factor(correction, replace(inputs, uniforms=rejecting_uniforms), totals)
    return acceptance * accepted_factor + np.where(acceptance < 1.0, (1.0 - acceptance) * rejected_factor, 0.0)


def tokens(p_inf, p_target, p_proximal, lam):
    """Yield (index, rho, Z, p_proximal / p_target) of every token, as floats."""
    z = z_of(p_inf, p_target, lam)
    for s in range(STATES):
        for x in range(VOCAB):
            yield (s, x), p_target[s, x] / p_inf[s, x], z[s], p_proximal[s, x] / p_target[s, x]


def assert_close(values, expected):
    assert np.allclose(values, expected, rtol=1e-11, atol=0.0)


def table_of(rule, *tables_and_lam):
    """Return rule(rho, Z, p_proximal / p_target) of every token, [S, V]."""
    values = np.zeros((STATES, VOCAB))
    for index, *numbers in tokens(*tables_and_lam):
        values[index] = rule(*numbers)
    return values


@pytest.mark.parametrize("lam", LAMS)
@pytest.mark.parametrize("c2", [0.8, math.inf])
def test_coin_only_is_target_only_if_c1_is_at_least_lam(lam, c2):
    """a max(lam, rho) = rho, and a min(max(lam, rho), c1) = min(rho, c1) only if c1 >= lam."""
    tables = distributions()
    inputs = inputs_of(*tables, lam)
    acceptance = table_of(lambda rho, *_: min(1.0, rho / lam), *tables, lam)

    for c1 in (lam, 1.5 * lam, 50.0):
        coin_factor = mean_factor(make_correction("coin_only", lam=lam, c1=c1, c2=c2), inputs, acceptance)
        assert_close(coin_factor, factor(make_correction("target_only", c1=c1, c2=c2), inputs))
        assert_close(coin_factor, table_of(lambda rho, z, r2, c1=c1: min(rho, c1) * min(r2, c2), *tables, lam))

    small_c1 = 0.5 * lam
    coin_factor = mean_factor(make_correction("coin_only", lam=lam, c1=small_c1, c2=c2), inputs, acceptance)

    def capped_rule(rho, z, r2):
        return min(1.0, rho / lam) * min(max(lam, rho), small_c1) * min(r2, c2)

    assert_close(coin_factor, table_of(capped_rule, *tables, lam))
    assert not np.allclose(coin_factor, factor(make_correction("target_only", c1=small_c1, c2=c2), inputs), rtol=1e-3)


@pytest.mark.parametrize("lam", LAMS)
@pytest.mark.parametrize("c1", [1.0, 1.4, math.inf])
@pytest.mark.parametrize("mask", ["sampled", "expected"])
def test_obrs_is_tis_on_z_rho_in_expectation(lam, c1, mask):
    """DESIGN 3: lam Z <= 1, so a min(Z max(lam, rho), c1) = min(Z rho, c1) for every lam and every c1 >= 1."""
    c2 = 1.2
    tables = distributions()
    inputs = inputs_of(*tables, lam)
    correction = make_correction("obrs", lam=lam, c1=c1, c2=c2, mask=mask, kappa="none")
    acceptance = table_of(lambda rho, *_: min(1.0, rho / lam), *tables, lam)

    expected_factor = mean_factor(correction, inputs, acceptance) if mask == "sampled" else factor(correction, inputs)

    assert_close(expected_factor, table_of(lambda rho, z, r2: min(z * rho, c1) * min(r2, c2), *tables, lam))
    assert (lam * z_of(*tables[:2], lam) <= 1.0 + 1e-12).all()


@pytest.mark.parametrize("lam", LAMS)
def test_kappa_stands_inside_the_cap_in_expectation_too(lam):
    """kappa Z may exceed 1 / lam, so that the cap c1 must be above lam kappa Z for the identity; here it is."""
    tables = distributions()
    inputs = inputs_of(*tables, lam)
    c1 = 2.0 * max(1.0, lam)
    c2 = 1.2
    correction = make_correction("obrs", lam=lam, c1=c1, c2=c2, mask="expected", kappa="prepass")
    z = z_of(*tables[:2], lam)
    kappa = table_of(lambda rho, *_: min(1.0, rho / lam), *tables, lam).sum() / (VOCAB * z.sum())
    assert kappa * z.max() * lam < c1
    assert abs(kappa - 1.0) > 0.01

    expected_factor = factor(correction, inputs, correction.measure(inputs))
    assert_close(expected_factor, table_of(lambda rho, z, r2: min(kappa * z * rho, c1) * min(r2, c2), *tables, lam))


def test_at_equal_models_every_factor_is_one():
    p_inf, *_ = distributions()
    inputs = inputs_of(p_inf, p_inf, p_inf, 1.0, uniform=0.999)
    numbers = dict(lam=1.0, c1=3.0, c2=3.0)
    arms = {
        "obrs": numbers | dict(mask="sampled", kappa="prepass"),
        "mask_only": dict(lam=1.0, mask="sampled"),
        "reweight_only": numbers | dict(kappa="prepass"),
        "z_only": dict(lam=1.0, c1=3.0, kappa="prepass"),
        "target_only": dict(c1=3.0, c2=3.0),
        "coin_only": numbers,
    }

    for name, settings in arms.items():
        correction = make_correction(name, **settings)
        assert_close(factor(correction, inputs, correction.measure(inputs)), np.ones((STATES, VOCAB)))


@pytest.mark.parametrize("lam", LAMS)
@pytest.mark.parametrize("mask", ["sampled", "expected"])
def test_mask_only_keeps_z_distributed_as_after_rejection(lam, mask):
    """E over x ~ p_inf of accept is Z, and E of accept * f is Z times the mean of f over p~, for any f."""
    p_inf, p_target, p_proximal = distributions()
    inputs = inputs_of(p_inf, p_target, p_proximal, lam)
    acceptance = np.minimum(1.0, p_target / p_inf / lam)
    correction = make_correction("mask_only", lam=lam, mask=mask)

    kept_share = mean_factor(correction, inputs, acceptance) if mask == "sampled" else factor(correction, inputs)

    z = z_of(p_inf, p_target, lam)
    assert_close((p_inf * kept_share).sum(-1), z)
    assert_close(p_inf * kept_share / z[:, None], np.minimum(p_inf, p_target / lam) / z[:, None])

    result = correction.apply(inputs, {})
    assert correction.kappa == "none"
    assert not result.capped.any()
    assert_close(result.weights.numpy(), np.ones((STATES, VOCAB)))


@pytest.mark.parametrize("lam", LAMS)
def test_expectations_are_those_that_the_docstrings_state(lam):
    """Means over p_inf: target_only 1, coin_only 1, obrs Z, mask_only Z, z_only Z, reweight_only Z E[max(lam, rho)]."""
    tables = distributions()
    p_inf, p_target, _ = tables
    inputs = inputs_of(p_inf, p_target, p_target, lam)
    uncapped = dict(c1=math.inf, c2=math.inf)
    z = z_of(p_inf, p_target, lam)
    ones = np.ones(STATES)
    acceptance = np.minimum(1.0, p_target / p_inf / lam)
    arms = {
        "target_only": (uncapped, ones),
        "coin_only": (uncapped | dict(lam=lam), ones),
        "obrs": (uncapped | dict(lam=lam, mask="sampled", kappa="none"), z),
        "mask_only": (dict(lam=lam, mask="sampled"), z),
        "z_only": (dict(lam=lam, c1=math.inf, kappa="none"), z),
        "reweight_only": (uncapped | dict(lam=lam, kappa="none"), z * np.maximum(lam * p_inf, p_target).sum(-1)),
    }

    for name, (settings, expected_means) in arms.items():
        mean_factors = mean_factor(make_correction(name, **settings), inputs, acceptance)
        assert_close((p_inf * mean_factors).sum(-1), expected_means)


@pytest.mark.parametrize("lam", LAMS)
@pytest.mark.parametrize("c1", [0.6, 1.3, math.inf])
def test_reweight_only_and_z_only_are_their_equations(lam, c1):
    c2 = 0.9
    tables = distributions(seed=3)
    inputs = inputs_of(*tables, lam)
    z = z_of(*tables[:2], lam)
    kappa = table_of(lambda rho, *_: min(1.0, rho / lam), *tables, lam).sum() / (VOCAB * z.sum())
    rules = {
        "reweight_only": (dict(c2=c2), lambda rho, z, r2: min(kappa * z * max(lam, rho), c1) * min(r2, c2)),
        "z_only": ({}, lambda rho, z, r2: min(kappa * z, c1)),
    }

    for name, (settings, rule) in rules.items():
        correction = make_correction(name, lam=lam, c1=c1, kappa="prepass", **settings)
        result = correction.apply(inputs, correction.measure(inputs))
        assert_close(result.weights.numpy(), table_of(rule, *tables, lam))
        assert (result.accept_mask == 1.0).all()
        assert result.kappa.item() == pytest.approx(kappa, rel=1e-11)

    expected_caps = table_of(lambda rho, z, r2: float(kappa * z * max(lam, rho) > c1), *tables, lam)
    reweight = make_correction("reweight_only", lam=lam, c1=c1, c2=c2, kappa="prepass")

    result = reweight.apply(inputs, reweight.measure(inputs))

    assert (result.capped.numpy() == expected_caps).all()
    assert (result.capped_c2.numpy() == table_of(lambda rho, z, r2: float(r2 > c2), *tables, lam)).all()


@pytest.mark.parametrize("c1", [0.8, 3.0])
def test_target_only_is_tis_at_the_same_target(c1):
    p_inf, p_target, _ = distributions()
    inputs = inputs_of(p_inf, p_target, p_target, 1.0)

    tis_factor = factor(make_correction("tis", cap=c1), inputs)

    assert_close(factor(make_correction("target_only", c1=c1, c2=3.0), inputs), tis_factor)
    assert_close(tis_factor, np.minimum(p_target / p_inf, c1))


@pytest.mark.parametrize("name", ["mask_only", "reweight_only", "z_only", "coin_only"])
@pytest.mark.parametrize("lam", [0.0, -1.0, math.nan])
def test_a_lam_that_is_not_above_zero_is_refused(name, lam):
    with pytest.raises(ConfigError, match=f"{name}: lam: {lam} was given. Input should be "):
        make_correction(name, lam=lam)


@pytest.mark.parametrize("name", ["target_only", "coin_only", "reweight_only", "obrs"])
def test_log_ratios_of_400_stay_finite_under_the_caps(name):
    """In float32 exp(400) is infinite and exp(-400) is 0; a capped weight must be neither NaN nor infinite."""
    rollout = torch.zeros(1, 4)
    target = torch.tensor([[400.0, -400.0, 400.0, -400.0]])
    proximal = torch.tensor([[400.0, -400.0, -400.0, 400.0]])
    inputs = CorrectionInputs(
        rollout_log_probs=rollout,
        target_log_probs=target,
        proximal_log_probs=proximal,
        response_mask=torch.ones(1, 4, dtype=torch.bool),
        uniforms=torch.zeros(1, 4, dtype=torch.float64),
        advantages=torch.ones(1, 4),
        z=known_z(torch.full((1, 4), 0.5)),
    )
    other_settings = {"obrs": dict(mask="sampled", kappa="none"), "reweight_only": dict(kappa="none")}.get(name, {})
    lam_setting = {} if name == "target_only" else {"lam": 0.9}

    result = make_correction(name, c1=1.5, c2=2.0, **lam_setting, **other_settings).apply(inputs, {})

    assert result.weights.isfinite().all()
    assert result.accept_mask.isfinite().all()

    least_weight = {"target_only": 0.0, "coin_only": 0.9, "reweight_only": 0.45, "obrs": 0.45}[name]
    assert result.weights.tolist()[0] == pytest.approx([1.5, least_weight, 0.0, 2.0 * least_weight], rel=1e-6)
