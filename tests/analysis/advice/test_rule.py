"""What a rollout is worth, against sums over every token of two-token responses, mixtures, and repeated draws."""

import math
from pathlib import Path

import pytest
import torch

from helpers.synthetic_rollouts import noise, records, write
from jackpot.analysis.advice.rule import (
    COLUMNS,
    GROUPS,
    Costs,
    Estimate,
    JudgedCorrection,
    Recommendation,
    choose,
    drafted_generation,
    estimate,
    judge,
    mixed_generation,
    worth_of,
)
from jackpot.analysis.replay.replay import replay
from jackpot.analysis.replay.stats import SampledColumns, rule_columns


def sums(**changes: float) -> torch.Tensor:
    """Sums over 1,000 tokens, of the policy's own rollouts but for the means that change."""
    means = {
        "tokens": 1.0,
        "factor": 1.0,
        "square": 1.0,
        "wrong": 0.0,
        "trained": 1.0,
        "elsewhere": 0.0,
        "overlap": 1.0,
    }
    return 1000.0 * torch.tensor([(means | changes)[name] for name in COLUMNS], dtype=torch.float64)


def candidate(label: str, rows: torch.Tensor | None = None, **changes: float) -> JudgedCorrection:
    """A judged correction, of the name and the mask in its label; all groups have the same sums, or those of `rows`."""
    name, _, mask = label.partition(" ")
    groups = sums(**changes).expand(GROUPS, -1) if rows is None else rows
    settings = {"mask": mask} if mask else {}
    return JudgedCorrection(
        name=name, label=label, settings=settings, advisable=True, is_whole=False, known=1.0, groups=groups
    )


def test_the_three_means_are_those_of_the_formula():
    worth = worth_of(sums(factor=0.9, square=0.9, wrong=0.045, trained=0.9, elsewhere=0.2))

    assert [float(value) for value in worth] == pytest.approx([0.9, 0.05, 0.2])
    assert float(worth.of_tokens) == pytest.approx(0.9 * 0.81)
    assert float(worth.value) == pytest.approx(0.9 * 0.81 * 0.64)
    assert float(worth_of(sums(wrong=0.6)).value) == 0.0
    assert float(worth_of(sums(factor=0.0, square=0.0, trained=0.0)).value) == 0.0


def test_a_share_is_worth_the_sums_of_both_models_rollouts():
    """Of the policy's own rollouts F is 1, and nothing is wrong or elsewhere."""
    theirs = sums(factor=0.8, square=0.75, wrong=0.1, trained=0.8, elsewhere=0.25)

    for share in (0.0, 0.3, 1.0):
        together = share * theirs + (1.0 - share) * sums()
        mixed = worth_of(together)
        worth = worth_of(theirs, share)
        assert float(worth.effective) == pytest.approx(float(mixed.effective))
        assert float(worth.gap) == pytest.approx(float(mixed.gap))
        weight = share * 0.8 / (share * 0.8 + 1.0 - share)
        assert float(worth.elsewhere) == pytest.approx(weight * 0.25)


def test_the_share_elsewhere_is_the_variation_of_later_states(tmp_path: Path):
    """Responses of two tokens: no prefix differs at the first, and at the second those of one token do."""
    path = write(tmp_path / "two.jsonl", records(noise(0.8), responses=1100, length=2))

    result = replay(path, names=["none", "prefix"])
    none = next(judged for judged in result.answer.candidates if judged.label == "none")

    # half of the mean TV of a token
    expected = estimate(lambda rows: (1.0 - rows[..., 6] / rows[..., 0]) / 2.0, none.groups)

    assert none.elsewhere.value == pytest.approx(expected.value, abs=4.0 * none.elsewhere.error)
    assert 0.005 > none.elsewhere.error > 0.001 and expected.value > 0.1

    prefix = next(judged for judged in result.answer.candidates if judged.label == "prefix low=1 high=1")
    assert prefix.elsewhere.value < 0.7 * none.elsewhere.value  # it weighs states by R_t, within its band


def test_states_are_weighed_by_their_share_of_all_weights():
    """h of 0.6, 1.0 and 0.2 is, over its mean of 0.6, 1, 5/3 and 1/3, beside R of 1, 0.5 and 2."""
    mask = torch.tensor([[True, True, True, False]])
    scale, prefixes = (torch.tensor([row], dtype=torch.float64) for row in ([0.6, 1.0, 0.2, 9.0], [1.0, 0.5, 2.0, 0.0]))
    ones = torch.ones_like(scale)
    columns = rule_columns(SampledColumns(ones, 2.0 * ones, 3.0 * ones, 4.0 * ones), scale, prefixes, 0.5 * ones, mask)
    assert columns.tolist() == [pytest.approx([3.0, 3.0, 6.0, 9.0, 12.0, 5.0 / 3.0 - 0.5, 1.5])]


def test_the_standard_error_is_the_spread_over_repeated_draws():
    """Of a quotient of sums over responses of very different lengths, whose tokens are alike."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> torch.Tensor:
        lengths = torch.randint(1, 30, (200,), generator=generator).double()
        level = 1.0 + 0.5 * torch.randn(200, generator=generator, dtype=torch.float64)
        rows = sums().div(1000.0).repeat(200, 1)
        rows[:, 1], rows[:, 2] = level, level.square() + 0.2
        return torch.zeros(GROUPS, 7, dtype=torch.float64).index_add(
            0, torch.arange(200) % GROUPS, rows * lengths[:, None]
        )

    estimates = [estimate(lambda rows: worth_of(rows).effective, draw()) for _ in range(200)]
    spread = torch.tensor([estimated.value for estimated in estimates]).std()
    assert sum(estimated.error for estimated in estimates) / 200 == pytest.approx(float(spread), rel=0.15)

    alone = torch.zeros(GROUPS, 7, dtype=torch.float64)
    alone[3] = sums()
    assert estimate(lambda rows: worth_of(rows).value, alone).error is None


def test_ties_go_to_simpler_corrections_and_expected_masks():
    gap = {"wrong": 0.1}

    assert choose([candidate("none", **gap), candidate("tis"), candidate("obrs expected")]).label == "tis"
    assert choose([candidate("none", wrong=0.005), candidate("tis")]).label == "none"

    masks = [candidate("obrs sampled"), candidate("obrs expected")]
    assert choose(masks).label == choose(masks[::-1]).label == "obrs expected"
    assert choose([candidate("tis", square=1.1), candidate("obrs expected")]).label == "obrs expected"
    assert choose([candidate("none", wrong=0.4), candidate("tis", square=4.0)]) is None


def test_a_difference_by_chance_is_a_tie():
    generator = torch.Generator().manual_seed(0)
    chance = torch.randn(GROUPS, generator=generator, dtype=torch.float64)
    chance -= chance.mean()
    best = candidate("tis")

    for noise_of, label in ((0.0, "tis"), (0.3, "none")):
        rows = sums(wrong=0.05).repeat(GROUPS, 1)
        rows[:, 3] += 1000.0 * noise_of * chance
        assert choose([candidate("none", rows=rows), best]).label == label


def test_shares_and_drafts_cost_their_tokens_over_their_worth():
    rows = sums(factor=0.9, square=0.9, wrong=0.045, trained=0.9, elsewhere=0.2, overlap=0.8).expand(GROUPS, -1)
    costs = Costs(flops=0.2, weights=0.1)

    half, alone = mixed_generation(0.5, rows, costs), mixed_generation(0.0, rows, costs)
    worth = float(worth_of(rows.sum(0), 0.5).value)

    assert half.worth.value == pytest.approx(worth) and half.flops.value == pytest.approx(0.6 / worth)
    assert half.weights.value == pytest.approx(0.55 / worth) and half.flops.value > half.flops_any_state.value
    assert (alone.worth.value, alone.flops.value, alone.label) == (1.0, 1.0, "the policy alone")

    drafts = drafted_generation(rows, costs)
    tokens = {k: (1 - 0.8 ** (k + 1)) / 0.2 for k in range(1, 9)}
    assert drafts.drafts == min(tokens, key=lambda k: (1 + 0.1 * k) / tokens[k])
    assert drafts.weights.value == pytest.approx((1 + 0.1 * drafts.drafts) / tokens[drafts.drafts])
    assert drafts.flops.value == pytest.approx((drafts.drafts + 1) * 1.2 / tokens[drafts.drafts])


def test_the_advice_names_the_cheapest_way_and_what_it_rests_on():
    def advice(elsewhere: float) -> Recommendation:
        common = {"elsewhere": elsewhere, "overlap": 0.9}
        those = [candidate("none", wrong=0.1, **common), candidate("tis", square=1.1, **common)]
        return judge(those, "some tokens", Costs(flops=0.2, weights=0.2))

    near, far = advice(0.1), advice(0.7)

    assert near.correction == "tis" and list(near.lines) == [
        "Use",
        "After tis",
        "Cheapest mix",
        "With 7 drafts a pass",
        "Judged on",
    ]

    cheapest = near.lines["Cheapest mix"]
    assert cheapest.startswith(
        "let the rollout model generate everything; equal progress takes 27% (95 % CI 27% to 27%)"
    )
    assert "counted fully" not in near.sentence and near.lines["Judged on"] == "some tokens"
    assert near.lines["With 7 drafts a pass"].startswith(
        "speculative decoding takes 58% fewer weight reads and 69% more FLOPs"
    )

    cheapest = far.lines["Cheapest mix"]
    assert cheapest.startswith("let the policy generate everything") and cheapest.endswith("generate everything, 22%")

    assert judge([candidate("none")], "some tokens").generation == ()
    assert judge([], "no tokens").verdict == "cannot tell"
    assert Estimate(0.5, math.nan).text == "0.50" and Estimate(0.5, 0.123).text == "0.50 ± 0.12"
