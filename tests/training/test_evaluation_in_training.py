"""Evaluations of a run may ask several answers to a problem and further sets, and report what was answered."""

import json
from pathlib import Path

import numpy as np
import pytest

from helpers.runs import BRIEF, SHORT, FinishedRuns, assert_same_run, read_lines, run, run_and_copy, small_config
from jackpot.analysis.compare.arms import differing_arms
from jackpot.config.tasks import MathConfig
from jackpot.config.tools import sets_of
from jackpot.core.errors import DataError
from jackpot.rollout.tasks.arithmetic import Arithmetic
from jackpot.training.run_folder.folder import RunFolder

SETS = ("evaluation.benchmarks=[arithmetic, tool_arithmetic]", "task.max_operand=30")


def saved_rows(folder: Path, iteration: int, writer: str) -> list[dict]:
    """Return the answers that an evaluation saved, by the name of a model or a set."""
    path = folder / "eval" / f"iteration-{iteration:06d}-{writer}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(finished_run: FinishedRuns) -> tuple[Path, list[dict]]:
    """A run with three answers to each problem of the task and of two sets, and its lines of metrics."""
    folder = finished_run("iterations=2", "evaluation.k=3", *SETS)
    return folder, read_lines(folder)


def test_the_metrics_are_those_of_the_saved_answers(trained) -> None:
    folder, lines = trained

    for line in (lines[0], lines[2]):
        for writer, prefix, mean_name in (
            ("policy", "eval/policy_", "accuracy"),
            ("rollout_model", "eval/rollout_model_", "accuracy"),
            ("arithmetic", "eval/arithmetic/", "mean_at_k"),
            ("tool_arithmetic", "eval/tool_arithmetic/", "mean_at_k"),
        ):
            rows = saved_rows(folder, line["iteration"], writer)
            is_correct = np.array([row["correct"] for row in rows]).reshape(8, 3)
            assert [row["sample"] for row in rows] == [0, 1, 2] * 8
            assert len({row["prompt_uid"] for row in rows}) == 8

            assert line[prefix + mean_name] == pytest.approx(is_correct.mean())
            assert line[prefix + "pass_at_k"] == pytest.approx(is_correct.any(axis=1).mean())
            assert line[prefix + "truncated"] == np.mean([row["finish"] == "length" for row in rows])

        assert line["eval/arithmetic/reward_errors"] == 0.0

    assert "eval/arithmetic/mean_at_k" not in lines[1]  # not an iteration with an evaluation


def test_the_first_of_k_answers_is_the_answer_of_a_run_with_one(trained, tmp_path: Path) -> None:
    """So runs from before there were several keep their numbers; and pass@1 is the accuracy, so it is not told."""
    [line] = run(small_config("iterations=2", *SETS[1:]), tmp_path, kill_after=0)

    for role in ("policy", "rollout_model"):
        single_rows = saved_rows(tmp_path, 0, role)
        first_rows = [row for row in saved_rows(trained[0], 0, role) if row["sample"] == 0]
        assert [row["response"] for row in single_rows] == [row["response"] for row in first_rows]
        assert f"eval/{role}_pass_at_k" not in line
    assert not [name for name in line if name.startswith("eval/") and "_at_k" in name]


def test_the_problems_of_a_set_are_made_once(tmp_path: Path, monkeypatch) -> None:
    made_prompts, prompt = [], Arithmetic.prompt

    def note_prompt(task, *which):
        made_prompts.append(which)
        return prompt(task, *which)

    monkeypatch.setattr(Arithmetic, "prompt", note_prompt)

    run(small_config(SHORT, "iterations=1", "batch.prompts=1", "evaluation.benchmarks=arithmetic"), tmp_path)

    assert (
        made_prompts.count(("test", 7)) == 2
    )  # of the task, and of the benchmark; checks before the run make problem 0


def test_the_tokens_of_every_set_count_as_evaluation(trained) -> None:
    line = trained[1][0]
    prefixes = ("policy_", "rollout_model_", "arithmetic/", "tool_arithmetic/")
    token_sum = sum(24 * line[f"eval/{prefix}tokens"] for prefix in prefixes)  # three answers to each of 8 problems
    assert line["tokens/evaluate"] == pytest.approx(token_sum)


@pytest.mark.slow
def test_a_resumed_run_evaluates_the_same(tmp_path: Path) -> None:
    config = small_config(*BRIEF, "evaluation.k=2", *SETS)
    run_and_copy(config, tmp_path / "whole", tmp_path / "killed", after=3)

    run(config, tmp_path / "killed")

    assert_same_run(tmp_path / "whole", tmp_path / "killed", ["policy", "rollout_model"])
    for path in (tmp_path / "whole" / "eval").iterdir():
        assert path.read_bytes() == (tmp_path / "killed" / "eval" / path.name).read_bytes()


def test_an_unknown_benchmark_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="unknown benchmark 'gsm8'; did you mean 'gsm8k'") as error:
        run(small_config("evaluation.benchmarks=gsm8"), tmp_path)
    assert "tool_arithmetic" in str(error.value)
    assert not RunFolder(tmp_path).read("metrics.jsonl")


def test_a_set_is_asked_as_the_task_is() -> None:
    task = MathConfig(train={"source": "gsm8k"}, test={"source": "gsm8k"}, template="base", system_prompt="Think.")
    math_set = sets_of(task).math

    assert math_set.template == "base"
    assert math_set.system_prompt == "Think."
    assert math_set.rewards == task.rewards
    assert sets_of(small_config("task.max_terms=5").task).arithmetic.max_terms == 5
    assert sets_of(small_config("task=tool_arithmetic", "task.max_terms=4").task).arithmetic.max_terms == 3


def test_arms_with_another_k_are_not_compared() -> None:
    configs = {("a", 1): small_config(), ("b", 1): small_config("evaluation.k=2")}
    assert differing_arms(configs) == {"b": "evaluation.k is 2, and 1 in 'a'"}


def test_a_greedy_evaluation_does_not_depend_on_the_seed(tmp_path: Path) -> None:
    greedy_settings = ("iterations=1", "evaluation.sampling.top_k=1", "guard.check_engine=true")
    answers = []

    for seed in (0, 1):
        config = small_config(*greedy_settings, f"seed={seed}")
        assert config.evaluation_sampling.described == "greedy"
        run(config, tmp_path / str(seed), kill_after=0)
        answers.append([row["response"] for row in saved_rows(tmp_path / str(seed), 0, "policy")])

    assert answers[0] == answers[1]


def test_a_benchmark_may_have_its_own_number_of_answers(tmp_path: Path) -> None:
    sets = "evaluation.benchmarks=[arithmetic, {name: tool_arithmetic, k: 2}]"

    run(small_config("iterations=1", sets), tmp_path, kill_after=0)

    assert {row["sample"] for row in saved_rows(tmp_path, 0, "arithmetic")} == {0}
    assert {row["sample"] for row in saved_rows(tmp_path, 0, "tool_arithmetic")} == {0, 1}


@pytest.mark.parametrize(
    ("overrides", "description"),
    [
        ((), "sampled"),
        (("evaluation.sampling={temperature: 0.6, top_p: 0.95}",), "sampled at temperature 0.6, top-p 0.95"),
        (("sampling.temperature=0.8", "evaluation.sampling.temperature=1.0"), "sampled"),
        (("evaluation.sampling.top_k=1",), "greedy"),
    ],
)
def test_an_evaluation_says_how_it_sampled(overrides, description) -> None:
    assert small_config(*overrides).evaluation_sampling.described == description


def test_arms_that_are_evaluated_otherwise_are_named() -> None:
    configs = {("a", 0): small_config(), ("b", 0): small_config("evaluation.sampling.top_k=1")}
    assert differing_arms(configs) == {"b": "sampling.top_k is 1, and 0 in 'a'"}
