"""`jackpot compare` as a user types it: real runs in processes of their own, stopped, continued and laid out."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from helpers.commands import SCREEN, jackpot
from helpers.pages import page_data
from helpers.runs import SMALL, run
from jackpot.analysis.compare.arms import differing_arms, make_runs, with_budget
from jackpot.config.recipes import resolve, resolve_arms
from jackpot.core.errors import CheckpointError, ConfigError
from jackpot.core.files import hold_lock
from jackpot.ui import cli

JACKPOT = Path(sys.executable).with_name("jackpot")
TINY = (*(setting for setting in SMALL if not setting.startswith("threads")), "iterations=2", "evaluation.every=1")
PATIENCE = 240.0  # seconds until a test gives up
ASKED = ("--accuracy", "0.1")  # that costs are counted to, whatever two iterations learned


def start_compare(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """Start the command, and return its process."""
    command = [JACKPOT, "compare", "quickstart", *arguments]
    environment = os.environ | SCREEN
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def compare(*arguments: str, cwd: Path) -> tuple[int, str, str]:
    """Run the command, and return its exit code, output and errors."""
    result = jackpot("compare", "quickstart", *arguments, cwd=cwd)
    return result.returncode, result.stdout, result.stderr


def metric_lines(run: Path) -> list[dict]:
    """Return the metrics of a run, none where it has not begun."""
    path = run / "metrics.jsonl"
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def is_held(run: Path) -> bool:
    """Return whether a process still works on the run."""
    try:
        hold_lock(run / ".lock").close()
    except CheckpointError:
        return True
    return False


@pytest.fixture(scope="module")
def finished_comparison(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder of two arms and two seeds, and what the command printed; a run of each arm was done before."""
    cwd = tmp_path_factory.mktemp("home")
    configs = resolve_arms("quickstart", ["obrs", "on_policy"], [1, 2], TINY)
    for arm, seed in (("obrs", 2), ("on_policy", 1)):
        run(configs[arm, seed], cwd / "runs" / "compare-quickstart" / f"{arm}-seed{seed}")

    code, output, error = compare("--arms", "obrs, on_policy", "--seeds", "2", "--jobs", "2", *ASKED, *TINY, cwd=cwd)
    assert code == 0, error
    return cwd / "runs" / "compare-quickstart", output


@pytest.mark.slow
def test_every_arm_and_seed_is_run_and_laid_side_by_side(finished_comparison: tuple[Path, str]) -> None:
    folder, output = finished_comparison
    for name in ("obrs-seed1", "obrs-seed2", "on_policy-seed1", "on_policy-seed2"):
        assert [line["iteration"] for line in metric_lines(folder / name)] == [0, 1, 2]

    for text in ("32 sequences generated", "minus obrs", "rollout FLOPs", "CPU seconds", "comparison.html"):
        assert text in output

    comparison = json.loads((folder / "comparison.json").read_text())
    accuracies = [
        [metric_lines(folder / f"{arm}-seed{seed}")[-1]["eval/policy_accuracy"] for seed in (1, 2)]
        for arm in ("obrs", "on_policy")
    ]
    assert [row["after"]["values"] for row in comparison["rows"]] == accuracies

    assert len((folder / "summaries.jsonl").read_text().splitlines()) == 4
    assert "Policy by sequences generated" in page_data(folder / "comparison.html")


@pytest.mark.slow
def test_arms_get_the_same_prompts(finished_comparison: tuple[Path, str]) -> None:
    folder, _ = finished_comparison
    evaluation_prompts, training_uids = [], []

    for name in ("obrs-seed1", "on_policy-seed1"):
        prompt_lines = (folder / name / "eval/iteration-000000-policy.jsonl").read_text().splitlines()
        evaluation_prompts.append([json.loads(line)["prompt"] for line in prompt_lines])
        rollouts = pq.read_table(folder / name / "rollouts/iteration-000002.parquet")
        training_uids.append(rollouts["prompt_uid"].to_pylist())

    assert evaluation_prompts[0] == evaluation_prompts[1]
    assert len(evaluation_prompts[0]) == 8
    assert training_uids[0] == training_uids[1]
    assert len(set(training_uids[0])) == 4


@pytest.mark.slow
def test_what_is_done_is_not_run_again(finished_comparison: tuple[Path, str]) -> None:
    folder, _ = finished_comparison
    comparison_before = (folder / "comparison.json").read_bytes()
    time_before = (folder / "obrs-seed1" / "metrics.jsonl").stat().st_mtime_ns

    code, output, error = compare("--arms", "obrs,on_policy", "--seeds", "2", *ASKED, *TINY, cwd=folder.parent.parent)

    assert code == 0, error
    assert output.count("done before") == 4
    assert (folder / "comparison.json").read_bytes() == comparison_before
    assert (folder / "obrs-seed1" / "metrics.jsonl").stat().st_mtime_ns == time_before


@pytest.mark.slow
def test_other_settings_are_refused_before_anything_runs(finished_comparison: tuple[Path, str]) -> None:
    folder, _ = finished_comparison
    code, _, error = compare("--arms", "obrs", *TINY, "batch.prompts=8", cwd=folder.parent.parent)
    assert code == 2
    assert "batch.prompts: 4 in the folder, 8 now" in error


@pytest.mark.slow
def test_what_has_collapsed_is_stopped_and_dated(tmp_path: Path) -> None:
    """A learning rate that breaks any model: hardly an answer is right after one step."""
    settings = ("policy.optimizer.learning_rate=0.3", "evaluation.problems=64", "iterations=500")
    code, output, error = compare("--arms", "on_policy", "--seeds", "1", *TINY, *settings, cwd=tmp_path)
    assert code == 0, error

    run = tmp_path / "runs" / "compare-quickstart" / "on_policy-seed1"
    last_iteration = metric_lines(run)[-1]["iteration"]
    assert last_iteration < 500
    assert (run / "checkpoints" / "last").exists()

    date = re.search(r"collapsed, seed 1: 0\.0% right at iteration (\d+), after", output)
    assert date
    assert int(date[1]) < last_iteration

    code, output, _ = compare("--arms", "on_policy", "--seeds", "1", *TINY, *settings, cwd=tmp_path)
    assert code == 0
    assert "collapsed" in output
    assert metric_lines(run)[-1]["iteration"] == last_iteration  # it is not taken up again


@pytest.mark.slow
def test_a_budget_of_flops_stops_a_run(tmp_path: Path) -> None:
    settings = ("--budget", "2e8", "--unit", "flops", "iterations=500")
    code, output, error = compare("--arms", "obrs", "--seeds", "1", *TINY, *settings, cwd=tmp_path)
    assert code == 0, error
    assert "2e+08 rollout FLOPs used" in output

    lines = metric_lines(tmp_path / "runs/compare-quickstart/obrs-seed1")
    rollout_flops = [line.get("flops/rollout") or 0.0 for line in lines]
    assert sum(rollout_flops) > 2e8
    assert len(rollout_flops) < 400

    row = json.loads((tmp_path / "runs/compare-quickstart/comparison.json").read_text())["rows"][0]
    assert row["short"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("stop_signal", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_all_runs_and_the_command_continues(stop_signal: int, tmp_path: Path) -> None:
    settings = ("--arms", "obrs,on_policy", "--seeds", "1", "--jobs", "2", *TINY, "iterations=20")
    process = start_compare(*settings, cwd=tmp_path)
    runs = [tmp_path / "runs" / "compare-quickstart" / f"{arm}-seed1" for arm in ("obrs", "on_policy")]
    wait_until(lambda: all(len(metric_lines(run)) > 0 for run in runs))

    process.send_signal(stop_signal)
    output, error = process.communicate(timeout=PATIENCE)

    assert process.returncode == 130, error
    assert "the same command continues" in output
    assert "Traceback" not in error

    for folder in runs:
        checkpoint_name = (folder / "checkpoints" / "last").resolve().name
        # nothing was lost, and nobody goes on
        assert checkpoint_name == f"step-{metric_lines(folder)[-1]['iteration']}"

    code, _, error = compare(*settings, cwd=tmp_path)
    assert code == 0, error
    assert [len(metric_lines(run)) for run in runs] == [21, 21]


def test_a_run_that_fails_is_named_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    settings = ("rollout_model.path=empty", "--arms", "obrs", "--seeds", "1")

    code, _, error = compare(*settings, *TINY, cwd=tmp_path)

    assert code == 2
    assert "1 of 1 runs failed" in error
    assert "obrs, seed 1" in error
    assert "empty" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--arms", "obsr"), "did you mean 'obrs'?"),
        (("--arms", "obrs,obrs"), "obrs were given twice"),
        (("--unit", "hours"), "unit 'hours' was given; budgets are in sequences, tokens, flops"),
        (("--arms", "obrs", "--baseline", "tis"), "baseline 'tis' is not among the arms obrs"),
        (("--budget", "-1"), "it must be above 0"),
        (("--budget", "inf"), "budget inf was given; it must be above 0 and finite"),
        (("--accuracy", "70"), "it is a share"),
        (("--arms", "obrs,tool"), "'tool': task is"),
        (("--arms", "obrs", "seed=4"), "use --first-seed and --seeds"),
        (("--arms", "obrs", "--budget", "100"), "leave one out"),
    ],
)
def test_bad_questions_are_refused_before_anything_runs(
    arguments, message, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.app, ["compare", "quickstart", *arguments, *TINY])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_a_recipe_without_arms_cannot_be_compared(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("base: quickstart\n")
    with pytest.raises(ConfigError, match="has no arms"):
        resolve_arms(str(recipe), [], [1], [])


def test_runs_have_the_settings_typed_and_come_seed_by_seed(tmp_path: Path) -> None:
    configs = with_budget(resolve_arms("quickstart", ["none", "obrs"], [3, 4], ["batch.prompts=4"]), 100)
    runs = make_runs(configs, tmp_path)
    assert [(run.arm, run.seed) for run in runs] == [("none", 3), ("obrs", 3), ("none", 4), ("obrs", 4)]

    settings = ("batch.prompts=4", "seed=3", "threads=1", "iterations=3")  # 96 sequences
    assert runs[0].config == resolve("quickstart", "none", settings)
    assert runs[0].folder == tmp_path / "none-seed3"


def test_a_budget_of_less_than_one_batch_is_refused() -> None:
    configs = resolve_arms("quickstart", ["none", "obrs"], [3, 4], ["batch.prompts=4"])
    with pytest.raises(ConfigError, match="less than one rollout batch of arm 'obrs', 32"):
        with_budget(configs, 31)


def test_a_folder_with_checkpoints_and_no_config_is_refused(tmp_path: Path) -> None:
    configs = resolve_arms("quickstart", ["none", "obrs"], [3, 4], ["batch.prompts=4"])
    (tmp_path / "none-seed3" / "checkpoints" / "step-1").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"config\.yaml"):
        make_runs(configs, tmp_path)


def test_without_arms_all_that_can_be_compared_are(tmp_path: Path) -> None:
    configs = resolve_arms("quickstart", [], [1], [])
    assert list(differing_arms(configs)) == ["tool"]
    nucleus_configs = resolve_arms("quickstart", ["obrs"], [1], ["sampling.top_p=0.5"])
    assert "sampling.top_p" in differing_arms(configs | {("nucleus", 1): nucleus_configs["obrs", 1]})["nucleus"]


@pytest.mark.slow
def test_a_run_that_a_guard_stopped_has_collapsed(tmp_path: Path) -> None:
    """A learning rate that makes weights infinite: after one step that is not finite the guard stops the run."""
    recipe = tmp_path / "mine.yaml"
    arms = "{well: {}, broken: {policy: {optimizer: {learning_rate: 1.0e+30}}}}"
    recipe.write_text(f"base: quickstart\narms: {arms}\n")
    settings = ("--seeds", "1", *TINY, "iterations=4", "guard.max_non_finite_steps=1")
    command = [JACKPOT, "compare", str(recipe), *settings]

    for _ in range(2):  # the second time nothing is tried again
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
        assert result.returncode == 0, result.stderr + result.stdout
        assert "stopped itself" in result.stdout

    comparison = json.loads((tmp_path / "runs/compare-mine/comparison.json").read_text())
    well_row, broken_row = comparison["rows"]
    assert well_row["collapsed"] == []
    assert "stopped itself" in broken_row["collapsed"][0]


@pytest.mark.slow
def test_no_run_goes_on_alone_when_compare_is_killed(tmp_path: Path) -> None:
    process = start_compare("--arms", "obrs", "--seeds", "1", *TINY, "iterations=2000", cwd=tmp_path)
    run = tmp_path / "runs" / "compare-quickstart" / "obrs-seed1"
    wait_until(lambda: len(metric_lines(run)) > 2)

    process.kill()
    process.communicate(timeout=PATIENCE)

    wait_until(lambda: (run / "checkpoints" / "last").exists() and not is_held(run))
    assert (run / "checkpoints" / "last").resolve().name == f"step-{metric_lines(run)[-1]['iteration']}"
