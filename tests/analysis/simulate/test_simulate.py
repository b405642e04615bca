"""What `jackpot simulate` measures of made-up distributions, against Python loops and numpy."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given

from helpers.distributions import enumerated, few, kl, pairs
from jackpot.analysis.simulate.families import FAMILIES, Family, states_of
from jackpot.analysis.simulate.identity import DRAWN_CAP, identity
from jackpot.analysis.simulate.simulate import EXAMPLE_KL, simulate_families
from jackpot.analysis.simulate.states import LAMS, RECIPE_LAM, States, joined, measure
from jackpot.analysis.simulate.survey import binned, curve, point, ratios, sampled_acceptance, share_below, survey
from jackpot.analysis.simulate.topk import TopKNumbers, sizes, summary, topk_numbers

NAMES = [family.name for family in FAMILIES]
SMALL = 400  # tokens


def family(name: str) -> Family:
    return next(one for one in FAMILIES if one.name == name)


def states(name: str, gap: float, count: int = 6, vocabulary: int = SMALL) -> States:
    return states_of(family(name), gap, count, seed=3, vocabulary=vocabulary)


def of(rollout: list[list[float]], target: list[list[float]]) -> States:
    """States from probabilities."""
    parts = [torch.tensor(rows, dtype=torch.float64).log() for rows in (rollout, target)]
    return States(rollout=parts[0], target=parts[1], token_ids=torch.zeros(len(rollout), 1, dtype=torch.int64))


@few
@given(pairs(smallest=2))
def test_every_number_of_a_state_is_what_a_loop_over_its_tokens_gives(pair) -> None:
    log_inf, log_target = pair
    rows = [torch.tensor([row], dtype=torch.float64) for row in pair]
    found = measure(States(rollout=rows[0], target=rows[1], token_ids=torch.zeros(1, 1, dtype=torch.int64)))
    p_inf, p_target = [math.exp(x) for x in log_inf], [math.exp(x) for x in log_target]

    def divergence(p: list[float], q: list[float]) -> float:
        if any(a > 0 and not b > 0 for a, b in zip(p, q, strict=True)):
            return math.inf
        return kl(p, q)

    assert found.kl.item() == pytest.approx(divergence(p_target, p_inf), rel=1e-9, abs=1e-12)
    assert found.reverse_kl.item() == pytest.approx(divergence(p_inf, p_target), rel=1e-9, abs=1e-12)
    for place, lam in enumerate(LAMS):
        accept, z, kept = enumerated(log_inf, log_target, lam)
        assert found.acceptance[0, place].item() == pytest.approx(z, rel=1e-12)
        after = divergence(p_target, kept) if z > 0 else math.inf
        assert found.kl_after[0, place].item() == pytest.approx(after, rel=1e-9, abs=1e-12)
        if lam == 1.0:
            variance = math.fsum(q * (a - z) ** 2 for q, a in zip(p_inf, accept, strict=True))
            assert found.acceptance_variance.item() == pytest.approx(variance, rel=1e-9, abs=1e-12)


def test_equal_models_have_no_gap_and_models_without_overlap_nothing_to_keep() -> None:
    found = measure(of([[0.5, 0.3, 0.2], [0.5, 0.5, 0.0]], [[0.5, 0.3, 0.2], [0.0, 0.0, 1.0]]))
    assert found.kl.tolist() == [pytest.approx(0.0, abs=1e-15), math.inf]
    assert found.acceptance.tolist() == [pytest.approx([1.0, 1.0, 0.5]), [0.0, 0.0, 0.0]]
    assert found.kl_after[0].tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-15)
    assert found.kl_after[1].tolist() == [math.inf] * 3


@pytest.mark.parametrize("name", NAMES)
def test_a_family_gives_distributions_whose_gap_grows_from_nothing_to_a_large_one(name: str) -> None:
    gaps = [measure(states_of(family(name), gap, 16, seed=0, vocabulary=4_096)).kl.mean() for gap in family(name).gaps]
    assert all(small < large for small, large in itertools.pairwise(gaps))
    assert gaps[0] < 0.003 and gaps[-1] > 0.5
    found = states(name, 0.5)
    for part in (found.rollout, found.target):
        np.testing.assert_allclose(part.exp().sum(-1).numpy(), 1.0, rtol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_states_and_another_part_others(name: str) -> None:
    first, again = states(name, 0.5), states(name, 0.5)
    assert first.rollout.equal(again.rollout) and first.target.equal(again.target)
    assert first.token_ids.equal(again.token_ids)
    other = states_of(family(name), 0.5, 6, seed=3, part=1, vocabulary=SMALL)
    assert not first.rollout.equal(other.rollout)


def test_the_families_are_what_they_say() -> None:
    noise = states("noise", 0.8, vocabulary=20_000)
    spread = (noise.target - noise.rollout).numpy().std(axis=1)
    np.testing.assert_allclose(spread, 0.8, rtol=0.03)
    sharper = states("sharper", 0.8)
    expected = sharper.rollout.exp().numpy() ** 1.8
    np.testing.assert_allclose(sharper.target.exp().numpy(), expected / expected.sum(1, keepdims=True), rtol=1e-10)
    moved = states("moved mode", 0.3)
    rest = moved.target.exp().numpy() - 0.7 * moved.rollout.exp().numpy()
    assert ((rest > 1e-12).sum(axis=1) == 1).all()
    np.testing.assert_allclose(rest.max(axis=1), 0.3, rtol=1e-12)
    assert (rest.argmax(axis=1) >= 20).all()
    leak = states("leak", 0.3)
    np.testing.assert_allclose(leak.rollout.exp().numpy(), 0.7 * leak.target.exp().numpy() + 0.3 / SMALL, rtol=1e-12)


def test_tokens_are_drawn_from_the_rollout_model() -> None:
    found = states_of(family("leak"), 0.9, 400, seed=0, vocabulary=SMALL)
    drawn = torch.zeros_like(found.rollout).scatter_add(1, found.token_ids, torch.ones(400, 32, dtype=torch.float64))
    expected = found.rollout.exp().sum(0)
    assert ((drawn.sum(0) / 32 - expected).abs() < 6 * (expected / 32).sqrt()).all()


def brute_force_z(one: States, row: int, k: int, fill_in: bool) -> float:
    p_inf, p_target = one.rollout[row].exp().numpy(), one.target[row].exp().numpy()
    known = set(np.argsort(-p_inf)[:k]) | (set(np.argsort(-p_target)[:k]) if fill_in else set())
    return math.fsum(min(p_inf[token], p_target[token]) for token in known)


@pytest.mark.parametrize("fill_in", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_z_from_the_top_k_is_a_sum_over_the_two_sets_and_its_bounds_hold_the_exact_z(name: str, fill_in: bool) -> None:
    one = states(name, 0.6)
    found, exact = topk_numbers(one, fill_in), measure(one).acceptance[:, RECIPE_LAM]
    for place, k in enumerate(sizes(SMALL)):
        expected = [brute_force_z(one, row, k, fill_in) for row in range(len(one))]
        np.testing.assert_allclose(found.value[:, place].numpy(), expected, rtol=1e-11)
    assert (found.lower <= exact[:, None] + 1e-12).all() and (exact[:, None] <= found.upper + 1e-12).all()
    assert (found.value.diff(dim=1) >= -1e-12).all() and ((found.upper - found.lower).diff(dim=1) <= 1e-12).all()


def test_sizes_stop_at_the_vocabulary() -> None:
    assert sizes(32) == (5, 10, 20, 32) and sizes(20) == (5, 10, 20) and sizes(160) == (5, 10, 20, 40, 80, 160)
    assert sizes(32_768) == (5, 10, 20, 40, 80, 160)
    last = topk_numbers(states("noise", 1.0, vocabulary=32), fill_in=False)
    exact = measure(states("noise", 1.0, vocabulary=32)).acceptance[:, RECIPE_LAM]
    np.testing.assert_allclose(last.value[:, -1].numpy(), exact.numpy(), rtol=1e-12)
    np.testing.assert_allclose(last.upper[:, -1].numpy(), exact.numpy(), rtol=1e-12)


def test_a_summary_has_means_quantiles_and_kappa_with_the_error_that_drawing_tokens_makes() -> None:
    one = states("noise", 1.5, count=10)
    numbers, exact = topk_numbers(one, True), measure(one)
    z, z_k = exact.acceptance[:, RECIPE_LAM].numpy(), numbers.value[:, 1].numpy()
    accept = np.minimum(1.0, one.rho.numpy())
    kappas = []
    draw = np.random.default_rng(0)
    for _ in range(1_500):
        sampled = np.stack([draw.choice(accept[row], size=4, p=one.rollout[row].exp().numpy()) for row in range(10)])
        kappas.append(sampled.sum() / (4 * z_k.sum()))
    row = summary(numbers, exact, torch.from_numpy(sampled), SMALL, True)[1]
    assert row.k == 10 and row.fill_in and row.outside == 0
    assert row.z_share == pytest.approx((z_k / z).mean(), rel=1e-12)
    assert row.z_share_low == pytest.approx(np.quantile(z_k / z, 0.01), rel=1e-12)
    assert row.width == pytest.approx((numbers.upper - numbers.lower)[:, 1].numpy().mean(), rel=1e-12)
    assert row.captured == pytest.approx(numbers.captured[:, 1].numpy().mean(), rel=1e-12)
    assert row.kappa == pytest.approx(kappas[-1], rel=1e-12)
    assert row.kappa_exact == pytest.approx(z.sum() / z_k.sum(), rel=1e-12)
    assert row.corrected == pytest.approx(kappas[-1] * z_k.mean() / z.mean(), rel=1e-12)
    assert np.mean(kappas) == pytest.approx(row.kappa_exact, abs=4 * row.kappa_error / math.sqrt(1_500))
    assert np.std(kappas) == pytest.approx(row.kappa_error, rel=0.1)


def test_a_state_outside_its_bounds_is_counted() -> None:
    one = states("noise", 1.0)
    numbers, exact = topk_numbers(one, True), measure(one)
    wrong = TopKNumbers(value=numbers.value, lower=numbers.lower, upper=numbers.lower, captured=numbers.captured)
    sampled = sampled_acceptance(one)
    assert [row.outside for row in summary(numbers, exact, sampled, SMALL, True)] == [0] * 6
    assert [row.outside for row in summary(wrong, exact, sampled, SMALL, True)] == [6] * 6


@pytest.mark.parametrize("name", NAMES)
def test_coin_times_weight_is_truncated_importance_sampling_on_z_rho(name: str) -> None:
    one = states(name, 0.7)
    found = identity(one, drawn=2)
    assert found.deviation < 1e-12 and found.largest_lam_z < 1.0 + 1e-12
    assert found.outside_deviation > 0.01 or name == "moved mode"  # there lam Z is below 0.5 for every lam
    assert found.tokens == 6 * SMALL and found.comparisons == found.tokens * 15
    p_inf, p_target = one.rollout[2].exp().numpy(), one.target[2].exp().numpy()
    for curve_ in found.curves:
        z = np.minimum(p_inf, p_target / curve_.lam).sum()
        rho = np.array(curve_.rho)
        assert curve_.z == pytest.approx(z, rel=1e-12)
        np.testing.assert_allclose(curve_.acceptance, np.minimum(1.0, rho / curve_.lam), rtol=1e-12)
        np.testing.assert_allclose(curve_.product, np.minimum(z * rho, DRAWN_CAP), rtol=1e-11)


def test_tokens_that_one_model_cannot_write_are_no_part_of_the_identity() -> None:
    found = identity(of([[0.5, 0.5, 0.0, 0.0]], [[0.2, 0.0, 0.8, 0.0]]), drawn=0)
    assert found.tokens == 1 and found.deviation < 1e-15


def test_the_kl_falls_by_no_more_than_minus_log_z_whatever_the_gap() -> None:
    for one in FAMILIES:
        for gap in one.gaps:
            found = measure(states_of(one, gap, 8, seed=1, vocabulary=SMALL))
            fall = found.kl[:, None] - found.kl_after
            assert (fall <= -found.acceptance.log() + 1e-12).all() and (fall >= -1e-12).all()
            mean = point(found)
            assert mean.kl - mean.kl_after[RECIPE_LAM] <= mean.log_acceptance + 1e-12


def test_a_survey_does_not_depend_on_the_chunks() -> None:
    one = states("noise", 1.0, count=40)
    whole = survey("a", [one], 40)
    parts = survey("a", [one.pick(torch.arange(start, min(start + 6, 40))) for start in range(0, 40, 6)], 40)
    assert whole.topk == parts.topk and len(whole.topk) == 12
    assert whole.numbers.kl.equal(parts.numbers.kl) and whole.kept.rollout.equal(parts.kept.rollout)
    assert len(whole.kept) == 20 and whole.kept.rollout.equal(one.rollout[::2])


def test_ratios_below_lam_are_lifted_to_z_and_those_above_are_multiplied_by_it() -> None:
    one = survey("noise", [states("noise", 1.0, count=3)], 3)
    found = ratios(one)
    z = np.repeat(measure(one.kept).acceptance[:, RECIPE_LAM].numpy(), len(found.before) // 3)
    for before, after in ((found.before, found.after), (found.policy_before, found.policy_after)):
        np.testing.assert_allclose(after, z * np.maximum(1.0, before), rtol=1e-12)
    assert np.mean(np.log(found.policy_before)) > np.mean(np.log(found.before))
    assert found.kl == pytest.approx(float(measure(one.kept).kl.mean()))


def test_a_curve_is_read_off_between_its_points_and_not_beyond() -> None:
    points = [point(measure(states_of(family("noise"), gap, 8, seed=0))) for gap in (0.1, 0.6, 0.2)]
    found = curve("a", points)
    kls = [one.kl for one in found.points]
    assert kls == sorted(kls) and kls[0] < 0.01 < kls[1] < 0.1 < kls[2] < 1.0
    first, second = found.points[:2]
    share = (math.log(0.01) - math.log(first.kl)) / (math.log(second.kl) - math.log(first.kl))
    expected = first.acceptance[1] + share * (second.acceptance[1] - first.acceptance[1])
    assert found.marks[0].acceptance == pytest.approx(expected)
    assert first.factor < found.marks[0].factor < second.factor or first.factor > found.marks[0].factor > second.factor
    assert found.marks[2].acceptance is None and found.marks[2].factor is None
    assert first.acceptance[1] > 0.95 > second.acceptance[1] and first.kl < found.kl_at_high_acceptance < second.kl


def test_states_of_like_kl_share_a_bin_and_bins_of_few_states_are_left_out() -> None:
    parts = [measure(states("noise", gap, count=20)) for gap in (0.05, 0.5, 2.0)]
    numbers = joined([*parts, measure(of([[0.5, 0.5]], [[0.5, 0.5]]))])
    found = binned("a", numbers, bins=6, least=8)
    logs = np.log(numbers.kl.numpy()[numbers.kl.numpy() > 1e-5])
    counts = np.histogram(logs, bins=6)[0]
    assert [one.states for one in found.points] == [count for count in counts if count >= 8]
    assert binned("same", parts[0], smallest=10.0).points == ()
    assert share_below(measure(of([[1.0, 0.0], *[[0.5, 0.5]] * 3], [[0.4, 0.6], *[[0.5, 0.5]] * 3]))) == 0.25


def test_the_command_without_models_shows_every_family_at_about_one_gap_and_the_same_numbers_again() -> None:
    found = simulate_families(1, vocabulary=1_024)
    assert [one.name for one in found.curves] == [one.name for one in found.sources] == NAMES
    assert all(abs(math.log(source.ratios.kl / EXAMPLE_KL)) < 0.6 for source in found.sources)
    assert found.theorems.optimality.better == 0 and found.identity.deviation < 1e-11
    assert [source.vocabulary for source in found.sources] == [1_024] * 4
    assert found == simulate_families(1, vocabulary=1_024)
