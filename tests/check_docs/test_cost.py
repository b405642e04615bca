"""docs/cost.md: the published seconds and ours, and what the plan says beside a policy that generates ahead."""

from pathlib import Path

import pytest

from helpers.hub import without_hub
from helpers.paths import ROOT
from jackpot.analysis.plan.cost_model import GPUS
from jackpot.analysis.plan.estimate import Estimator
from jackpot.analysis.plan.sizes import model_sizes, prompt_lengths
from jackpot.config.recipes import resolve
from research.public_steps import HELD_OUT, estimated, mean_response, rows, table

PAGE = (ROOT / "docs/cost.md").read_text()


def test_the_published_seconds_are_those_of_the_data() -> None:
    assert table() in PAGE


def test_one_row_is_held_out_and_its_ratios_are_on_the_page() -> None:
    [row] = [candidate for candidate in rows() if all(candidate[key] == value for key, value in HELD_OUT.items())]
    ours, known = estimated(row, mean_response(row))["iteration"], row["published"]["iteration"]
    assert f"**{row['before']['iteration'] / known:.2f} and {ours / known:.2f}**" in PAGE


def test_a_mean_that_is_not_published_follows_from_training() -> None:
    for row in rows():
        mean = mean_response(row)
        assert row["mean"] == mean or estimated(row, mean)["training"] == pytest.approx(row["published"]["training"])


def test_hours_beside_a_policy_ahead_are_those_of_the_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_hub(monkeypatch, tmp_path)
    config = resolve("joint_8b", None, [])
    plan, gpu = Estimator(config, model_sizes(config), prompt_lengths(config)), GPUS["H100"]
    shares = plan.shares(gpu, 8)
    hours = plan.run_hours(shares)._replace(evaluating=plan.evaluating(shares))

    ahead = plan.ahead(gpu, 8, hours.evaluating)
    assert ahead is not None

    sentence = (
        f"{hours.all / ahead.all:.0%} of its {ahead.all:.1f} hours ({hours.iterations / ahead.iterations:.0%} without"
    )
    assert sentence in PAGE and f"takes {ahead.all:.1f} hours, and the small model {hours.all:.1f}" in PAGE
