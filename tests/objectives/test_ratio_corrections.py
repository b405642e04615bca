"""Corrections that read the ratio alone, token by token and response by response, against Python loops."""

import math
from dataclasses import replace

import pytest
import torch

from jackpot.core.errors import ConfigError
from jackpot.corrections import make_correction
from jackpot.objectives.corrections import CorrectionInputs
from jackpot.objectives.obrs import known_z

# Rows: a hole (a tool wrote two tokens), a whole one, an empty response, padding behind, one token alone.
MASK = torch.tensor(
    [[1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0], [0, 0, 1, 0, 0, 0]],
    dtype=torch.bool,
)
HUGE = [[400.0, -400.0, 400.0], [-400.0, -400.0, 0.5], [400.0, 400.0, -0.5]]


def inputs_of(log_ratios, mask, dtype=torch.float64):
    """Build inputs with these log rho; masked entries hold numbers that would change every result if they were read."""
    log_ratios = torch.where(mask, log_ratios, 7.0).to(dtype)
    rollout = torch.full_like(log_ratios, -1.5)
    target = rollout + log_ratios
    return CorrectionInputs(
        rollout_log_probs=rollout,
        target_log_probs=target,
        proximal_log_probs=target,
        response_mask=mask,
        uniforms=torch.full(mask.shape, 0.5, dtype=torch.float64),
        advantages=torch.ones_like(log_ratios),
        z=known_z(torch.full_like(log_ratios, 0.7)),
    )


def spread_inputs(deviation=0.4):
    """Random ratios at the tokens of MASK, inside and outside every band and cap of these tests."""
    draw = torch.Generator().manual_seed(4)
    levels = torch.tensor([[-0.5], [0.1], [0.0], [0.6], [0.2]], dtype=torch.float64)  # responses differ as wholes too
    return inputs_of(levels + deviation * torch.randn(MASK.shape, generator=draw, dtype=torch.float64), MASK)


def rows_of(inputs):
    """Return, for every response, [(index, log rho)] of its sampled tokens."""
    rows = []
    for row, mask in enumerate(inputs.response_mask.tolist()):
        log_probs = inputs.rollout_log_probs[row].tolist(), inputs.target_log_probs[row].tolist()
        tokens = enumerate(zip(mask, *log_probs, strict=True))
        rows.append(
            [
                ((row, t), target_log_prob - rollout_log_prob)
                for t, (is_there, rollout_log_prob, target_log_prob) in tokens
                if is_there
            ]
        )
    return rows


def exp(exponent):
    """e ** exponent, infinite where a float would overflow."""
    return math.exp(exponent) if exponent < 700.0 else math.inf


def by_token(inputs, rule):
    """Return {index: (weight, kept, capped)} by a rule on rho."""
    return {at: rule(exp(log_ratio)) for row in rows_of(inputs) for at, log_ratio in row}


def by_response(inputs, rule):
    """Return {index: (weight, kept, capped)} by a rule on (log R, number of sampled tokens)."""
    outcomes = {}
    for row in rows_of(inputs):
        outcome = rule(math.fsum(log_ratio for _, log_ratio in row), len(row)) if row else None
        outcomes |= {at: outcome for at, _ in row}
    return outcomes


def band(low, high):
    """The rule of (weight, kept, capped) on rho: inside the band it weighs, outside it is dropped."""
    return lambda rho: (rho, 1.0, False) if low <= rho <= high else (0.0, 0.0, True)


def assert_outcomes(correction, expected_outcomes):
    """Check {index: (weight, kept, capped)}, and that other entries are 0."""
    for at in torch.cartesian_prod(*map(torch.arange, correction.weights.shape)).tolist():
        at = tuple(at)
        weight, is_kept, is_capped = expected_outcomes.get(at, (0.0, 0.0, False))
        assert correction.weights[at].item() == pytest.approx(weight, rel=1e-10)
        assert correction.accept_mask[at].item() == is_kept
        assert correction.capped[at].item() == is_capped
    assert not correction.capped_c2.any()
    assert correction.kappa.item() == 1.0


@pytest.mark.parametrize(("low", "high"), [(0.5, 5.0), (0.9, 1.1), (0.0, 2.0), (1.0, 1.0)])
def test_icepop_weighs_by_the_ratio_inside_its_band(low, high):
    inputs = spread_inputs()
    expected_outcomes = by_token(inputs, band(low, high))
    assert_outcomes(make_correction("icepop", low=low, high=high).apply(inputs, {}), expected_outcomes)
    assert any(is_capped for *_, is_capped in expected_outcomes.values())


@pytest.mark.parametrize("cap", [0.7, 1.0, 2.0])
def test_drop_removes_tokens_above_the_cap(cap):
    inputs = spread_inputs()
    expected_outcomes = by_token(inputs, band(0.0, cap))
    assert_outcomes(make_correction("drop", cap=cap).apply(inputs, {}), expected_outcomes)
    assert {is_kept for _, is_kept, _ in expected_outcomes.values()} == {0.0, 1.0}


@pytest.mark.parametrize("max_tv", [0.02, 0.1, math.inf])
def test_ipo_weighs_by_the_ratio_where_p_moved_little(max_tv):
    inputs = spread_inputs()
    expected_outcomes = {}
    for at, log_ratio in (pair for row in rows_of(inputs) for pair in row):
        is_far = abs(math.exp(log_ratio - 1.5) - math.exp(-1.5)) > max_tv  # log p_inf is -1.5 everywhere
        expected_outcomes[at] = (0.0, 0.0, True) if is_far else (math.exp(log_ratio), 1.0, False)

    assert_outcomes(make_correction("ipo", max_tv=max_tv).apply(inputs, {}), expected_outcomes)
    assert {is_kept for _, is_kept, _ in expected_outcomes.values()} == ({1.0} if max_tv == math.inf else {0.0, 1.0})


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_ipo_has_the_gradient_of_prime_rls_loss(advantage):
    """Its loss: minus the sum of keep * A * p_train / p_infer, whose mask reads the probabilities as they are."""
    inputs = spread_inputs()
    log_probs = inputs.target_log_probs.clone().requires_grad_()
    keep_mask = MASK & ((log_probs.detach().exp() - inputs.rollout_log_probs.exp()).abs() <= 0.1)

    loss = -(keep_mask * advantage * (log_probs - inputs.rollout_log_probs).exp()).sum()
    (gradient,) = torch.autograd.grad(loss, log_probs)

    correction = make_correction("ipo", max_tv=0.1).apply(inputs, {})  # PPO's ratio is 1, at the current policy

    torch.testing.assert_close(-advantage * correction.weights * correction.accept_mask, gradient)


def test_a_ratio_on_the_edge_of_the_band_is_inside():
    edges = torch.tensor([[math.log(0.5), 0.0, math.log(2.0)]], dtype=torch.float64)
    inputs = replace(inputs_of(edges, torch.ones(1, 3, dtype=torch.bool)), rollout_log_probs=torch.zeros(1, 3).double())
    inputs = replace(inputs, target_log_probs=edges)
    accept_mask = make_correction("icepop", low=0.5, high=2.0).apply(inputs, {}).accept_mask
    assert accept_mask.tolist() == [[1.0, 1.0, 1.0]]


@pytest.mark.parametrize("cap", [0.5, 1.0, 2.0])
def test_seq_tis_weighs_by_the_capped_product_of_a_response(cap):
    inputs = spread_inputs()
    expected_outcomes = by_response(inputs, lambda log_r, n: (min(exp(log_r), cap), 1.0, exp(log_r) > cap))
    assert_outcomes(make_correction("seq_tis", cap=cap).apply(inputs, {}), expected_outcomes)
    assert len({weight for weight, *_ in expected_outcomes.values()}) > 1


@pytest.mark.parametrize(("low", "high"), [(0.0, 3.0), (0.3, 1.2), (1.05, math.inf)])
def test_seq_mask_drops_whole_responses_by_the_product(low, high):
    inputs = spread_inputs()
    expected_outcomes = by_response(inputs, lambda log_r, n: band(low, high)(exp(log_r)))
    assert_outcomes(make_correction("seq_mask", low=low, high=high).apply(inputs, {}), expected_outcomes)


def test_a_lower_end_of_zero_drops_no_response():
    """R = e^-40 is usual in a long response."""
    inputs = inputs_of(torch.full((1, 4), -10.0, dtype=torch.float64), torch.ones(1, 4, dtype=torch.bool))
    correction = make_correction("seq_mask", low=0.0, high=3.0).apply(inputs, {})
    assert correction.accept_mask.all()
    assert not correction.capped.any()


@pytest.mark.parametrize(("low", "high"), [(0.7, 1.4), (0.9, 1.3), (0.0, 1.0)])
def test_geometric_mask_drops_whole_responses_by_their_mean(low, high):
    inputs = spread_inputs()

    def rule(log_r, n):
        is_inside = low <= exp(log_r / n) <= high
        return 1.0, float(is_inside), not is_inside

    expected_outcomes = by_response(inputs, rule)

    assert {is_kept for _, is_kept, _ in expected_outcomes.values()} == {0.0, 1.0}
    assert_outcomes(make_correction("geo_mask", low=low, high=high).apply(inputs, {}), expected_outcomes)


def test_the_geometric_mean_divides_by_sampled_tokens():
    """Two sampled tokens with rho = 2 among ten: a mean over ten would be 1.15 and inside."""
    mask = torch.zeros(1, 10, dtype=torch.bool)
    mask[0, [2, 7]] = True
    inputs = inputs_of(torch.full((1, 10), math.log(2.0), dtype=torch.float64), mask)
    correction = make_correction("geo_mask", low=0.5, high=1.5).apply(inputs, {})

    assert correction.accept_mask.sum() == 0.0
    assert correction.capped.sum() == 2


def by_smallest_before(inputs, rule):
    """Return {index: (weight, kept, capped)} by a rule on log rho + the smallest log rho of the tokens before it."""
    outcomes = {}
    for row in rows_of(inputs):
        for position, (at, log_ratio) in enumerate(row):
            earlier_ratios = [earlier_ratio for _, earlier_ratio in row[:position]]
            outcomes[at] = rule(log_ratio + (min(earlier_ratios) if earlier_ratios else 0.0))
    return outcomes


@pytest.mark.parametrize("cap", [0.5, 1.0, math.inf])
def test_min_prefix_weighs_by_the_smallest_ratio_before(cap):
    inputs = spread_inputs()
    expected_outcomes = by_smallest_before(inputs, lambda log_w: (min(exp(log_w), cap), 1.0, exp(log_w) > cap))
    assert_outcomes(make_correction("min_prefix", cap=cap).apply(inputs, {}), expected_outcomes)
    assert any(is_capped for *_, is_capped in expected_outcomes.values()) == (cap < math.inf)


def huge_outcomes():
    """Return (correction, its settings, outcomes by loops) of all corrections of this file that HUGE could overflow."""
    return [
        ("icepop", {"low": 0.5, "high": 5.0}, lambda rows: by_token(rows, band(0.5, 5.0))),
        ("drop", {"cap": 5.0}, lambda rows: by_token(rows, band(0.0, 5.0))),
        ("tis", {"cap": 2.0}, lambda rows: by_token(rows, lambda rho: (min(rho, 2.0), 1.0, rho > 2.0))),
        (
            "seq_tis",
            {"cap": 2.0},
            lambda rows: by_response(rows, lambda log_r, n: (min(exp(log_r), 2.0), 1.0, exp(log_r) > 2.0)),
        ),
        ("seq_mask", {"low": 0.0, "high": 3.0}, lambda rows: by_response(rows, lambda r, n: band(0.0, 3.0)(exp(r)))),
        (
            "geo_mask",
            {"low": 0.5, "high": 2.0},
            lambda rows: by_response(rows, lambda r, n: (1.0, float(0.5 <= exp(r / n) <= 2.0), exp(r / n) > 2.0)),
        ),
        (
            "min_prefix",
            {"cap": 2.0},
            lambda rows: by_smallest_before(rows, lambda log_w: (min(exp(log_w), 2.0), 1.0, exp(log_w) > 2.0)),
        ),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "settings", "rule"), huge_outcomes(), ids=[name for name, *_ in huge_outcomes()])
def test_a_ratio_of_e_to_the_400_becomes_its_limit(name, settings, rule, dtype):
    """exp(400) is infinite in float32, and a product of two also in float64."""
    inputs = inputs_of(torch.tensor(HUGE, dtype=torch.float64), torch.ones(3, 3, dtype=torch.bool), dtype)

    correction = make_correction(name, **settings).apply(inputs, {})

    assert correction.weights.isfinite().all()
    assert correction.accept_mask.isfinite().all()

    expected_outcomes = rule(
        replace(
            inputs,
            **{column: getattr(inputs, column).double() for column in ("rollout_log_probs", "target_log_probs")},
        )
    )

    for at, (weight, is_kept, _) in expected_outcomes.items():
        applied_weight = (correction.weights * correction.accept_mask)[at].item()
        assert applied_weight == pytest.approx(weight * is_kept, rel=1e-4, abs=1e-37)


@pytest.mark.parametrize("name", ["icepop", "seq_mask", "geo_mask"])
def test_a_band_that_is_upside_down_is_refused(name):
    with pytest.raises(ConfigError, match=rf"{name}: low is 2\.0 and high is 1\.0; low must lie from 0 to high"):
        make_correction(name, low=2.0, high=1.0)
    with pytest.raises(ConfigError, match=r"low: -0\.1 was given"):
        make_correction(name, low=-0.1, high=1.0)
    with pytest.raises(ConfigError, match="low: nan was given"):
        make_correction(name, low=math.nan, high=1.0)
    with pytest.raises(ConfigError, match=r"high: 0\.0 was given. Input should be greater than 0"):
        make_correction(name, low=0.0, high=0.0)


@pytest.mark.parametrize("name", ["tis", "drop", "seq_tis", "min_prefix", "f_tis", "dppo"])
@pytest.mark.parametrize("cap", [0.0, -1.0, math.nan])
def test_a_cap_that_is_not_above_zero_is_refused(name, cap):
    with pytest.raises(ConfigError, match=f"correction {name}: cap: {cap} was given. Input should be greater than 0"):
        make_correction(name, cap=cap)
