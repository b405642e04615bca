"""The synthetic families of models and Figure 2 of research/ have the numbers of Python loops and numpy."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from jackpot.analysis.simulate.distributions import RECIPE_LAM, StatePairs, measure_states
from research import families
from research.families import FAMILIES, GapFamily, sample_states
from research.figure2 import gap_curve, mean_point, measure_pair, token_ratios

NAMES = [family.name for family in FAMILIES]
SMALL = 400  # tokens


def family(name: str) -> GapFamily:
    """Find the family with this name."""
    return next(candidate for candidate in FAMILIES if candidate.name == name)


def states(name: str, gap: float, count: int = 6, vocabulary: int = SMALL) -> StatePairs:
    """Sample states of a family with this gap."""
    return sample_states(family(name), gap, count, seed=3, vocabulary=vocabulary)


def of(rollout: list[list[float]], target: list[list[float]]) -> StatePairs:
    """Build StatePairs from probabilities."""
    parts = [torch.tensor(rows, dtype=torch.float64).log() for rows in (rollout, target)]
    return StatePairs(rollout=parts[0], target=parts[1], token_ids=torch.zeros(len(rollout), 1, dtype=torch.int64))


@pytest.mark.parametrize("name", NAMES)
def test_the_gap_of_a_family_grows_from_nothing(name: str) -> None:
    gaps = [
        measure_states(sample_states(family(name), gap, 16, seed=0, vocabulary=4_096)).kl.mean()
        for gap in family(name).gaps
    ]

    assert all(small < large for small, large in itertools.pairwise(gaps))
    assert gaps[0] < 0.003 and gaps[-1] > 0.5

    pair = states(name, 0.5)
    for log_probs in (pair.rollout, pair.target):
        np.testing.assert_allclose(log_probs.exp().sum(-1).numpy(), 1.0, rtol=1e-12)


def test_the_models_of_a_family_differ_as_its_name_says() -> None:
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
    pair = sample_states(family("leak"), 0.9, 400, seed=0, vocabulary=SMALL)
    drawn = torch.zeros_like(pair.rollout).scatter_add(1, pair.token_ids, torch.ones(400, 32, dtype=torch.float64))
    expected = pair.rollout.exp().sum(0)
    assert ((drawn.sum(0) / 32 - expected).abs() < 6 * (expected / 32).sqrt()).all()


def test_the_kl_falls_by_no_more_than_minus_log_z() -> None:
    for gap_family in FAMILIES:
        for gap in gap_family.gaps:
            measured = measure_states(sample_states(gap_family, gap, 8, seed=1, vocabulary=SMALL))

            fall = measured.kl[:, None] - measured.kl_after
            assert (fall <= -measured.acceptance.log() + 1e-12).all() and (fall >= -1e-12).all()

            mean = mean_point(measured)
            assert mean.kl - mean.kl_after[RECIPE_LAM] <= mean.log_acceptance + 1e-12


def test_ratios_below_lam_are_lifted_to_z() -> None:
    pair = measure_pair("noise", [states("noise", 1.0, count=3)], 3)
    ratios = token_ratios(pair)
    z = np.repeat(measure_states(pair.kept).acceptance[:, RECIPE_LAM].numpy(), len(ratios.before) // 3)

    for before, after in ((ratios.before, ratios.after), (ratios.policy_before, ratios.policy_after)):
        np.testing.assert_allclose(after, z * np.maximum(1.0, before), rtol=1e-12)
    assert np.mean(np.log(ratios.policy_before)) > np.mean(np.log(ratios.before))
    assert ratios.kl == pytest.approx(float(measure_states(pair.kept).kl.mean()))


def test_a_curve_is_read_off_between_its_points_and_not_beyond() -> None:
    points = [mean_point(measure_states(sample_states(family("noise"), gap, 8, seed=0))) for gap in (0.1, 0.6, 0.2)]
    curve = gap_curve("a", points)
    kls = [point.kl for point in curve.points]

    assert kls == sorted(kls) and kls[0] < 0.01 < kls[1] < 0.1 < kls[2] < 1.0

    first, second = curve.points[:2]
    share = (math.log(0.01) - math.log(first.kl)) / (math.log(second.kl) - math.log(first.kl))
    expected = first.acceptance[1] + share * (second.acceptance[1] - first.acceptance[1])

    assert curve.marks[0].acceptance == pytest.approx(expected)
    assert first.factor < curve.marks[0].factor < second.factor or first.factor > curve.marks[0].factor > second.factor
    assert curve.marks[2].acceptance is None and curve.marks[2].factor is None
    assert first.acceptance[1] > 0.95 > second.acceptance[1] and first.kl < curve.kl_at_high_acceptance < second.kl


@pytest.mark.parametrize("source", [(), ("quickstart", "sampling.max_new_tokens=1", "--prompts", "1")])
def test_the_script_prints_tables_and_writes_a_page(
    source: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(families, "EXAMPLE_STATES", 32)
    monkeypatch.setattr(families, "SWEEP_STATES", 4)
    monkeypatch.setattr("sys.argv", ["families", *source, "--seed", "3", "--out", str(tmp_path)])

    families.main()
    printed = capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figure2.html", "figure2.json"]

    figure = json.loads((tmp_path / "figure2.json").read_text())
    assert figure["seed"] == 3 and [curve["name"] for curve in figure["curves"]] == (
        ["starter:rollout_model"] if source else NAMES
    )
    assert not source or figure["curves"][0]["points"] == []  # too few states leave empty charts
    assert all(f"{curve['name']}" in printed for curve in figure["curves"])
