"""What `jackpot train --dry-run` says as a user types it."""

from typer.testing import CliRunner

from helpers.runs import SMALL, small_config
from jackpot.ui import cli
from jackpot.ui.terminal.plan import unpriced


def test_plans_of_int8_say_that_their_hours_do_not_hold() -> None:
    assert unpriced(small_config("precision=int8", "engine.quantization=int8_w8a8")) and not unpriced(small_config())


def test_engines_in_processes_of_their_own_are_named() -> None:
    arguments = ["train", "quickstart", "--dry-run", *SMALL, "placement.engines=2"]
    result = CliRunner().invoke(cli.app, arguments, env={"COLUMNS": "200"})
    assert "shares the training out to N; 2 engine processes" in " ".join(result.stdout.split())
