"""The numbers of docs/smollm.md are those of the committed runs."""

import json
from statistics import fmean, stdev

from helpers.paths import ROOT
from jackpot.config.recipes import resolve

PAGE = (ROOT / "docs" / "smollm.md").read_text()
README = (ROOT / "README.md").read_text()
LINES = [json.loads(line) for line in (ROOT / "docs" / "smollm.jsonl").read_text().splitlines()]


def of_arm(arm: str) -> list[dict]:
    """Return an arm's lines in the order of their seeds."""
    return sorted((line for line in LINES if line["arm"] == arm), key=lambda line: line["seed"])


def row(arm: str) -> str:
    """Return an arm's row of the table of results."""
    runs = of_arm(arm)
    before, after = ([100 * line["points"][at]["policy_accuracy"] for line in runs] for at in (0, -1))
    gains = [end - start for start, end in zip(before, after, strict=True)]
    costs = [fmean(line[name] for line in runs) for name in ("rollout_flops", "all_flops", "cpu_seconds")]
    cells = [
        f"`{arm}`",
        " / ".join(f"{value:.1f}" for value in before),
        " / ".join(f"{value:.1f}" for value in after),
        f"{fmean(gains):+.1f} ({stdev(gains):.1f})",
        f"{costs[0] / 1e12:.1f}",
        f"{costs[1] / 1e12:.0f}",
        f"{costs[2]:.0f}",
    ]

    return f"| {' | '.join(cells)} |"


def test_every_arm_that_ran_has_its_row_of_three_seeds() -> None:
    arms = {line["arm"] for line in LINES}
    assert {"on_policy", "obrs"} <= arms
    for arm in arms:
        assert len(of_arm(arm)) >= 3
        assert row(arm) in PAGE
        assert all(line["points"][-1]["iteration"] == resolve("smollm", arm, []).iterations for line in of_arm(arm))


def test_the_accuracy_rises_by_what_the_recipe_promises() -> None:
    for arm, least in {"on_policy": 0.40, "obrs": 0.25}.items():
        for line in of_arm(arm):
            first, *_, last = line["points"]
            assert last["policy_accuracy"] - first["policy_accuracy"] >= least


def test_the_readme_shows_the_means_over_the_seeds() -> None:
    runs = of_arm("on_policy")
    means = [fmean(100 * line["points"][at]["policy_accuracy"] for line in runs) for at in (0, -1)]
    text = "held-out sums right: {:.1f} % before, {:.1f} % after ({} seeds)"
    assert text.format(*means, len(runs)) in README
