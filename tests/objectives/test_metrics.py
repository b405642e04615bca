"""The metrics of a micro-batch against loops over its tokens."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from jackpot.core.bands import POSITIONS, band_names
from jackpot.corrections import make_correction
from jackpot.objectives.corrections import CorrectionInputs
from jackpot.objectives.metrics import correction_metrics, health, mismatch, update_kl
from jackpot.objectives.obrs import known_z

NAMES = ["at_0", "at_1-3", "at_4-15", "at_16-63", "at_64-255", "at_256-1023", "at_1024-4095", "at_4096-up"]
LAM, C1 = 0.8, 1.1


def scene(rows=6, width=70, seed=0):
    """Inputs with holes, an empty response and NaN outside the mask; advantages of both signs and 0; PPO's clips."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    mask = torch.rand(rows, width, generator=draw) < 0.7
    mask[1] = False
    mask[2, 5:] = False
    dirty = torch.full((rows, width), torch.nan, dtype=torch.float64)
    rollout, ratio = -1.0 + 0.5 * normal(rows, width), 0.7 * normal(rows, width)
    advantages = (normal(rows, 1) * torch.tensor([1, 1, 1, 0, 1, 1])[:, None]).expand(rows, width)
    z = torch.rand(rows, width, generator=draw, dtype=torch.float64)
    inputs = CorrectionInputs(
        rollout_log_probs=torch.where(mask, rollout, dirty),
        target_log_probs=torch.where(mask, rollout + ratio, dirty),
        proximal_log_probs=torch.where(mask, rollout + ratio, dirty),
        response_mask=mask,
        uniforms=torch.rand(rows, width, generator=draw, dtype=torch.float64),
        advantages=torch.where(mask, advantages, dirty),
        z=known_z(torch.where(mask, z, dirty)),
    )
    return inputs, torch.where(mask, advantages, dirty), torch.rand(rows, width, generator=draw) < 0.3


def log_ratios(inputs):
    return torch.where(inputs.response_mask, inputs.target_log_probs - inputs.rollout_log_probs, 0.0)


def groups_of(inputs, advantages):
    """Return {end of the metric's name: [(row, position)]} by loops."""
    places = inputs.response_mask.nonzero().tolist()
    found = {"": places}
    found["_positive"] = [at for at in places if advantages[tuple(at)] > 0]
    found["_negative"] = [at for at in places if advantages[tuple(at)] < 0]
    for name, start, end in zip(NAMES, POSITIONS, (*POSITIONS[1:], math.inf), strict=True):
        found[f"_{name}"] = [at for at in places if start <= at[1] < end]
    return {name: [tuple(at) for at in places] for name, places in found.items()}


def approx(values):
    return pytest.approx(np.mean(values) if len(values) else math.nan, rel=1e-10, abs=1e-14, nan_ok=True)


def test_bands_of_positions_end_names_as_documented():
    assert [f"at_{name}" for name in band_names(POSITIONS)] == NAMES


def test_every_column_is_averaged_by_sign_and_position():
    inputs, advantages, clipped = scene()
    correction = make_correction("obrs", lam=LAM, c1=C1, c2=1.0, mask="sampled", kappa="none").apply(inputs, {})
    found = correction_metrics(correction, inputs, LAM, clipped, {})
    factor = correction.weights * correction.accept_mask
    ratio = log_ratios(inputs).exp()
    columns = {
        "obrs/acceptance": (ratio / LAM).clamp(max=1.0),
        "correction/accepted": correction.accept_mask,
        "correction/weight": factor,
        "correction/clip_frac": correction.capped.double(),
        "correction/clip_frac_c2": correction.capped_c2.double(),
        "policy/clip_frac": clipped.double(),
    }
    groups = groups_of(inputs, advantages)
    for column, values in columns.items():
        for group, places in groups.items():
            if (column, group) == ("obrs/acceptance", ""):
                assert column not in found
                continue
            entry = found[column + group]
            assert entry.count.item() == len(places), column + group
            assert entry.value.item() == approx([values[at].item() for at in places]), column + group
            variance = np.var([values[at].item() for at in places]) if places else math.nan
            assert entry.variance.item() == pytest.approx(variance, rel=1e-8, abs=1e-13, nan_ok=True)
    assert len(groups["_positive"]) > 0 and len(groups["_negative"]) > 0 and len(groups["_at_64-255"]) > 0
    assert len(groups["_positive"]) + len(groups["_negative"]) < len(groups[""])  # zero advantages are in neither


def test_largest_weight_and_advantage_are_of_the_right_tokens():
    inputs, advantages, clipped = scene()
    correction = make_correction("obrs", lam=LAM, c1=C1, c2=1.0, mask="sampled", kappa="prepass")
    totals = correction.measure(inputs)
    result = correction.apply(inputs, totals)
    found = correction_metrics(result, inputs, LAM, clipped, totals)
    places = groups_of(inputs, advantages)[""]
    ratio, z = log_ratios(inputs).exp(), inputs.z.value
    kappa = sum(min(1.0, ratio[at].item() / LAM) for at in places) / sum(z[at].item() for at in places)
    assert found["obrs/kappa"].value.item() == pytest.approx(kappa, rel=1e-12)
    gaps = [min(1.0, ratio[at].item() / LAM) - z[at].item() for at in places]
    error = math.sqrt(sum(gap**2 for gap in gaps)) / sum(z[at].item() for at in places)
    highest = min(1.0, 1.0 / LAM)  # no true Z is above it
    above = [(kappa - 2.0 * error) * z[at].item() > highest + 1e-6 for at in places]
    assert found["obrs/kappa_z_above_1"].value.item() == approx(above)
    assert 0.0 < found["obrs/kappa_z_above_1"].value < 1.0 and LAM != 1.0 and error > 0.01
    largest = max((result.weights * result.accept_mask)[at].item() for at in places)
    assert found["correction/weight_max"].value.item() == largest > 0.0
    assert found["policy/largest_advantage"].value.item() == max(abs(advantages[at].item()) for at in places)
    kept = [abs(advantages[at].item()) for at in places if result.accept_mask[at]]
    assert found["policy/largest_kept_advantage"].value.item() == max(kept)


def effective(log_weights):
    """Compute (sum w)^2 / (n sum w^2) directly."""
    weights = [math.exp(log_weight) for log_weight in log_weights]
    if not weights:
        return math.nan
    return math.fsum(weights) ** 2 / (len(weights) * math.fsum(w * w for w in weights))


def test_effective_sizes_are_of_tokens_prefixes_and_responses():
    inputs, advantages, _ = scene()
    ratios, mask = log_ratios(inputs), inputs.response_mask
    found = mismatch(ratios, mask)
    token, present = ratios[mask].tolist(), [row for row in range(len(mask)) if mask[row].any()]
    assert found["mismatch/ratio"].effective_share.item() == pytest.approx(effective(token), rel=1e-10)
    whole = [math.fsum(ratios[row][mask[row]].tolist()) for row in present]
    assert found["mismatch/sequence_ess"].value.item() == pytest.approx(effective(whole), rel=1e-10)
    assert found["mismatch/sequence_ess"].count.item() == len(whole) == 5
    assert found["mismatch/sequence_log_ratio"].value.item() == approx(whole)
    assert found["mismatch/sequence_log_ratio"].variance.item() == pytest.approx(np.var(whole), rel=1e-10)
    for name, places in groups_of(inputs, advantages).items():
        if name.startswith("_at_"):
            prefix = [math.fsum(ratios[row, :t][mask[row, :t]].tolist()) for row, t in places]
            entry = found[f"mismatch/prefix_ess{name}"]
            assert entry.value.item() == pytest.approx(effective(prefix), rel=1e-9, nan_ok=True), name
    assert found["mismatch/prefix_ess_at_0"].value.item() == 1.0  # nothing stands before the first token


def test_the_ratio_is_described_by_mean_tails_and_kls():
    inputs, *_ = scene()
    spread = 4.0 * log_ratios(inputs)
    found = mismatch(spread, inputs.response_mask)
    logs = spread[inputs.response_mask].tolist()
    ratios = [math.exp(log) for log in logs]
    wanted = {
        "ratio": ratios,
        "ratio_above_10": [ratio > 10.0 for ratio in ratios],
        "ratio_below_0.1": [ratio < 0.1 for ratio in ratios],
        "kl_k1": [-log for log in logs],
        "kl_k3": [ratio - 1.0 - log for ratio, log in zip(ratios, logs, strict=True)],
    }
    for name, values in wanted.items():
        assert found[f"mismatch/{name}"].value.item() == approx(values), name
    assert found["mismatch/ratio_max"].value.item() == pytest.approx(max(ratios), rel=1e-14)
    assert 0.0 < found["mismatch/ratio_above_10"].value < 1.0 and 0.0 < found["mismatch/ratio_below_0.1"].value < 1.0


@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 0.95, 0.999])
def test_quantiles_of_the_log_ratio_are_numpys_within_bins(share):
    draw = torch.Generator().manual_seed(1)
    values = 0.3 * torch.randn(50, 400, generator=draw, dtype=torch.float64)
    mask = torch.rand(50, 400, generator=draw) < 0.5
    found = mismatch(torch.where(mask, values, 0.0), mask)["mismatch/log_ratio"].quantile(share).item()
    wanted = np.quantile(values[mask].numpy(), share, method="inverted_cdf")
    assert found == pytest.approx(wanted, rel=0.015, abs=2e-6)


def test_sums_of_two_micro_batches_are_those_of_both_together():
    parts = [scene(seed=seed) for seed in (3, 4)]
    ratios, masks = zip(*((log_ratios(inputs), inputs.response_mask) for inputs, *_ in parts), strict=True)
    added = {name: entry + mismatch(ratios[1], masks[1])[name] for name, entry in mismatch(ratios[0], masks[0]).items()}
    for name, entry in mismatch(torch.cat(ratios), torch.cat(masks)).items():
        assert added[name].value.item() == pytest.approx(entry.value.item(), rel=1e-10, abs=1e-14, nan_ok=True), name


def test_ratios_of_e_to_the_400_leave_effective_sizes_finite():
    """The plain sum of squares overflows even in float64."""
    ratios = torch.tensor([[400.0, 400.0, -400.0], [0.0, -400.0, 400.0]])
    found = mismatch(ratios, torch.ones(2, 3, dtype=torch.bool))
    # whole responses: e^400 and 1; prefixes at positions 1 and 2: 400, 0, 800, -400
    assert found["mismatch/sequence_ess"].value.item() == pytest.approx(0.5, rel=1e-9)
    assert found["mismatch/prefix_ess_at_1-3"].value.item() == pytest.approx(0.25, rel=1e-9)


def test_a_batch_without_tokens_measures_nothing():
    inputs, _, clipped = scene()
    empty = torch.zeros_like(inputs.response_mask)
    inputs = replace(inputs, response_mask=empty)
    correction = make_correction("tis", cap=C1).apply(inputs, {})
    assert correction_metrics(correction, inputs, LAM, clipped, {})["correction/weight"].count == 0.0
    found = mismatch(torch.zeros(empty.shape), empty)
    assert math.isnan(found["mismatch/sequence_ess"].value) and math.isnan(found["mismatch/log_ratio"].value)
    assert found["mismatch/ratio"].count == 0.0


def test_health_counts_bad_tokens_and_empty_responses():
    inputs, *_ = scene()
    ours, theirs, mask = (x.clone() for x in (inputs.rollout_log_probs, inputs.target_log_probs, inputs.response_mask))
    at = mask.nonzero().tolist()
    ours[tuple(at[0])], theirs[tuple(at[1])], theirs[tuple(at[2])] = torch.nan, -torch.inf, torch.inf
    found = health(ours, theirs, mask)
    assert found["health/non_finite_tokens"].value.item() == 3.0
    assert found["health/empty_responses"].value.item() == 1.0


def test_the_weighted_kl_of_an_update_is_exact_off_policy():
    sampler = torch.tensor([0.125, 0.125, 0.25, 0.5], dtype=torch.float64)
    old = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    new = torch.tensor([0.2, 0.3, 0.3, 0.2], dtype=torch.float64)
    drawn = torch.tensor([[0, 1, 2, 2], [3, 3, 3, 3]])  # each token as often as the sampler draws it
    moved, ratio = (old / new).log()[drawn], (old / sampler).log()[drawn]
    found = {name: sums.value.item() for name, sums in update_kl(moved, ratio, drawn >= 0).items()}
    exact = (old * (old / new).log()).sum().item()
    assert exact > 0.05
    assert found["policy/approx_kl_weighted"] == pytest.approx(exact, rel=1e-12)
    assert found["policy/approx_kl_k1"] == pytest.approx((sampler * (old / new).log()).sum().item(), rel=1e-12)
    assert found["policy/approx_kl_k1"] < -0.2
    assert found["policy/approx_kl_k3"] == pytest.approx((sampler * (new / old - 1 - (new / old).log())).sum().item())
