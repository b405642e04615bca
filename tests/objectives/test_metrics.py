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
    nan_values = torch.full((rows, width), torch.nan, dtype=torch.float64)
    rollout, ratio = -1.0 + 0.5 * normal(rows, width), 0.7 * normal(rows, width)
    advantages = (normal(rows, 1) * torch.tensor([1, 1, 1, 0, 1, 1])[:, None]).expand(rows, width)
    z = torch.rand(rows, width, generator=draw, dtype=torch.float64)
    inputs = CorrectionInputs(
        rollout_log_probs=torch.where(mask, rollout, nan_values),
        target_log_probs=torch.where(mask, rollout + ratio, nan_values),
        proximal_log_probs=torch.where(mask, rollout + ratio, nan_values),
        response_mask=mask,
        uniforms=torch.rand(rows, width, generator=draw, dtype=torch.float64),
        advantages=torch.where(mask, advantages, nan_values),
        z=known_z(torch.where(mask, z, nan_values)),
    )
    return inputs, torch.where(mask, advantages, nan_values), torch.rand(rows, width, generator=draw) < 0.3


def log_ratios(inputs):
    """log rho of the sampled tokens, 0 elsewhere."""
    return torch.where(inputs.response_mask, inputs.target_log_probs - inputs.rollout_log_probs, 0.0)


def groups_of(inputs, advantages):
    """Return {end of the metric's name: [(row, position)]} by loops."""
    indices = inputs.response_mask.nonzero().tolist()
    groups = {"": indices}
    groups["_positive"] = [index for index in indices if advantages[tuple(index)] > 0]
    groups["_negative"] = [index for index in indices if advantages[tuple(index)] < 0]
    for name, start, end in zip(NAMES, POSITIONS, (*POSITIONS[1:], math.inf), strict=True):
        groups[f"_{name}"] = [index for index in indices if start <= index[1] < end]
    return {name: [tuple(index) for index in indices] for name, indices in groups.items()}


def mean_of(values):
    """Something that equals the mean up to rounding, and NaN if there are no values."""
    return pytest.approx(np.mean(values) if len(values) else math.nan, rel=1e-10, abs=1e-14, nan_ok=True)


def test_bands_of_positions_end_names_as_documented():
    assert [f"at_{name}" for name in band_names(POSITIONS)] == NAMES


def test_every_column_is_averaged_by_sign_and_position():
    inputs, advantages, clip_mask = scene()
    correction = make_correction("obrs", lam=LAM, c1=C1, c2=1.0, mask="sampled", kappa="none").apply(inputs, {})
    metrics = correction_metrics(correction, inputs, LAM, clip_mask, {})

    factor = correction.weights * correction.accept_mask
    ratio = log_ratios(inputs).exp()
    columns = {
        "obrs/acceptance": (ratio / LAM).clamp(max=1.0),
        "correction/accepted": correction.accept_mask,
        "correction/weight": factor,
        "correction/clip_frac": correction.capped.double(),
        "correction/clip_frac_c2": correction.capped_c2.double(),
        "policy/clip_frac": clip_mask.double(),
    }

    groups = groups_of(inputs, advantages)
    for column, values in columns.items():
        for group, indices in groups.items():
            if (column, group) == ("obrs/acceptance", ""):
                assert column not in metrics
                continue
            entry = metrics[column + group]
            assert entry.count.item() == len(indices), column + group
            assert entry.value.item() == mean_of([values[index].item() for index in indices]), column + group
            variance = np.var([values[index].item() for index in indices]) if indices else math.nan
            assert entry.variance.item() == pytest.approx(variance, rel=1e-8, abs=1e-13, nan_ok=True)

    assert len(groups["_positive"]) > 0
    assert len(groups["_negative"]) > 0
    assert len(groups["_at_64-255"]) > 0
    assert len(groups["_positive"]) + len(groups["_negative"]) < len(groups[""])  # zero advantages are in neither


def test_kappa_and_the_largest_columns_are_of_sampled_tokens():
    inputs, advantages, clip_mask = scene()
    correction = make_correction("obrs", lam=LAM, c1=C1, c2=1.0, mask="sampled", kappa="prepass")
    totals = correction.measure(inputs)
    result = correction.apply(inputs, totals)

    metrics = correction_metrics(result, inputs, LAM, clip_mask, totals)

    indices = groups_of(inputs, advantages)[""]
    ratio, z = log_ratios(inputs).exp(), inputs.z.value
    kappa = sum(min(1.0, ratio[index].item() / LAM) for index in indices) / sum(z[index].item() for index in indices)

    assert metrics["obrs/kappa"].value.item() == pytest.approx(kappa, rel=1e-12)

    gaps = [min(1.0, ratio[index].item() / LAM) - z[index].item() for index in indices]
    error = math.sqrt(sum(gap**2 for gap in gaps)) / sum(z[index].item() for index in indices)
    largest_z = min(1.0, 1.0 / LAM)  # no true Z is above it
    excess_marks = [(kappa - 2.0 * error) * z[index].item() > largest_z + 1e-6 for index in indices]

    assert metrics["obrs/kappa_z_above_1"].value.item() == mean_of(excess_marks)
    assert 0.0 < metrics["obrs/kappa_z_above_1"].value < 1.0
    assert LAM != 1.0
    assert error > 0.01

    largest_weight = max((result.weights * result.accept_mask)[index].item() for index in indices)
    assert metrics["correction/weight_max"].value.item() == largest_weight
    assert largest_weight > 0.0
    assert metrics["policy/largest_advantage"].value.item() == max(abs(advantages[index].item()) for index in indices)

    kept_advantages = [abs(advantages[index].item()) for index in indices if result.accept_mask[index]]
    assert metrics["policy/largest_kept_advantage"].value.item() == max(kept_advantages)


def effective_share(log_weights):
    """Compute (sum w)^2 / (n sum w^2) directly."""
    weights = [math.exp(log_weight) for log_weight in log_weights]
    if not weights:
        return math.nan
    return math.fsum(weights) ** 2 / (len(weights) * math.fsum(w * w for w in weights))


def test_effective_sizes_are_of_tokens_prefixes_and_responses():
    inputs, advantages, _ = scene()
    ratios, mask = log_ratios(inputs), inputs.response_mask

    metrics = mismatch(ratios, mask)

    token_log_ratios = ratios[mask].tolist()
    filled_rows = [row for row in range(len(mask)) if mask[row].any()]

    assert metrics["mismatch/ratio"].effective_share.item() == pytest.approx(
        effective_share(token_log_ratios), rel=1e-10
    )

    response_log_ratios = [math.fsum(ratios[row][mask[row]].tolist()) for row in filled_rows]
    assert metrics["mismatch/sequence_ess"].value.item() == pytest.approx(
        effective_share(response_log_ratios), rel=1e-10
    )
    assert metrics["mismatch/sequence_ess"].count.item() == len(response_log_ratios)
    assert len(response_log_ratios) == 5  # of six, one is empty
    assert metrics["mismatch/sequence_log_ratio"].value.item() == mean_of(response_log_ratios)
    assert metrics["mismatch/sequence_log_ratio"].variance.item() == pytest.approx(
        np.var(response_log_ratios), rel=1e-10
    )

    for name, indices in groups_of(inputs, advantages).items():
        if name.startswith("_at_"):
            prefix_log_ratios = [math.fsum(ratios[row, :t][mask[row, :t]].tolist()) for row, t in indices]
            entry = metrics[f"mismatch/prefix_ess{name}"]
            assert entry.value.item() == pytest.approx(effective_share(prefix_log_ratios), rel=1e-9, nan_ok=True), name

    assert metrics["mismatch/prefix_ess_at_0"].value.item() == 1.0  # nothing stands before the first token


def test_the_ratio_is_described_by_mean_tails_and_kls():
    inputs, *_ = scene()
    wide_log_ratios = 4.0 * log_ratios(inputs)

    metrics = mismatch(wide_log_ratios, inputs.response_mask)

    log_values = wide_log_ratios[inputs.response_mask].tolist()
    ratios = [math.exp(log_value) for log_value in log_values]
    expected_values = {
        "ratio": ratios,
        "ratio_above_10": [ratio > 10.0 for ratio in ratios],
        "ratio_below_0.1": [ratio < 0.1 for ratio in ratios],
        "kl_k1": [-log_value for log_value in log_values],
        "kl_k3": [ratio - 1.0 - log_value for ratio, log_value in zip(ratios, log_values, strict=True)],
    }

    for name, values in expected_values.items():
        assert metrics[f"mismatch/{name}"].value.item() == mean_of(values), name
    assert metrics["mismatch/ratio_max"].value.item() == pytest.approx(max(ratios), rel=1e-14)
    assert 0.0 < metrics["mismatch/ratio_above_10"].value < 1.0
    assert 0.0 < metrics["mismatch/ratio_below_0.1"].value < 1.0


@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 0.95, 0.999])
def test_quantiles_of_the_log_ratio_are_numpys_within_bins(share):
    draw = torch.Generator().manual_seed(1)
    values = 0.3 * torch.randn(50, 400, generator=draw, dtype=torch.float64)
    mask = torch.rand(50, 400, generator=draw) < 0.5

    quantile = mismatch(torch.where(mask, values, 0.0), mask)["mismatch/log_ratio"].quantile(share).item()
    expected_quantile = np.quantile(values[mask].numpy(), share, method="inverted_cdf")

    assert quantile == pytest.approx(expected_quantile, rel=0.015, abs=2e-6)


def test_sums_of_two_micro_batches_are_those_of_both_together():
    scenes = [scene(seed=seed) for seed in (3, 4)]
    ratios, masks = zip(*((log_ratios(inputs), inputs.response_mask) for inputs, *_ in scenes), strict=True)
    sums = {name: entry + mismatch(ratios[1], masks[1])[name] for name, entry in mismatch(ratios[0], masks[0]).items()}
    for name, entry in mismatch(torch.cat(ratios), torch.cat(masks)).items():
        assert sums[name].value.item() == pytest.approx(entry.value.item(), rel=1e-10, abs=1e-14, nan_ok=True), name


def test_ratios_of_e_to_the_400_leave_effective_sizes_finite():
    """The plain sum of squares overflows even in float64."""
    ratios = torch.tensor([[400.0, 400.0, -400.0], [0.0, -400.0, 400.0]])
    metrics = mismatch(ratios, torch.ones(2, 3, dtype=torch.bool))
    # whole responses: e^400 and 1; prefixes at positions 1 and 2: 400, 0, 800, -400
    assert metrics["mismatch/sequence_ess"].value.item() == pytest.approx(0.5, rel=1e-9)
    assert metrics["mismatch/prefix_ess_at_1-3"].value.item() == pytest.approx(0.25, rel=1e-9)


def test_a_batch_without_tokens_measures_nothing():
    inputs, _, clip_mask = scene()
    empty_mask = torch.zeros_like(inputs.response_mask)
    inputs = replace(inputs, response_mask=empty_mask)
    correction = make_correction("tis", cap=C1).apply(inputs, {})

    assert correction_metrics(correction, inputs, LAM, clip_mask, {})["correction/weight"].count == 0.0

    metrics = mismatch(torch.zeros(empty_mask.shape), empty_mask)
    assert math.isnan(metrics["mismatch/sequence_ess"].value)
    assert math.isnan(metrics["mismatch/log_ratio"].value)
    assert metrics["mismatch/ratio"].count == 0.0


def test_health_counts_bad_tokens_and_empty_responses():
    inputs, *_ = scene()
    rollout_log_probs, target_log_probs, mask = (
        x.clone() for x in (inputs.rollout_log_probs, inputs.target_log_probs, inputs.response_mask)
    )
    indices = mask.nonzero().tolist()
    rollout_log_probs[tuple(indices[0])] = torch.nan
    target_log_probs[tuple(indices[1])] = -torch.inf
    target_log_probs[tuple(indices[2])] = torch.inf

    metrics = health(rollout_log_probs, target_log_probs, mask)

    assert metrics["health/non_finite_tokens"].value.item() == 3.0
    assert metrics["health/empty_responses"].value.item() == 1.0


def test_the_weighted_kl_of_an_update_is_exact_off_policy():
    sampler_probs = torch.tensor([0.125, 0.125, 0.25, 0.5], dtype=torch.float64)
    old_probs = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    new_probs = torch.tensor([0.2, 0.3, 0.3, 0.2], dtype=torch.float64)
    token_ids = torch.tensor([[0, 1, 2, 2], [3, 3, 3, 3]])  # each token as often as the sampler draws it
    update_log_ratios, log_ratios = (
        (old_probs / new_probs).log()[token_ids],
        (old_probs / sampler_probs).log()[token_ids],
    )

    metrics = {
        name: sums.value.item() for name, sums in update_kl(update_log_ratios, log_ratios, token_ids >= 0).items()
    }

    exact_kl = (old_probs * (old_probs / new_probs).log()).sum().item()

    assert exact_kl > 0.05
    assert metrics["policy/approx_kl_weighted"] == pytest.approx(exact_kl, rel=1e-12)
    assert metrics["policy/approx_kl_k1"] == pytest.approx(
        (sampler_probs * (old_probs / new_probs).log()).sum().item(), rel=1e-12
    )
    assert metrics["policy/approx_kl_k1"] < -0.2
    assert metrics["policy/approx_kl_k3"] == pytest.approx(
        (sampler_probs * (new_probs / old_probs - 1 - (new_probs / old_probs).log())).sum().item()
    )
