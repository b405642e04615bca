"""Several answers to a problem, and further sets, in the evaluations of a run."""

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


def saved(folder: Path, iteration: int, of: str) -> list[dict]:
    path = folder / "eval" / f"iteration-{iteration:06d}-{of}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(finished_run: FinishedRuns) -> tuple[Path, list[dict]]:
    folder = finished_run("iterations=2", "evaluation.k=3", *SETS)
    return folder, read_lines(folder)


def test_the_metrics_are_those_of_the_saved_answers(trained) -> None:
    folder, lines = trained

    for line in (lines[0], lines[2]):
        for of, prefix, mean in (
            ("policy", "eval/policy_", "accuracy"),
            ("rollout_model", "eval/rollout_model_", "accuracy"),
            ("arithmetic", "eval/arithmetic/", "mean_at_k"),
            ("tool_arithmetic", "eval/tool_arithmetic/", "mean_at_k"),
        ):
            rows = saved(folder, line["iteration"], of)
            right = np.array([row["correct"] for row in rows]).reshape(8, 3)
            assert [(row["sample"]) for row in rows] == [0, 1, 2] * 8
            assert len({row["prompt_uid"] for row in rows}) == 8
            assert line[prefix + mean] == pytest.approx(right.mean())
            assert line[prefix + "pass_at_k"] == pytest.approx(right.any(axis=1).mean())
            assert line[prefix + "truncated"] == np.mean([row["finish"] == "length" for row in rows])
        assert line["eval/arithmetic/reward_errors"] == 0.0
    assert "eval/arithmetic/mean_at_k" not in lines[1]  # not an iteration with an evaluation


def test_the_first_of_k_answers_is_the_only_one_of_one(trained, tmp_path: Path) -> None:
    """So runs from before there were several keep their numbers; and pass@1 is the accuracy, so it is not told."""
    [line] = run(small_config("iterations=2", *SETS[1:]), tmp_path, kill_after=0)

    for role in ("policy", "rollout_model"):
        alone = saved(tmp_path, 0, role)
        first = [row for row in saved(trained[0], 0, role) if row["sample"] == 0]
        assert [row["response"] for row in alone] == [row["response"] for row in first]
        assert f"eval/{role}_pass_at_k" not in line
    assert not [name for name in line if name.startswith("eval/") and "_at_k" in name]


def test_the_problems_of_a_set_are_made_once(tmp_path: Path, monkeypatch) -> None:
    made, prompt = [], Arithmetic.prompt
    monkeypatch.setattr(Arithmetic, "prompt", lambda task, *which: (made.append(which), prompt(task, *which))[1])
    run(small_config(SHORT, "iterations=1", "batch.prompts=1", "evaluation.benchmarks=arithmetic"), tmp_path)
    assert made.count(("test", 7)) == 2  # of the task, and of the benchmark; checks before the run make problem 0


def test_the_tokens_of_every_set_count_as_evaluation(trained) -> None:
    line = trained[1][0]
    sums = sum(24 * line[f"eval/{of}tokens"] for of in ("policy_", "rollout_model_", "arithmetic/", "tool_arithmetic/"))
    assert line["tokens/evaluate"] == pytest.approx(sums)


@pytest.mark.slow
def test_a_resumed_run_evaluates_the_same(tmp_path: Path) -> None:
    config = small_config(*BRIEF, "evaluation.k=2", *SETS)
    run_and_copy(config, tmp_path / "whole", tmp_path / "killed", after=3)

    run(config, tmp_path / "killed")

    assert_same_run(tmp_path / "whole", tmp_path / "killed", ["policy", "rollout_model"])
    for path in (tmp_path / "whole" / "eval").iterdir():
        assert path.read_bytes() == (tmp_path / "killed" / "eval" / path.name).read_bytes()


def test_an_unknown_benchmark_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="unknown benchmark 'gsm8'; did you mean 'gsm8k'") as refused:
        run(small_config("evaluation.benchmarks=gsm8"), tmp_path)
    assert "tool_arithmetic" in str(refused.value)
    assert not RunFolder(tmp_path).read("metrics.jsonl")


def test_a_set_is_asked_as_the_task_is() -> None:
    task = MathConfig(train={"source": "gsm8k"}, test={"source": "gsm8k"}, template="base", system_prompt="Think.")
    asked = sets_of(task).math
    assert (asked.template, asked.system_prompt, asked.rewards) == ("base", "Think.", task.rewards)
    assert sets_of(small_config("task.max_terms=5").task).arithmetic.max_terms == 5
    assert sets_of(small_config("task=tool_arithmetic", "task.max_terms=4").task).arithmetic.max_terms == 3


def test_arms_with_another_k_are_not_compared() -> None:
    configs = {("a", 1): small_config(), ("b", 1): small_config("evaluation.k=2")}
    assert differing_arms(configs) == {"b": "evaluation.k is 2, and 1 in 'a'"}


def test_a_greedy_evaluation_does_not_depend_on_the_seed(tmp_path: Path) -> None:
    greedy = ("iterations=1", "evaluation.sampling.top_k=1", "guard.check_engine=true")

    answers = []

    for seed in (0, 1):
        config = small_config(*greedy, f"seed={seed}")
        run(config, tmp_path / str(seed), kill_after=0)
        answers.append([row["response"] for row in saved(tmp_path / str(seed), 0, "policy")])
        assert config.evaluation_sampling.described == "greedy"
    assert answers[0] == answers[1]


def test_a_benchmark_may_have_its_own_number_of_answers(tmp_path: Path) -> None:
    sets = "evaluation.benchmarks=[arithmetic, {name: tool_arithmetic, k: 2}]"
    run(small_config("iterations=1", sets), tmp_path, kill_after=0)
    assert {row["sample"] for row in saved(tmp_path, 0, "arithmetic")} == {0}
    assert {row["sample"] for row in saved(tmp_path, 0, "tool_arithmetic")} == {0, 1}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ((), "sampled"),
        (("evaluation.sampling={temperature: 0.6, top_p: 0.95}",), "sampled at temperature 0.6, top-p 0.95"),
        (("sampling.temperature=0.8", "evaluation.sampling.temperature=1.0"), "sampled"),
        (("evaluation.sampling.top_k=1",), "greedy"),
    ],
)
def test_an_evaluation_says_how_it_sampled(settings, words) -> None:
    assert small_config(*settings).evaluation_sampling.described == words


def test_arms_that_are_evaluated_otherwise_are_named() -> None:
    configs = {("a", 0): small_config(), ("b", 0): small_config("evaluation.sampling.top_k=1")}
    assert differing_arms(configs) == {"b": "sampling.top_k is 1, and 0 in 'a'"}
