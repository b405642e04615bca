"""Causes that several metrics, settings or saved rollouts show together; real runs that are sick on purpose."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from helpers.metric_lines import evaluated, history
from helpers.runs import FinishedRuns, small_config
from jackpot.analysis.diagnose.diagnose import diagnose
from jackpot.analysis.diagnose.saved import read_saved
from jackpot.config.config import Config
from jackpot.training.run_folder.folder import run_config
from research.doctor import __main__ as doctor
from research.doctor.cases import CASES


@pytest.fixture(scope="module")
def config() -> Config:
    """Settings of a run with 512 problems and two steps an iteration."""
    return small_config("evaluation.problems=512", "batch.mini_batch_size=8")


def test_sparse_rewards_are_no_finding_in_a_run_that_learns(config: Config) -> None:
    sparse = {"reward/all_wrong": 0.95}

    assert diagnose(history(sparse, since=1), [], config).verdict == "no finding"

    flat = [
        line | ({"eval/policy_accuracy": 0.4} if "eval/policy_accuracy" in line else {}) for line in history(sparse, 1)
    ]
    assert [finding.metric for finding in diagnose(flat, [], config).findings] == ["eval/policy_accuracy"]

    rare = [line | ({"reward/all_wrong": 0.995} if line["iteration"] else {}) for line in flat]
    assert diagnose(rare, [], config).findings[0].metric == "reward/all_wrong"


def test_a_run_that_learned_nothing_says_why() -> None:
    lines = evaluated(*4 * [0.4], error=0.05)  # too few problems to see it, but the settings say it
    still, alone = "policy.optimizer.learning_rate=1e-9", ("batch.group_size=1", "objective.advantage=reinforce_pp")
    assert diagnose(lines, [], small_config()).verdict == "no finding"
    assert "The learning rate is too low: 30 steps of 1e-09" in diagnose(lines, [], small_config(still)).summary
    assert "Each group is one response" in diagnose(lines, [], small_config(*alone, "batch.prompts=8")).summary


def test_what_falls_at_once_fell_from_the_start(config: Config) -> None:
    """A learning rate that is far too high takes the rewards of the third iteration, within the first window."""
    lines = [line | ({"reward/mean": 0.3 if line["iteration"] < 3 else 0.01}) for line in history()[:21]]
    [finding] = diagnose(lines, [], config).findings
    assert finding.metric == "reward/mean" and "the learning rate is too high" in finding.explanation


def test_engines_that_keep_old_weights_began_right(config: Config) -> None:
    for since, phrase in ((10, "goes on with old weights"), (1, "give the same tokens")):
        [finding] = diagnose(history({"mismatch/engine_gap": 0.1}, since=since), [], config).findings
        assert phrase in finding.explanation


def test_responses_cut_from_the_start_are_a_cause(config: Config) -> None:
    """But not where cut ones earn, nor where the policy becomes better: it learns from the others, as SmolLM2 does."""
    cut = {"response/truncated": 1.0, "eval/policy_accuracy": 0.43}
    [finding] = diagnose(history(cut, since=1), [], config).findings

    assert finding.group == "data"

    for harmless in ({"saved/cut_earn": 0.5}, {"eval/policy_accuracy": 0.7}):
        assert diagnose(history(cut | harmless, since=1), [], config).findings == ()

    [grown] = diagnose(history({"response/truncated": 0.5}), [], config).findings  # it was right at the start
    assert grown.group == "length"


def test_longer_responses_are_a_cause_if_the_reward_pays(config: Config) -> None:
    longer = {"response/tokens": 15.0, "saved/length_reward": 0.9, "eval/policy_accuracy": 0.43}
    [finding] = diagnose(history(longer), [], config).findings
    assert finding.metric == "response/tokens" and "pays for length" in finding.explanation
    assert diagnose(history(longer | {"saved/length_reward": 0.1}), [], config).findings == ()
    assert diagnose(history({"response/tokens": 15.0, "saved/length_reward": 0.9}), [], config).findings == ()


def test_models_are_swapped_where_the_dearer_one_is_better(config: Config) -> None:
    flops = {"flops/rollout": 1.0, "flops/train": 4.0}
    lines = [line | flops for line in history()]
    lines[0] |= {"eval/policy_accuracy_stderr": 0.02, "eval/rollout_model_accuracy_stderr": 0.02}
    lines[0] |= {"eval/rollout_model_accuracy": 0.5}
    for line in lines[1:]:
        line |= {"eval/rollout_model_accuracy": 0.5} if "eval/policy_accuracy" in line else {}

    [finding] = diagnose(lines, [], config).findings

    assert "swapped" in finding.explanation
    assert diagnose([line | {"flops/train": 7.0} for line in lines], [], config).findings == ()


def test_a_clip_that_never_acts_while_the_policy_moves_is_found(config: Config) -> None:
    far = {"policy/approx_kl_k3": 0.01, "policy/clip_frac": 0.0}
    assert [finding.metric for finding in diagnose(history(far), [], config).findings] == ["policy/clip_frac"]
    assert diagnose(history(far | {"policy/clip_frac": 0.01}), [], config).findings == ()
    assert diagnose(history(far), [], small_config("objective.clip_low=null")).findings == ()


def test_a_mismatch_without_a_correction_is_a_cause() -> None:
    drifts = history({"mismatch/kl_rollout_policy": 0.9})
    [finding] = diagnose(drifts, [], small_config("objective.correction=none")).findings
    assert finding.group == "data" and finding.suggestion.startswith("set objective.correction=tis")


def test_a_phase_that_takes_far_longer_once_is_a_finding(config: Config) -> None:
    """3 s an iteration: more than 9 s and 6 times its median."""
    for seconds, times in ((13.0, 6.5), (10.0, None), (11.5, None)):
        lines = history()
        lines[40] |= {"seconds/rollout": seconds}
        findings = diagnose(lines, [], config).findings
        assert [(finding.metric, finding.since, finding.now) for finding in findings] == (
            [("seconds/slowest", 40, pytest.approx(times, rel=0.05))] if times else []
        )

    lines[40] |= {"seconds/rollout": 60.0}
    assert diagnose(lines, [{"event": "engine_check", "iteration": 40}], config).findings == ()  # a start warms up


def rewritten(source: Path, folder: Path, change: Callable[[dict[str, list]], dict[str, list]]) -> list[dict[str, Any]]:
    """What is read from a copy of a run whose first saved rollouts have other columns."""
    shutil.copytree(source, folder)
    path = folder / "rollouts" / "iteration-000001.parquet"
    table = pq.read_table(path)
    columns = table.to_pydict()
    columns |= change(columns)
    pq.write_table(pa.table(columns, schema=table.schema), path)
    return read_saved(folder, run_config(folder))


def test_saved_rollouts_of_a_sound_run_show_nothing(finished_run: FinishedRuns) -> None:
    folder = finished_run()
    first, *others = read_saved(folder, run_config(folder))
    assert first["iteration"] == 1 and others
    zero = ("saved/end_inside", "saved/ended_by_stop_ids", "saved/ambiguous_prompts", "saved/held_out")
    assert [first[name] for name in zero] == [0.0] * 4 and first["saved/commonest"] < 0.7


LIES = {  # what makes a metric of saved rollouts bad: their other columns
    "saved/ambiguous_prompts": lambda now: {"prompt_ids": [[5, 6] for _ in now["prompt_ids"]]},
    "saved/repeated_prompts": lambda now: {"prompt_ids": [[5, 6] for _ in now["prompt_ids"]]},
    "saved/commonest": lambda now: {"response": ["7" for _ in now["response"]]},
    "saved/end_inside": lambda now: {"tokens": [["<end>", *row] for row in now["tokens"]]},
    "saved/right_earn": lambda now: {"reward": [1.0 - reward for reward in now["reward"]]},
    "saved/length_reward": lambda now: {"reward": [float(len(row)) for row in now["token_ids"]]},
}
SHOWN = {"saved/repeated_prompts": 0.75, "saved/right_earn": -1.0}  # what a metric then is, where not 1


@pytest.mark.parametrize("name", LIES)
def test_saved_rollouts_show_what_is_wrong(name: str, finished_run: FinishedRuns, tmp_path: Path) -> None:
    first, *_ = rewritten(finished_run(), tmp_path / "run", LIES[name])
    assert first[name] == pytest.approx(SHOWN.get(name, 1.0), abs=0.01)


def test_held_out_problems_that_are_trained_on_are_seen(finished_run: FinishedRuns, tmp_path: Path) -> None:
    def leak(now: dict[str, list]) -> dict[str, list]:
        rows = [json.loads(line) for line in (finished_run() / "eval" / "iteration-000004-policy.jsonl").open()]
        chosen = [rows[index % len(rows)] for index in range(len(now["prompt"]))]
        return {"prompt": [row["prompt"] for row in chosen], "answer": [row["answer"] for row in chosen]}

    first, *_ = rewritten(finished_run(), tmp_path / "run", leak)
    assert first["saved/held_out"] == 1.0


def test_an_engine_that_does_not_come_back_is_dead(config: Config) -> None:
    lost, back = ({"event": f"peer_{state}", "iteration": 98} for state in ("lost", "back"))
    assert diagnose(history(), [lost, back], config).findings == ()
    assert diagnose(history(), 3 * [lost, back], config).findings[0].metric == "events/peer_lost"
    [finding] = diagnose(history(), [lost], config).findings
    assert "an engine is dead" in finding.explanation


def test_models_that_nothing_holds_together_drift(config: Config) -> None:
    drifts = history({"mismatch/kl_rollout_policy": 0.9})
    [finding] = diagnose(drifts, [], small_config("rollout_model.distill_weight=0")).findings
    assert finding.group == "data" and finding.suggestion.startswith("raise rollout_model.distill_weight")


def test_an_entropy_that_the_reward_takes_is_a_cause(config: Config) -> None:
    hacked = {"policy/entropy": 0.01, "reward/mean": 0.6, "eval/policy_accuracy": 0.2}
    first, *_ = diagnose(history(hacked), [], config).findings
    assert (first.group, first.metric) == ("data", "policy/entropy")


def test_rewards_that_rise_while_answers_get_worse_pay_otherwise(config: Config) -> None:
    hacked = {"reward/mean": 0.6, "eval/policy_accuracy": 0.2}
    [finding] = diagnose(history(hacked), [], config).findings
    assert finding.metric == "eval/policy_accuracy" and "pays for something else" in finding.explanation


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["learning rate x20", "reward of the wrong sign", "template cut", "stale weights", "wrong stop tokens", "lam 2"],
)
def test_real_runs_are_diagnosed_right(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    doctor.in_a_process(case, 3, tmp_path / "case", ["iterations=20", "evaluation.every=10"])
    diagnosis = doctor.judge(tmp_path / "case" / "run")
    assert doctor.is_right(case, diagnosis), diagnosis.summary
