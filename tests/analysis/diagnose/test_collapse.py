"""When a run counts as collapsed, and since when."""

import pytest

from helpers.runs import small_config
from jackpot.analysis.diagnose.collapse import collapse_of

CONFIG = small_config("evaluation.problems=512")


def evaluations(*accuracies: float) -> list[dict]:
    """Lines of metrics.jsonl with an evaluation every ten iterations."""
    return [
        {"iteration": 10 * index, "eval/policy_accuracy": value, "eval/policy_accuracy_stderr": 0.02}
        for index, value in enumerate(accuracies)
    ]


@pytest.mark.parametrize(
    "accuracies",
    [
        (0.4, 0.5, 0.6, 0.7),
        (0.4, 0.25, 0.24, 0.22, 0.5),  # low, and more than half of the best
        (0.4, 0.6, 0.1, 0.5, 0.1, 0.6),  # never twice in a row
        (0.004, 0.0, 0.0),  # 2 right answers of 512 are nothing to fall from
    ],
)
def test_a_run_that_learns_or_recovers_has_not_collapsed(accuracies) -> None:
    assert collapse_of(evaluations(*accuracies), [], CONFIG) is None


def test_two_evaluations_below_half_of_the_best_are_a_collapse() -> None:
    collapse = collapse_of(evaluations(0.4, 0.6, 0.29, 0.1, 0.5), [], CONFIG)
    assert (collapse.iteration, collapse.accuracy, collapse.best) == (20, 0.29, 0.6)
    assert "29.0% right at iteration 20, after 60.0%" in collapse.why


def test_the_best_is_not_raised_by_the_fall() -> None:
    """Half of 0.6 is the limit for both low evaluations, not half of the first low one."""
    assert collapse_of(evaluations(0.6, 0.25, 0.2), [], CONFIG).best == 0.6


def test_a_run_that_stopped_itself_has_collapsed_there() -> None:
    events = [{"event": "skipped_step", "iteration": 3}, {"event": "stopped", "iteration": 12, "why": "NaN"}]
    collapse = collapse_of(evaluations(0.4, 0.5), events, CONFIG)
    assert (collapse.iteration, collapse.accuracy, collapse.best, collapse.why) == (12, 0.5, 0.5, "stopped itself: NaN")


def test_the_first_sign_is_the_finding_that_began_first() -> None:
    def first_sign(accuracies: tuple[float, ...]) -> str:
        """Return the first sign where the KL grows from iteration 50 on."""
        lines = {line["iteration"]: line for line in evaluations(*accuracies)}
        for iteration in range(100):
            kl = 0.1 if iteration < 50 else 0.9
            lines[iteration] = {"iteration": iteration, "mismatch/kl_rollout_policy": kl} | lines.get(iteration, {})
        return collapse_of([lines[iteration] for iteration in range(100)], [], CONFIG).first_sign

    assert first_sign((0.4, 0.6, 0.1, 0.05)) == "eval/policy_accuracy since 20"
    # the median of 10 iterations is too high once half of them are
    assert first_sign((0.4, *[0.6] * 7, 0.1, 0.05)) == "mismatch/kl_rollout_policy since 54"
