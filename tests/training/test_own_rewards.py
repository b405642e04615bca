"""A run whose rewards are a function of the user: what stands where other runs have accuracies."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner

from helpers.pages import page_data
from helpers.paths import ROOT
from helpers.runs import FinishedRuns, read_lines, run, small_config
from jackpot.analysis.compare.comparison import compare
from jackpot.analysis.compare.summary import summarize
from jackpot.analysis.diagnose.limits import MetricHistory
from jackpot.core.errors import ConfigError, TrainingError
from jackpot.core.types import Score
from jackpot.rollout.evaluate import Evaluation
from jackpot.training.run_folder.folder import RunFolder
from jackpot.training.run_folder.saved_rollouts import list_rollout_files, read_columns
from jackpot.ui import cli
from jackpot.ui.commands import train
from jackpot.ui.report.report import write_report
from jackpot.ui.views.comparison import comparison_sections

DATA = f"{{source: {ROOT}/examples/own_data.jsonl, limit: 64, columns: {{problem: question, answer: total}}}}"
TASK = f"name: math, train: {DATA}, test: {DATA}, template: plain, instruction: ''"
REWARDS = "rewards: ['helpers.reward_functions:minus_length']"
WITHOUT_VERDICT = (f"task={{{TASK}, {REWARDS}}}", "iterations=2", "evaluation.every=1")
WITH_VERDICT = (f"task={{{TASK}, {REWARDS}, verdict: -9}}", "iterations=1", "evaluation.every=1")


@pytest.fixture
def own_rewards_run(finished_run: FinishedRuns) -> Path:
    """A run whose rewards have no verdict: nothing is right or wrong."""
    return finished_run(*WITHOUT_VERDICT)


def result_table(folder: Path, *overrides: str) -> str:
    """What a run shows at its end."""
    console = Console(file=io.StringIO(), width=200)
    train._show_result(console, small_config(*overrides), read_lines(folder), folder, is_finished=True)
    return console.file.getvalue()


def test_without_a_verdict_mean_rewards_replace_accuracies(own_rewards_run: Path) -> None:
    lines = read_lines(own_rewards_run)
    assert all(line["eval/policy_reward"] < -1.0 for line in lines)
    assert all(line["eval/policy_reward_stderr"] > 0.0 for line in lines)
    assert not [name for line in lines for name in line if "accuracy" in name or "pass_at_k" in name]
    assert all(lines[2][name] is None for name in ("reward/correct", "reward/all_right", "reward/all_wrong"))

    first_reward, last_reward = (line["eval/rollout_model_reward"] for line in (lines[0], lines[-1]))
    table = result_table(own_rewards_run, *WITHOUT_VERDICT)

    assert "Mean reward on 8 held-out problems, sampled" in table
    assert f"{first_reward:#.4g} ±" in table
    assert f"{last_reward:#.4g} ±" in table
    assert f"{last_reward - first_reward:+#.4g} ±" in table


def test_fewer_problems_than_asked_are_counted_as_they_are(finished_run: FinishedRuns) -> None:
    task_of_five = TASK.replace(f"test: {DATA}", f"test: {DATA.replace('64', '5')}")
    settings = (f"task={{{task_of_five}, {REWARDS}, verdict: -9}}", "iterations=1")
    folder = finished_run(*settings)

    assert [line["eval/problems"] for line in read_lines(folder) if "eval/policy_accuracy" in line] == [5.0, 5.0]
    assert "Accuracy on 5 held-out problems, sampled" in result_table(folder, *settings)
    assert summarize(folder, "a").problems == 5

    history = MetricHistory(read_lines(folder), [], small_config(*settings))
    assert history.config.evaluation.problems == 8
    assert history.problems == 5


def test_a_set_without_a_verdict_has_rewards() -> None:
    rollouts = tuple(SimpleNamespace(token_ids=[0], finish="stop") for _ in range(4))
    scores = tuple(Score(reward=reward) for reward in (1.0, 0.0, -3.0, 0.0))
    evaluation = Evaluation(k=2, rollouts=rollouts, responses=("",) * 4, scores=scores)  # of two problems

    set_metrics = evaluation.set_metrics()

    assert (set_metrics["reward"], set_metrics["reward_stderr"]) == (-0.5, 1.0)  # of the means 0.5 and -1.5
    assert "mean_at_k" not in set_metrics

    line = {"eval/policy_accuracy": 0.5, "eval/rollout_model_accuracy": 0.25, "iteration": 0}
    line |= {f"eval/mine/{name}": value for name, value in set_metrics.items()}
    console = Console(file=io.StringIO(), width=200)
    train._show_result(console, small_config("evaluation.benchmarks=[mine.jsonl]"), [line], Path(), is_finished=True)

    assert "policy on mine, mean reward" in console.file.getvalue()
    assert "-0.5000 ± 1.0" in console.file.getvalue()


def test_the_best_checkpoint_has_the_highest_mean_reward(own_rewards_run: Path) -> None:
    lines = [line for line in read_lines(own_rewards_run) if line["iteration"]]
    best_iteration = max(lines, key=lambda line: (line["eval/policy_reward"], -line["iteration"]))["iteration"]
    assert (own_rewards_run / "checkpoints" / "best").readlink().name == f"step-{best_iteration}"


def test_sample_and_report_show_rewards_and_no_verdict(own_rewards_run: Path, tmp_path: Path) -> None:
    invocation = CliRunner().invoke(cli.app, ["sample", str(own_rewards_run), "--problems", "1"])
    assert invocation.exit_code == 0
    assert invocation.output.count("reward -") == 4
    assert "wrong" not in invocation.output

    write_report([own_rewards_run], tmp_path / "report.html")
    assert '"note":"Mean reward on held-out problems' in page_data(tmp_path / "report.html")

    columns = read_columns(list_rollout_files(own_rewards_run)[0][0], ["correct", "reward"])
    assert len(columns) > 0
    assert columns["correct"].null_count == len(columns)
    assert columns["reward"].null_count == 0


def test_eval_measures_held_out_problems_by_mean_reward(own_rewards_run: Path, tmp_path: Path) -> None:
    command = ["eval", str(own_rewards_run), "--benchmarks", "own", "--out", str(tmp_path), "problems=4"]
    invocation = CliRunner().invoke(cli.app, command, env={"COLUMNS": "200"})

    assert invocation.exit_code == 0, invocation.output

    [benchmark] = json.loads((tmp_path / "summary.json").read_text())["benchmarks"].values()
    assert benchmark["mean_at_k"] is None
    assert benchmark["pass_at_k"] == {}
    assert benchmark["reward"] < -1.0
    assert "mean reward" in invocation.output
    assert f"{benchmark['reward']:.4g}" in invocation.output


def test_compare_takes_rewards_but_not_beside_accuracies(own_rewards_run: Path, finished_run: FinishedRuns) -> None:
    summary = summarize(own_rewards_run, "own")
    assert summary.measure == "reward"
    assert summary.last.policy_accuracy == read_lines(own_rewards_run)[-1]["eval/policy_reward"]

    comparison = compare([summary])
    title = comparison_sections(comparison, [summary])["numbers"].items[0].title

    assert comparison.measure == "reward"
    assert title.startswith("Mean reward of responses (sampled) at")

    with pytest.raises(ConfigError, match=r"one task\.verdict for all"):
        compare([summary, summarize(finished_run(), "other")])


def test_a_reward_function_that_always_raises_ends_the_run(tmp_path: Path) -> None:
    """The same command begins again, once the function is mended."""
    task = WITHOUT_VERDICT[0].replace("minus_length", "raises")
    reason = r"helpers\.reward_functions:raises: RuntimeError: no judge answers \(.*line"
    with pytest.raises(TrainingError, match=reason):
        run(small_config(task, *WITHOUT_VERDICT[1:]), tmp_path)

    assert [line["iteration"] for line in read_lines(tmp_path)] == [0]

    failures = [event for event in RunFolder(tmp_path).read("events.jsonl") if event["event"] == "reward_crash"]
    assert len(failures) == 16  # of one rollout batch
    assert all("RuntimeError: no judge answers" in event["why"] for event in failures)

    RunFolder(tmp_path).check(small_config(*WITHOUT_VERDICT))


def test_accuracies_count_what_reaches_the_threshold(own_rewards_run: Path, finished_run: FinishedRuns) -> None:
    folder = finished_run(*WITH_VERDICT)
    lines = read_lines(folder)
    lines_without_verdict = read_lines(own_rewards_run)[:2]  # as many as the run with one has

    rewards_without_verdict = [line["eval/policy_reward"] for line in lines_without_verdict]
    assert [line["eval/policy_reward"] for line in lines] == rewards_without_verdict
    assert all(0.0 < line["eval/policy_accuracy"] < 1.0 for line in lines)
    assert 0.0 < lines[1]["reward/correct"] < 1.0
    assert "Accuracy on 8 held-out problems, sampled" in result_table(folder, *WITH_VERDICT)
