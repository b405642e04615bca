"""How often the rule of docs/replay.md was right: what counts as a tie, and the committed numbers."""

from dataclasses import replace

import pytest
import torch

from research import advice


def outcome(*accuracies: float, error: float | None = None) -> "advice.Outcome":
    """An outcome with these accuracies, of the seeds 0, 1, ..."""
    return advice.Outcome(accuracy=dict(enumerate(accuracies)), error=error)


def test_the_section_is_what_its_generator_writes() -> None:
    assert advice.section() in advice.PAGE.read_text()


def test_a_difference_within_its_95_percent_interval_is_a_tie() -> None:
    base = outcome(0.70, 0.72, 0.71)
    assert (
        advice.outcome(outcome(0.75, 0.77, 0.76), base) == 1 and advice.outcome(base, outcome(0.75, 0.77, 0.76)) == -1
    )

    # differences of 0.01, 0.05 and 0.03: their mean is 0.03, and half the interval 4.303 * 0.02 / sqrt(3) = 0.0497
    assert advice.outcome(outcome(0.71, 0.77, 0.74), base) == 0
    # of 0.02, 0.04 and 0.03: 4.303 * 0.01 / sqrt(3) = 0.0248
    assert advice.outcome(outcome(0.72, 0.76, 0.74), base) == 1
    assert advice.outcome(outcome(0.9), base) is None and advice.outcome(outcome(0.9), outcome(0.5)) is None

    single = [outcome(0.70, error=0.01), outcome(0.72, error=0.01), outcome(0.73, error=0.01)]
    assert [advice.outcome(run, single[0]) for run in single[1:]] == [0, 1]


def test_less_of_the_rollout_model_is_what_the_share_alone_says() -> None:
    arms = [advice.Judged(groups=None, shares=shares) for shares in ({1.0: 0.75, 0.0: 0.25}, {0.5: 1.0}, {0.75: 1.0})]
    pairs = [advice.Pair(arms=(arms[0], other), said=1, found=-1) for other in arms]
    assert [pair.by_share for pair in pairs] == [0, -1, 0]
    assert advice.agreed(pairs, lambda pair: pair.by_share) == "1 of 3 (33%)"
    assert advice.agreed(pairs, lambda pair: pair.said) == "0 of 3 (0%)" and advice.agreed([], lambda pair: 0) == "-"


def test_a_shares_worth_is_its_mean_and_close_ones_are_a_tie() -> None:
    sums = torch.tensor([[1000.0, 1000.0, 1050.0, 60.0, 1000.0, 200.0, 900.0]], dtype=torch.float64).expand(20, -1)
    full = advice.Judged(groups=sums, shares={1.0: 1.0})
    annealed, policy_alone = replace(full, shares={1.0: 0.75, 0.0: 0.25}), advice.Judged(groups=None, shares={0.0: 1.0})
    worth = 1.0 / 1.05 * 0.88**2 * 0.8**2

    assert float(annealed.worth(sums.sum(0))) == pytest.approx(0.75 * worth + 0.25)
    assert advice.predicted(annealed, full) == 1 and advice.predicted(full, annealed) == -1
    assert advice.predicted(policy_alone, annealed) == 1 and advice.predicted(policy_alone, policy_alone) == 0

    closer = replace(full, groups=sums * torch.tensor([1.0, 1.0, 1.0, 0.9, 1.0, 1.0, 1.0], dtype=torch.float64))
    assert advice.predicted(closer, full) == 0

    kinds = [advice.kind(*pair) for pair in ((1, 1), (0, 0), (1, 0), (0, -1), (1, -1))]
    assert kinds == list(advice.KINDS)
