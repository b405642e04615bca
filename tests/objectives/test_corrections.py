"""Every correction of OBRS's family is its equation, computed token by token in a loop; its expected mask is the mean
over all Bernoulli masks; masked tokens change nothing; and unknown names and settings are refused.
"""

import itertools
import math
from dataclasses import fields as fields_of
from dataclasses import replace
from inspect import signature

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jackpot.config.corrections import CORRECTION_SETTINGS
from jackpot.core.errors import ConfigError
from jackpot.core.metrics import add_sums
from jackpot.corrections import construct_correction, make_correction
from jackpot.objectives.corrections import CORRECTIONS, CorrectionInputs
from jackpot.objectives.corrections.formula import TENSORS, Weighed
from jackpot.objectives.corrections.signed import dppo_topk
from jackpot.objectives.obrs import ZEstimate

RTOL = 1e-12  # of float64 against Python floats
OBRS_NUMBERS = dict(lam=0.8, c1=1.5, c2=1.25, mask="sampled")
OBRS = OBRS_NUMBERS | dict(kappa="none")
EVERY = [
    ("none", {}),
    ("is", {}),
    ("tis", {"cap": 1.5}),
    ("icepop", {"low": 0.5, "high": 2.0}),
    ("drop", {"cap": 1.5}),
    ("ipo", {"max_tv": 0.1}),
    ("seq_tis", {"cap": 1.5}),
    ("seq_mask", {"low": 0.2, "high": 3.0}),
    ("geo_mask", {"low": 0.7, "high": 1.4}),
    ("prefix", {"low": 0.5, "high": 0.5}),
    ("min_prefix", {"cap": 0.7}),
    ("f_tis", {"cap": 1.5, "max_kl": 0.5}),
    ("dppo", {"max_tv": 0.1, "cap": 1.5}),
    ("dppo", {"divergence": "topk", "max_tv": 0.1}),
    ("mask_only", {"lam": 0.8, "mask": "sampled"}),
    ("reweight_only", dict(lam=0.8, c1=1.5, c2=1.25, kappa="prepass")),
    ("z_only", dict(lam=0.8, c1=0.5, kappa="prepass")),
    ("target_only", dict(c1=1.5, c2=1.25)),
    ("coin_only", dict(lam=0.8, c1=1.5, c2=1.25)),
    ("obrs", OBRS),
    ("obrs", OBRS | {"mask": "expected"}),
    ("obrs", OBRS | {"kappa": "prepass"}),
]


def random_inputs(seed=0, shape=(4, 6), spread=1.0):
    """Draw log-probs whose three distributions differ by `spread` nats; a quarter of the tokens is masked."""
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def uniform():
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    rollout = -2.0 + normal()
    z = 0.2 + 0.6 * uniform()
    width = 0.2 * uniform()
    advantages = torch.tensor([[1.0], [-1.0], [0.5], [-0.5]], dtype=torch.float64)
    return CorrectionInputs(
        rollout_log_probs=rollout,
        target_log_probs=rollout + spread * normal(),
        proximal_log_probs=rollout + spread * normal(),
        response_mask=uniform() < 0.75,
        uniforms=uniform(),
        advantages=advantages[: shape[0]].expand(shape),
        z=ZEstimate(z, z, z + width, 0.5 + 0.5 * z, 0.4 + 0.5 * z, 0.3 + 0.5 * z),
    )


def with_lams(inputs):
    """Return the same tokens, each with a lam of its own."""
    return replace(inputs, lam=torch.linspace(0.4, 1.8, inputs.uniforms.numel()).double().view_as(inputs.uniforms))


def tokens(inputs):
    """Yield (index, p_inf, p_target, p_proximal, uniform, Z) of every unmasked token as Python floats."""
    for index in inputs.response_mask.nonzero().tolist():
        position = tuple(index)
        log_probs = inputs.rollout_log_probs, inputs.target_log_probs, inputs.proximal_log_probs
        probs = (math.exp(x[position]) for x in log_probs)
        yield position, *probs, inputs.uniforms[position].item(), inputs.z.value[position].item()


def hand_obrs(inputs, *, lam, c1, c2, mask, kappa):
    """Return {token: (weight, accept)} by the equations of OBRS, computed in Python floats."""
    result = {}
    for position, p_inf, p_target, p_proximal, u, z in tokens(inputs):
        rho = p_target / p_inf
        a = min(1.0, rho / lam)
        weight = min(kappa * z * max(lam, rho), c1) * min(p_proximal / p_target, c2)
        result[position] = weight, (a if mask == "expected" else float(u < a))
    return result


def assert_weights_and_mask(correction, expected):
    """Check that weights and mask are as expected, and exactly 0 at tokens without an expectation."""
    expected_weights = torch.zeros_like(correction.weights)
    expected_mask = torch.zeros_like(correction.accept_mask)
    for position, (weight, accept) in expected.items():
        expected_weights[position] = weight
        expected_mask[position] = accept
    torch.testing.assert_close(correction.weights, expected_weights, rtol=RTOL, atol=0.0, msg="weights")
    torch.testing.assert_close(correction.accept_mask, expected_mask, rtol=RTOL, atol=0.0, msg="mask")


# What each correction computes


def test_without_correction_every_token_is_kept_at_weight_one():
    inputs = random_inputs()
    correction = make_correction("none").apply(inputs, {})
    assert_weights_and_mask(correction, {position: (1.0, 1.0) for position, *_ in tokens(inputs)})


def test_importance_sampling_weighs_by_the_whole_ratio():
    inputs = random_inputs()
    expected = {position: (target / inf, 1.0) for position, inf, target, *_ in tokens(inputs)}

    correction = make_correction("is").apply(inputs, {})

    assert_weights_and_mask(correction, expected)
    assert not correction.capped.any()


@pytest.mark.parametrize("cap", [0.5, 1.0, 3.0])
def test_truncated_importance_sampling_caps_the_ratio(cap):
    inputs = random_inputs()
    ratios = {position: target / inf for position, inf, target, *_ in tokens(inputs)}

    correction = make_correction("tis", cap=cap).apply(inputs, {})

    assert_weights_and_mask(correction, {position: (min(ratio, cap), 1.0) for position, ratio in ratios.items()})

    share = sum(ratio > cap for ratio in ratios.values()) / len(ratios)
    assert 0.0 < share < 1.0
    assert correction.capped.sum().item() / len(ratios) == pytest.approx(share, rel=RTOL)


@pytest.mark.parametrize("mask", ["sampled", "expected"])
@pytest.mark.parametrize("lam", [0.4, 1.0, 2.5])
@pytest.mark.parametrize("c1", [0.7, 3.0, math.inf])
@pytest.mark.parametrize("c2", [0.5, 3.0, math.inf])
def test_obrs_is_its_equation_token_by_token(mask, lam, c1, c2):
    numbers = dict(lam=lam, c1=c1, c2=c2, mask=mask)
    inputs = random_inputs(seed=3)
    correction = make_correction("obrs", kappa="none", **numbers).apply(inputs, {})
    assert_weights_and_mask(correction, hand_obrs(inputs, kappa=1.0, **numbers))


@pytest.mark.parametrize("c1", [0.5, 1.2])
def test_a_weight_above_c1_is_dropped_where_the_setting_says_so(c1):
    inputs = random_inputs(seed=3)
    numbers = dict(lam=1.0, c1=c1, c2=1.2, mask="sampled")

    dropping_result = make_correction("obrs", beyond_c1="drop", **numbers).apply(inputs, {})
    capping_result = make_correction("obrs", **numbers).apply(inputs, {})

    expected = {
        position: (0.0 if capping_result.capped[position] else weight, accept)
        for position, (weight, accept) in hand_obrs(inputs, kappa=1.0, **numbers).items()
    }
    assert 0 < sum(weight == 0.0 for weight, _ in expected.values()) < len(expected)
    assert_weights_and_mask(dropping_result, expected)
    assert torch.equal(dropping_result.capped, capping_result.capped)

    assert make_correction("obrs", beyond_c1="drop").kappa == "prepass"
    assert make_correction("obrs").kappa != "prepass"


@pytest.mark.parametrize("mask", ["sampled", "expected"])
def test_a_lam_of_each_token_takes_the_place_of_the_corrections(mask):
    inputs = with_lams(random_inputs(seed=3))
    correction = make_correction("obrs", kappa="none", mask=mask, lam=7.0, c1=1.5, c2=1.2)

    expected = {}
    expected_acceptance = 0.0
    for position, *_ in tokens(inputs):
        numbers = dict(lam=inputs.lam[position].item(), c1=1.5, c2=1.2)
        expected[position] = hand_obrs(inputs, kappa=1.0, mask=mask, **numbers)[position]
        expected_acceptance += hand_obrs(inputs, kappa=1.0, mask="expected", **numbers)[position][1]

    assert_weights_and_mask(correction.apply(inputs, {}), expected)
    assert correction.measure(inputs)["obrs/acceptance"].total.item() == pytest.approx(expected_acceptance, rel=RTOL)


def test_the_second_factor_is_1_at_the_same_target():
    inputs = random_inputs()
    same_point_inputs = replace(inputs, proximal_log_probs=inputs.target_log_probs)
    settings = dict(lam=1.0, c1=3.0, mask="sampled", kappa="none")

    capped_weights = make_correction("obrs", c2=1.0, **settings).apply(same_point_inputs, {}).weights
    uncapped_weights = make_correction("obrs", c2=math.inf, **settings).apply(same_point_inputs, {}).weights

    assert torch.equal(capped_weights, uncapped_weights)


def test_the_weight_moves_from_the_target_to_the_proximal_point():
    """w p_proximal / p_target, before c2: a surrogate that starts at p_proximal is then weighed to p_target / p~."""
    inputs = random_inputs()
    settings = dict(lam=1.0, c1=math.inf, c2=math.inf, mask="sampled", kappa="none")
    correction = make_correction("obrs", **settings).apply(inputs, {})

    for position, p_inf, p_target, p_proximal, _, z in tokens(inputs):
        accepted_prob = min(p_inf, p_target) / z
        expected_weight = p_target / accepted_prob * p_proximal / p_target
        assert correction.weights[position].item() == pytest.approx(expected_weight, rel=RTOL)


# kappa


def hand_kappa(*parts, lam):
    """Return the sum of a over the sum of Z over the tokens of all parts."""
    all_tokens = [token for inputs in parts for token in tokens(inputs)]
    a = math.fsum(min(1.0, target / inf / lam) for _, inf, target, *_ in all_tokens)
    return a / math.fsum(z for *_, z in all_tokens)


def test_kappa_spans_the_whole_step_and_sits_inside_the_clip():
    first_inputs, second_inputs = random_inputs(seed=1), random_inputs(seed=2, shape=(3, 5))
    correction = make_correction("obrs", **OBRS | {"kappa": "prepass"})
    kappa = hand_kappa(first_inputs, second_inputs, lam=OBRS["lam"])
    assert abs(kappa - 1.0) > 0.05
    assert abs(kappa - hand_kappa(first_inputs, lam=OBRS["lam"])) > 0.01

    totals = add_sums(correction.measure(first_inputs), correction.measure(second_inputs))
    for inputs in (first_inputs, second_inputs):
        result = correction.apply(inputs, totals)
        assert_weights_and_mask(result, hand_obrs(inputs, kappa=kappa, **OBRS_NUMBERS))
        assert result.kappa.item() == pytest.approx(kappa, rel=RTOL)


def test_kappa_z_above_one_is_not_capped():
    """kappa restores the mean of Z only: the larger Z of a step may well end above 1."""
    inputs = random_inputs(spread=0.0)
    z = torch.where(torch.arange(6) < 3, 0.4, 0.9).double().expand(4, 6)
    uneven_inputs = replace(inputs, z=ZEstimate(*[z] * 6))
    correction = make_correction("obrs", lam=0.5, c1=math.inf, c2=math.inf, mask="sampled", kappa="prepass")

    result = correction.apply(uneven_inputs, correction.measure(uneven_inputs))

    kappa = hand_kappa(uneven_inputs, lam=0.5)
    assert 1 / 0.9 < kappa < 1 / 0.4  # kappa Z is above 1 where Z is 0.9, and below where it is 0.4
    assert_weights_and_mask(
        result, hand_obrs(uneven_inputs, lam=0.5, c1=math.inf, c2=math.inf, mask="sampled", kappa=kappa)
    )


@pytest.mark.parametrize("kappa_setting", ["prepass", "auto"])
def test_kappa_comes_from_the_sums_and_is_1_without(kappa_setting):
    inputs = random_inputs()
    other_inputs = random_inputs(seed=9)
    correction = make_correction("obrs", **OBRS | {"kappa": kappa_setting})

    assert_weights_and_mask(correction.apply(inputs, {}), hand_obrs(inputs, kappa=1.0, **OBRS_NUMBERS))

    kappa = hand_kappa(other_inputs, lam=OBRS["lam"])
    result = correction.apply(inputs, correction.measure(other_inputs))
    assert_weights_and_mask(result, hand_obrs(inputs, kappa=kappa, **OBRS_NUMBERS))


def test_kappa_none_ignores_the_sums():
    inputs = random_inputs()
    correction = make_correction("obrs", **OBRS)

    result = correction.apply(inputs, correction.measure(inputs))

    assert_weights_and_mask(result, hand_obrs(inputs, kappa=1.0, **OBRS_NUMBERS))


def test_corrections_say_which_sums_they_want_first():
    for name, numbers in EVERY:
        assert make_correction(name, **numbers).kappa == numbers.get("kappa", "none"), (name, numbers)


@pytest.mark.parametrize("name", ["obrs", "reweight_only", "z_only"])
def test_auto_kappa_is_none_where_z_is_exact(name):
    settings = CORRECTION_SETTINGS[name]
    assert construct_correction(settings()).kappa == "auto"
    assert construct_correction(settings(normalizer="exact")).kappa == "none"
    assert construct_correction(settings(normalizer="exact", kappa="prepass")).kappa == "prepass"


# The Bernoulli mask


def mask_patterns(inputs, lam):
    """Yield (probability, uniforms that give this mask) for each of the 2^n acceptance masks of n tokens."""
    acceptances = [(position, min(1.0, target / inf / lam)) for position, inf, target, *_ in tokens(inputs)]
    for pattern in itertools.product((True, False), repeat=len(acceptances)):
        probability = 1.0
        uniforms = inputs.uniforms.clone()
        for (position, acceptance), is_kept in zip(acceptances, pattern, strict=True):
            probability *= acceptance if is_kept else 1.0 - acceptance
            uniforms[position] = acceptance / 2 if is_kept else (1.0 + acceptance) / 2
        if probability > 0.0:
            yield probability, uniforms


@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(st.integers(0, 1000), st.sampled_from([0.3, 1.0, 3.0]))
def test_the_expected_mask_is_the_mean_over_all_masks(seed, lam):
    inputs = random_inputs(seed=seed, shape=(1, 6), spread=1.5)
    numbers = dict(lam=lam, c1=2.0, c2=3.0, kappa="none")
    factors = torch.linspace(-1.0, 2.0, 6, dtype=torch.float64).expand(1, 6)
    sampling_correction = make_correction("obrs", mask="sampled", **numbers)
    expecting_correction = make_correction("obrs", mask="expected", **numbers)

    def loss(correction, uniforms):
        result = correction.apply(replace(inputs, uniforms=uniforms), {})
        return (result.accept_mask * result.weights * factors).sum().item()

    outcomes = [
        (p, loss(sampling_correction, uniforms), loss(expecting_correction, uniforms))
        for p, uniforms in mask_patterns(inputs, lam)
    ]
    assert math.fsum(p for p, *_ in outcomes) == pytest.approx(1.0, rel=RTOL)  # the enumeration is whole

    mean_loss = math.fsum(p * sampled_loss for p, sampled_loss, _ in outcomes)
    assert all(expected_loss == pytest.approx(mean_loss, rel=1e-11, abs=1e-13) for *_, expected_loss in outcomes)

    is_rejecting = any(target / inf < lam for _, inf, target, *_ in tokens(inputs))
    assert (math.fsum(p * (sampled_loss - mean_loss) ** 2 for p, sampled_loss, _ in outcomes) > 1e-6) == is_rejecting


# What is measured


def test_measure_reports_acceptance_z_and_captured_mass():
    lam = 0.8
    inputs = random_inputs()
    rows = list(tokens(inputs))  # each begins with the token's position and ends with its Z
    acceptances = [min(1.0, target / inf / lam) for _, inf, target, *_ in rows]
    z = inputs.z

    measurements = make_correction("obrs", **OBRS | {"lam": lam}).measure(inputs)

    expected = {
        "obrs/acceptance": acceptances,
        "obrs/z": [row[-1] for row in rows],
        "obrs/acceptance_minus_z": [x - row[-1] for x, row in zip(acceptances, rows, strict=True)],
        "obrs/z_bound_width": [(z.upper - z.lower)[row[0]].item() for row in rows],
        "obrs/rollout_mass": [z.rollout_mass[row[0]].item() for row in rows],
        "obrs/target_mass": [z.target_mass[row[0]].item() for row in rows],
        "obrs/union": [z.union[row[0]].item() for row in rows],
    }
    assert set(measurements) == set(expected)
    for name, values in expected.items():
        mean = math.fsum(values) / len(values)
        assert measurements[name].value.item() == pytest.approx(mean, rel=1e-11, abs=1e-15), name


def test_other_corrections_measure_the_same_overlap_at_lam_one():
    inputs = random_inputs()
    expected = make_correction("obrs", **OBRS | {"lam": 1.0}).measure(inputs)
    for name, numbers in EVERY:
        lam_of_one = {"lam": 1.0} if "lam" in numbers else {}
        assert make_correction(name, **numbers | lam_of_one).measure(inputs) == expected, (name, numbers)


@pytest.mark.parametrize(("name", "numbers"), EVERY)
def test_measure_adds_up_over_micro_batches(name, numbers):
    inputs = replace(with_lams(random_inputs()), by_policy=torch.tensor([True, False, True, False]))
    correction = make_correction(name, **numbers)
    fields = [field.name for field in fields_of(inputs) if field.name != "z"]

    def rows_of(rows):
        z = ZEstimate(*(field_values[rows] for field_values in inputs.z))
        return replace(inputs, **{field: getattr(inputs, field)[rows] for field in fields}, z=z)

    full_sums = correction.measure(inputs)
    added_sums = add_sums(correction.measure(rows_of(slice(0, 1))), correction.measure(rows_of(slice(1, 4))))

    for metric, full_sum in full_sums.items():
        numbers_of_full_sum = [number.item() for number in full_sum]
        assert [number.item() for number in added_sums[metric]] == pytest.approx(numbers_of_full_sum, rel=1e-12)


def test_capped_tokens_are_reported():
    inputs = random_inputs()
    correction = make_correction("obrs", **OBRS).apply(inputs, {})

    for position, p_inf, p_target, p_proximal, _, z in tokens(inputs):
        assert correction.capped[position].item() == (z * max(OBRS["lam"], p_target / p_inf) > OBRS["c1"])
        assert correction.capped_c2[position].item() == (p_proximal / p_target > OBRS["c2"])

    for flags in (correction.capped, correction.capped_c2):
        assert 0 < flags.sum() < inputs.response_mask.sum()
        assert not flags[~inputs.response_mask].any()


# What must not leak, and what is refused


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("name", "numbers"), EVERY)
def test_what_stands_outside_the_mask_changes_nothing(name, numbers, garbage):
    clean_inputs = with_lams(random_inputs())

    def with_garbage(values):
        return torch.where(clean_inputs.response_mask, values, garbage)

    fields = [field.name for field in fields_of(clean_inputs) if field.name not in ("response_mask", "z", "by_policy")]
    dirty_values = {field: with_garbage(getattr(clean_inputs, field)) for field in fields}
    soiled_inputs = replace(clean_inputs, **dirty_values, z=ZEstimate(*map(with_garbage, clean_inputs.z)))
    correction = make_correction(name, **numbers)

    assert correction.measure(soiled_inputs) == correction.measure(clean_inputs)

    clean_result = correction.apply(clean_inputs, correction.measure(clean_inputs))
    soiled_result = correction.apply(soiled_inputs, correction.measure(soiled_inputs))
    for field in (field.name for field in fields_of(clean_result) if field.name != "kappa_of_policy"):
        clean_values = getattr(clean_result, field)
        soiled_values = getattr(soiled_result, field)
        assert torch.equal(clean_values, soiled_values), field
        assert soiled_values.isfinite().all(), field


@pytest.mark.parametrize(("name", "numbers"), EVERY)
def test_a_batch_without_tokens_is_measured_and_corrected(name, numbers):
    inputs = random_inputs()
    empty_inputs = replace(inputs, response_mask=torch.zeros_like(inputs.response_mask))
    correction = make_correction(name, **numbers)

    result = correction.apply(empty_inputs, correction.measure(empty_inputs))

    assert result.weights.abs().sum().item() == 0.0
    assert result.accept_mask.sum().item() == 0.0


@pytest.mark.parametrize(("name", "numbers"), EVERY)
def test_weights_have_the_dtype_of_the_log_probs(name, numbers):
    inputs = random_inputs()
    float32_inputs = replace(
        inputs,
        rollout_log_probs=inputs.rollout_log_probs.float(),
        target_log_probs=inputs.target_log_probs.float(),
        proximal_log_probs=inputs.proximal_log_probs.float(),
        z=ZEstimate(*(values.float() for values in inputs.z)),
    )
    correction = make_correction(name, **numbers)
    float64_weights = correction.apply(inputs, correction.measure(inputs)).weights

    result = correction.apply(float32_inputs, correction.measure(float32_inputs))

    assert result.weights.dtype == torch.float32
    assert result.accept_mask.dtype == torch.float32
    torch.testing.assert_close(result.weights.double(), float64_weights, rtol=2e-6, atol=0.0)


def test_an_unknown_correction_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"did you mean 'obrs'.*is, mask_only, .*none, obrs, prefix, .*, z_only"):
        make_correction("obsr")
    assert {name for name, _ in EVERY} == CORRECTIONS.keys()


@pytest.mark.parametrize(("field", "valid"), [("mask", "expected, sampled"), ("kappa", "auto, none, prepass")])
def test_an_unknown_mode_lists_the_known_ones(field, valid):
    with pytest.raises(ConfigError, match=f"correction obrs: {field}: unknown value 'nonsense'.*{valid}"):
        make_correction("obrs", **OBRS | {field: "nonsense"})


@pytest.mark.parametrize("field", ["lam", "c1", "c2"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_numbers_that_are_not_above_zero_are_refused(field, value):
    with pytest.raises(ConfigError, match=f"obrs: {field}: {value} was given. Input should be "):
        make_correction("obrs", **OBRS | {field: value})
    with pytest.raises(ConfigError, match=f"correction tis: cap: {value} was given"):
        make_correction("tis", cap=value)


@pytest.mark.parametrize(("name", "key"), [("tis", "c1"), ("none", "cap"), ("obrs", "totals")])
def test_a_foreign_setting_is_refused_with_the_valid_ones(name, key):
    valid = ", ".join(sorted(CORRECTION_SETTINGS[name].model_fields))
    with pytest.raises(ConfigError, match=f"correction {name}: unknown setting '{key}'.*{valid}"):
        make_correction(name, **{key: 3.0})


@pytest.mark.parametrize("key", ["proximal", "target", "normalizer"])
def test_a_setting_that_the_inputs_decide_is_refused(key):
    with pytest.raises(ConfigError, match=f"correction obrs: {key} 'new' was given.*CorrectionInputs"):
        make_correction("obrs", **{key: "new"})


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_correction_has_the_defaults_of_the_config(name):
    assert make_correction(name) == construct_correction(CORRECTION_SETTINGS[name]())
    assert CORRECTION_SETTINGS.keys() == CORRECTIONS.keys()


@pytest.mark.parametrize("formula", [*CORRECTIONS.values(), dppo_topk])
def test_a_formula_reads_tensors_and_the_settings_of_its_name(formula):
    name_by_formula = {known_formula: name for name, known_formula in CORRECTIONS.items()} | {dppo_topk: "dppo"}
    settings_of_formula = {parameter for parameter in signature(formula).parameters if parameter not in TENSORS}
    run_settings = {
        "name",
        "proximal",
        "target",
        "lam",
        "normalizer",
        "budget",
        "kappa",
        "kappa_tolerance",
        "divergence",
    }

    known_settings = CORRECTION_SETTINGS[name_by_formula[formula]].model_fields.keys()
    assert settings_of_formula == known_settings - run_settings


@pytest.mark.parametrize(
    ("name", "replacement"), [("ppo_is", "none, proximal: rollout"), ("tis_adjusted", "tis, proximal: new")]
)
def test_a_proximal_point_is_no_correction_of_its_own(name, replacement):
    with pytest.raises(ConfigError, match=f"'{name}' is correction .*{replacement}.*proximal_log_probs"):
        make_correction(name)


def test_a_users_formula_is_a_correction_and_takes_its_settings():
    def share_of_ratio(log_ratio, acceptance, share):
        return Weighed(share * log_ratio.exp(), accepted=acceptance)

    inputs = random_inputs()
    ratios = {position: target / inf for position, inf, target, *_ in tokens(inputs)}

    result = make_correction(share_of_ratio, share=0.5).apply(inputs, {})

    expected = {position: (0.5 * ratio, min(1.0, ratio)) for position, ratio in ratios.items()}
    assert_weights_and_mask(result, expected)
    for wrong_settings in ({}, {"share": 0.5, "cap": 1.0}):
        with pytest.raises(ConfigError, match=r"share_of_ratio.*got the settings .*share"):
            make_correction(share_of_ratio, **wrong_settings)
