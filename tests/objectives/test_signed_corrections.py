"""Corrections that read the sign of the advantage, against loops, enumeration and the losses of their papers' code."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from jackpot.corrections import make_correction
from jackpot.objectives.corrections import CorrectionInputs
from jackpot.objectives.obrs import exact_z, known_z, topk_z

# Rows: a hole (a tool wrote two tokens), two whole ones, an empty response, padding behind.
MASK = torch.tensor(
    [[1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0]],
    dtype=torch.bool,
)


def random_inputs(advantages=(1.0, -1.0, 0.0, 1.0, -0.5), mask=MASK, seed=3, deviation=0.6) -> CorrectionInputs:
    """Draw log-probs that differ by some `deviation` nats; masked entries would change every result if read."""
    draw = torch.Generator().manual_seed(seed)
    rollout = -0.2 - torch.rand(mask.shape, generator=draw, dtype=torch.float64)
    target = rollout + deviation * torch.randn(mask.shape, generator=draw, dtype=torch.float64)
    target = torch.where(mask, target, 9.0)
    return CorrectionInputs(
        rollout_log_probs=rollout,
        target_log_probs=target,
        proximal_log_probs=target,
        response_mask=mask,
        uniforms=torch.zeros(mask.shape, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64)[:, None].expand(mask.shape),
        z=known_z(torch.ones_like(rollout)),
    )


def rows_of(inputs):
    """Return, for every response, [(index, log rho, A)] of its sampled tokens."""
    rows = []
    for row, mask in enumerate(inputs.response_mask.tolist()):
        indices = [(row, t) for t, is_there in enumerate(mask) if is_there]
        ratio = inputs.target_log_probs - inputs.rollout_log_probs
        rows.append([(at, ratio[at].item(), inputs.advantages[at].item()) for at in indices])
    return rows


def assert_outcomes(correction, expected_outcomes):
    """Check {index: (weight, kept, capped)}, and that other entries are 0; the weight of a rejected token is free."""
    for at in itertools.product(*map(range, correction.weights.shape)):
        weight, is_kept, is_capped = expected_outcomes.get(at, (0.0, 0.0, False))
        assert correction.accept_mask[at].item() == is_kept
        assert correction.capped[at].item() == is_capped
        assert (correction.weights * correction.accept_mask)[at].item() == pytest.approx(weight * is_kept, rel=1e-10)
    assert not correction.capped_c2.any()
    assert correction.kappa.item() == 1.0


# prefix


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.3), (0.6, 0.1), (math.inf, 0.1), (0.1, math.inf)])
def test_prefix_weighs_by_the_product_inside_a_growing_band(low, high):
    inputs = random_inputs()
    expected_outcomes = {}
    for row in rows_of(inputs):
        total = 0.0
        for count, (at, log_ratio, advantage) in enumerate(row, start=1):
            total += log_ratio
            is_out = total > high * math.sqrt(count) or (advantage < 0 and total < -low * math.sqrt(count))
            expected_outcomes[at] = math.exp(total), float(not is_out), is_out

    assert_outcomes(make_correction("prefix", low=low, high=high).apply(inputs, {}), expected_outcomes)
    assert {is_kept for _, is_kept, _ in expected_outcomes.values()} == {0.0, 1.0}


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_prefix_has_the_gradient_of_ctpos_clipped_loss(advantage):
    """Its loss: the larger of -R A and -clip(R) A, and for A < 0 at most -e^(high sqrt t) A; R's gradient is its own
    token's."""
    low, high = 0.2, 0.3
    inputs = random_inputs([advantage] * 5)

    log_probs = inputs.target_log_probs.clone().requires_grad_()
    log_ratio = torch.where(MASK, log_probs - inputs.rollout_log_probs, 0.0)
    log_product = log_ratio.detach().cumsum(-1) + log_ratio - log_ratio.detach()
    band = MASK.cumsum(-1).clamp(min=1).sqrt()
    clipped_product = torch.minimum(torch.maximum(log_product, -low * band), high * band)
    loss = torch.maximum(-log_product.exp() * advantage, -clipped_product.exp() * advantage)
    if advantage < 0:
        loss = torch.minimum(loss, -(high * band).exp() * advantage)
    loss[MASK].sum().backward()

    correction = make_correction("prefix", low=low, high=high).apply(inputs, {})

    torch.testing.assert_close(-advantage * correction.weights * correction.accept_mask, log_probs.grad * MASK)


# f_tis


@pytest.mark.parametrize(("cap", "max_kl"), [(1.1, 0.3), (math.inf, 0.0001), (2.0, math.inf)])
def test_f_tis_is_tis_without_bad_responses_far_away(cap, max_kl):
    inputs = random_inputs([-1.0, -1.0, 1.0, -1.0, -0.5], deviation=0.3)
    expected_outcomes = {}
    for row in rows_of(inputs):
        is_far = -math.fsum(log_ratio for _, log_ratio, _ in row) > max_kl
        for at, log_ratio, advantage in row:
            is_out = is_far and advantage < 0
            expected_outcomes[at] = (
                min(math.exp(log_ratio), cap),
                float(not is_out),
                is_out or math.exp(log_ratio) > cap,
            )

    assert_outcomes(make_correction("f_tis", cap=cap, max_kl=max_kl).apply(inputs, {}), expected_outcomes)

    dropped_rows = {at[0] for at, (_, is_kept, _) in expected_outcomes.items() if not is_kept}
    assert dropped_rows <= {0, 1, 4}
    assert bool(dropped_rows) == (max_kl < math.inf)


# dppo


@pytest.mark.parametrize(("max_tv", "cap"), [(0.1, 1.2), (0.15, 20.0), (math.inf, math.inf)])
def test_dppo_drops_what_verl_calls_invalid(max_tv, cap):
    inputs = random_inputs()
    expected_outcomes = {}
    for row in rows_of(inputs):
        for at, log_ratio, advantage in row:
            difference = math.exp(inputs.target_log_probs[at]) - math.exp(inputs.rollout_log_probs[at])
            is_valid = difference <= max_tv if advantage > 0 else difference >= -max_tv
            is_out = not is_valid and advantage != 0.0
            expected_outcomes[at] = (
                min(math.exp(log_ratio), cap),
                float(not is_out),
                is_out or math.exp(log_ratio) > cap,
            )

    assert_outcomes(make_correction("dppo", max_tv=max_tv, cap=cap).apply(inputs, {}), expected_outcomes)
    assert {is_kept for _, is_kept, _ in expected_outcomes.values()} == ({1.0} if max_tv == math.inf else {0.0, 1.0})


def distributions(states=6, vocabulary=8, seed=1):
    """Draw log p_inf and log p_target over a whole vocabulary, [states, vocabulary] each."""
    draw = torch.Generator().manual_seed(seed)
    rollout_logits = torch.randn(states, vocabulary, generator=draw, dtype=torch.float64)
    target_logits = rollout_logits + torch.randn(rollout_logits.shape, generator=draw, dtype=torch.float64)
    return rollout_logits.log_softmax(-1), target_logits.log_softmax(-1)


def partition_variation(rollout, target, single_tokens):
    """Half the sum of |p_target - p_inf| over the `single_tokens` each, and all others as one."""
    other_tokens = [token for token in range(len(rollout)) if token not in single_tokens]
    cells = [[token] for token in single_tokens] + [other_tokens]
    return sum(abs(sum(target[token] - rollout[token] for token in cell)) for cell in cells) / 2.0


def inputs_away_from_rollout(rollout, target, z):
    """Inputs of one response, a token of each state that the policy prefers, with A > 0."""
    chosen_ids = (target - rollout).argmax(-1, keepdim=True)
    rows = [rows.gather(-1, chosen_ids).T for rows in (rollout, target)]
    inputs = random_inputs([1.0], torch.ones(1, len(rollout), dtype=torch.bool))
    return replace(
        inputs, rollout_log_probs=rows[0], target_log_probs=rows[1], z=type(z)(*(component[None] for component in z))
    )


def assert_threshold_is(inputs, variations):
    """Check that `dppo` drops the token of each state, moved away from p_inf, while max_tv is below these."""
    for n, variation in enumerate(variations):
        for scale, is_kept in ((1.0 - 1e-9, 0.0), (1.0 + 1e-9, 1.0)):
            correction = make_correction("dppo", divergence="topk", max_tv=variation * scale)
            assert correction.apply(inputs, {}).accept_mask[0, n].item() == is_kept


@pytest.mark.parametrize("has_fills", [False, True])
def test_dppo_measures_the_variation_over_the_top_k(has_fills):
    """With fill-ins, over the policy's top k too. It is a lower bound on the total variation."""
    rollout, target = distributions()
    top, target_top = rollout.topk(3), target.topk(3)
    z = topk_z(
        rollout_top_log_probs=top.values,
        target_at_rollout_top=target.gather(-1, top.indices),
        rollout_top_ids=top.indices,
        target_top_ids=target_top.indices,
        target_top_log_probs=target_top.values,
        fill_ins=rollout.gather(-1, target_top.indices),
        fill_valid=torch.full((len(rollout),), has_fills),
        lam=1.0,
    )

    expected_variations = []
    for n in range(len(rollout)):
        top_tokens = set(top.indices[n].tolist()) | (set(target_top.indices[n].tolist()) if has_fills else set())
        expected_variations.append(partition_variation(rollout[n].exp().tolist(), target[n].exp().tolist(), top_tokens))

    total_variation = 1.0 - exact_z(rollout, target, 1.0)
    shortfall = total_variation - torch.tensor(expected_variations, dtype=torch.float64)

    assert (shortfall > -1e-12).all()
    assert (shortfall > 0.01).any()
    assert_threshold_is(inputs_away_from_rollout(rollout, target, z), expected_variations)


def test_dppo_measures_the_whole_variation_of_a_whole_z():
    rollout, target = distributions()
    z = exact_z(rollout, target, 1.0)
    total_variation = ((rollout.exp() - target.exp()).abs().sum(-1) / 2.0).tolist()
    assert_threshold_is(inputs_away_from_rollout(rollout, target, known_z(z)), total_variation)


def test_dppo_keeps_what_leads_back_to_the_rollout_model():
    rollout, target = distributions()
    inputs = inputs_away_from_rollout(rollout, target, known_z(torch.zeros(len(rollout))))  # a total variation of 1
    correction = make_correction("dppo", divergence="topk")

    for advantage, is_kept in ((1.0, 0.0), (0.0, 1.0), (-1.0, 1.0)):
        result = correction.apply(replace(inputs, advantages=torch.full_like(inputs.advantages, advantage)), {})
        assert result.accept_mask.eq(is_kept).all()

    equal_inputs = replace(
        inputs, target_log_probs=inputs.rollout_log_probs, advantages=torch.ones_like(inputs.advantages)
    )

    assert correction.apply(equal_inputs, {}).accept_mask.eq(1.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["prefix", "f_tis", "dppo"])
def test_a_ratio_of_e_to_the_400_leaves_finite_weights(name, dtype):
    log_ratio = torch.tensor([[400.0, -400.0, 400.0], [-400.0, -400.0, 0.5], [400.0, 400.0, -0.5]], dtype=dtype)
    inputs = random_inputs([1.0, -1.0, -1.0], torch.ones(3, 3, dtype=torch.bool))
    inputs = replace(inputs, rollout_log_probs=torch.zeros_like(log_ratio), target_log_probs=log_ratio)

    correction = make_correction(name).apply(inputs, {})

    assert correction.weights.isfinite().all()
    assert correction.accept_mask.isfinite().all()
    assert correction.weights.dtype == correction.accept_mask.dtype
    assert correction.accept_mask.dtype == dtype
