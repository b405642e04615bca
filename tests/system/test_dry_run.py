"""What `jackpot train --dry-run` prints of engines, of hours that do not hold, and of a policy that trains ahead."""

import io

import pytest
from rich.console import Console
from typer.testing import CliRunner

from helpers.runs import SMALL, small_config
from jackpot.analysis.plan.cost_model import Hours
from jackpot.analysis.plan.estimate import CostEstimate, FlopShares, MachineEstimate
from jackpot.analysis.plan.sharding import Shard
from jackpot.analysis.plan.sizes import PromptLengths
from jackpot.ui import cli
from jackpot.ui.terminal.plan import show_needs, unpriced


def test_plans_of_int8_say_that_their_hours_do_not_hold() -> None:
    assert unpriced(small_config("precision=int8", "engine.quantization=int8_w8a8"))
    assert not unpriced(small_config())


def test_engines_in_processes_of_their_own_are_named() -> None:
    arguments = ["train", "quickstart", "--dry-run", *SMALL, "placement.engines=2"]
    result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "200"})
    assert "shares the training out to N; 2 engine processes" in " ".join(result.stdout.split())


def hours_of(generation: float) -> Hours:
    """Return the hours of a run with two hours of training and one of evaluations."""
    return Hours(generation=generation, training=2.0, sending=0.0, evaluating=1.0)


@pytest.mark.parametrize(("ahead_hours", "is_shown"), [(hours_of(generation=1.0), True), (None, False)])
def test_hours_stand_beside_those_of_a_policy_ahead(ahead_hours: Hours | None, is_shown: bool) -> None:
    shard_sizes = dict.fromkeys(
        ("weights", "optimizer", "gradients", "gathered", "training", "resting", "generation"), 0.0
    )
    shard = Shard(gpus=8, limit=1.0, tensor_parallel={}, **shard_sizes)
    hours, hours_alone = hours_of(generation=3.0), hours_of(generation=5.0)
    machine = MachineEstimate("H100", shard, hours, hours_alone, ahead_hours)
    estimate = CostEstimate(
        prompts=PromptLengths(longest=10, mean=10, assumed=""),
        response=20.0,
        rows=[],
        stated=machine,
        this_machine=[],
        fewest={"H100": 8},
        flops=FlopShares(rollouts=1.0, all=1.0),
    )

    output = io.StringIO()
    show_needs(Console(file=output, width=200), small_config(), estimate)

    plan = " ".join(output.getvalue().split())
    # 3 + 2 + 1 hours by 1 + 2 + 1, and without the evaluations 5 by 3
    assert ("150% of its 4.0 hours (167% without evaluations)" in plan) is is_shown
