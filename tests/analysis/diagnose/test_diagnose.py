"""Rules that fire where they should and only there; what `jackpot diagnose` prints."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from helpers.runs import FinishedRuns, run, small_config
from jackpot.analysis.diagnose.diagnose import diagnose
from jackpot.analysis.diagnose.rules import RULES
from jackpot.config import base as config_base
from jackpot.config.batch import FilterGroupsConfig
from jackpot.config.run import Config, Sampling
from jackpot.core.errors import CheckpointError
from jackpot.ui import cli

ITERATIONS, BROKEN_FROM = 100, 60
GROUPS = ["bug", "precision", "signal", "mismatch", "correction", "models", "length", "disk"]
HEALTHY = {
    "checkpoint/failed": 0,
    "correction/accepted": 0.92,
    "correction/clip_frac": 0.001,
    "correction/clip_frac_c2": 0.0,
    "correction/ess": 0.91,
    "critic/explained_variance": 0.4,
    "critic/skipped_steps": 0.0,
    "files/failed": 0,
    "health/non_finite_steps": 0,
    "health/non_finite_tokens": 0,
    "mismatch/engine_gap": 1e-7,
    "mismatch/ess": 0.85,
    "mismatch/kept_mass": 1.0,
    "mismatch/kl_k1": 0.1,
    "mismatch/kl_policy_rollout": 0.09,
    "mismatch/kl_rollout_policy": 0.11,
    "mismatch/prefix_ess_at_0": 1.0,
    "mismatch/prefix_ess_at_1-3": 0.6,
    "mismatch/prefix_ess_at_4-15": 0.5,
    "mismatch/ratio": 0.99,
    "mismatch/ratio_max": 9.0,
    "mismatch/ratio_p1": 0.05,
    "mismatch/ratio_stderr": 0.005,
    "obrs/acceptance": 0.93,
    "obrs/acceptance_minus_z": 0.002,
    "obrs/acceptance_minus_z_stderr": 0.004,
    "obrs/kappa": 1.0,
    "obrs/kappa_z_above_1": 0.2,
    "obrs/z_bound_width": 4e-5,
    "policy/clip_frac": 0.0,
    "policy/entropy": 0.3,
    "policy/grad_norm": 0.4,
    "policy/skipped_steps": 0.0,
    "response/aborted": 0.0,
    "response/non_finite": 0.0,
    "response/tokens": 9.0,
    "response/truncated": 0.01,
    "reward/all_right": 0.1,
    "reward/all_wrong": 0.2,
    "reward/errors": 0.0,
    "reward/frac_zero_std": 0.3,
    "reward/timeouts": 0.0,
    "rollout_model/clip_frac": 0.0,
    "rollout_model/distill_grad_norm": 0.7,
    "rollout_model/entropy": 0.4,
    "rollout_model/grad_cosine": 0.5,
    "rollout_model/grad_norm": 0.9,
    "rollout_model/ppo_grad_norm": 0.5,
    "rollout_model/skipped_steps": 0.0,
    "rollout_model/weight": 1.0,
    "sampling/gen_batches": 2.0,
}
EVALUATED = {
    "eval/policy_accuracy": 0.4,
    "eval/policy_engine_gap": 1e-7,
    "eval/policy_reward": -0.4,
    "eval/policy_reward_stderr": 0.01,
    "eval/rollout_model_accuracy": 0.25,
    "eval/rollout_model_engine_gap": 1e-7,
}
BROKEN = {  # what makes a rule fire, by its name
    "mismatch/engine_gap": {"mismatch/engine_gap": 2e-3},
    "eval/rollout_model_engine_gap": {"eval/rollout_model_engine_gap": 2e-3},
    "eval/policy_engine_gap": {"eval/policy_engine_gap": 2e-3},
    "obrs/acceptance_error": {"obrs/acceptance_minus_z": -0.04},
    "mismatch/ratio": {"mismatch/ratio": 0.85},
    "mismatch/kl_k1": {"mismatch/kl_k1": -0.05},
    "rollout_model/weight": {"rollout_model/weight": 1.2},
    "health/non_finite_tokens": {"health/non_finite_tokens": 1},
    "response/non_finite": {"response/non_finite": 0.01},
    "health/non_finite_steps": {"health/non_finite_steps": 1},
    "response/aborted": {"response/aborted": 0.01},
    "checkpoint/failed": {"checkpoint/failed": 1},
    "reward/timeouts": {"reward/timeouts": 0.02},
    "reward/errors": {"reward/errors": 0.02},
    "reward/all_wrong": {"reward/all_wrong": 0.95},
    "reward/all_right": {"reward/all_right": 0.95},
    "reward/frac_zero_std": {"reward/frac_zero_std": 0.95},
    "sampling/gen_batches": {"sampling/gen_batches": 10.0},
    "policy/skipped_steps": {"policy/skipped_steps": 1.0},
    "rollout_model/skipped_steps": {"rollout_model/skipped_steps": 1.0},
    "critic/skipped_steps": {"critic/skipped_steps": 1.0},
    "mismatch/kl_rollout_policy": {"mismatch/kl_rollout_policy": 0.26},
    "mismatch/kl_policy_rollout": {"mismatch/kl_policy_rollout": 0.26},
    "obrs/acceptance": {"obrs/acceptance": 0.45},
    "mismatch/prefix_ess": {"mismatch/prefix_ess_at_4-15": 0.04},
    "mismatch/kept_mass": {"mismatch/kept_mass": 0.97},
    "mismatch/ratio_p1": {"mismatch/ratio_p1": 0.0008},
    "mismatch/ratio_max": {"mismatch/ratio_max": 1500.0},
    "mismatch/ess": {"mismatch/ess": 0.05},
    "correction/accepted": {"correction/accepted": 0.01},
    "correction/clip_frac": {"correction/clip_frac": 0.15},
    "correction/clip_frac_c2": {"correction/clip_frac_c2": 0.15},
    "obrs/kappa": {"obrs/kappa": 1.3},
    "obrs/kappa_z_above_1": {"obrs/kappa_z_above_1": 0.9},
    "obrs/z_bound_width": {"obrs/z_bound_width": 0.2},
    "correction/ess / mismatch/ess": {"correction/ess": 0.4},
    "policy/clip_frac": {"policy/clip_frac": 0.35},
    "rollout_model/clip_frac": {"rollout_model/clip_frac": 0.35},
    "policy/entropy": {"policy/entropy": 0.01},
    "rollout_model/entropy": {"rollout_model/entropy": 0.01},
    "policy/grad_norm": {"policy/grad_norm": 6.0},
    "rollout_model/grad_norm": {"rollout_model/grad_norm": 10.0},
    "eval/policy_accuracy": {"eval/policy_accuracy": 0.3},
    "eval/policy_reward": {"eval/policy_reward": -0.43},
    "eval/rollout_model_accuracy": {"eval/rollout_model_accuracy": 0.32, "eval/policy_accuracy": 0.3},
    "rollout_model/ppo_grad_norm / rollout_model/distill_grad_norm": {"rollout_model/ppo_grad_norm": 0.05},
    "rollout_model/grad_cosine": {"rollout_model/grad_cosine": -0.95},
    "critic/explained_variance": {"critic/explained_variance": -0.1},
    "response/truncated": {"response/truncated": 0.4},
    "files/failed": {"files/failed": 1},
}
UNFILTERED = {"obrs/acceptance_error"}  # rules of runs whose groups are not chosen by their rewards
ALSO = {"eval/rollout_model_accuracy": {"eval/policy_accuracy"}}  # rules that fire with another


@pytest.fixture(scope="module")
def config() -> Config:
    plain = small_config("evaluation.problems=512", "batch.mini_batch_size=8")
    return plain.model_copy(
        update={"batch": plain.batch.model_copy(update={"filter_groups": FilterGroupsConfig(max_num_gen_batches=10)})}
    )


def history(
    changes: dict[str, float] | None = None, since: int = BROKEN_FROM, until: int = 10**6
) -> list[dict[str, Any]]:
    """A healthy run with small waves and one wild iteration; `changes` hold from `since` to `until`."""
    lines: list[dict[str, Any]] = [{"iteration": 0, "time": 0.0} | EVALUATED]
    for iteration in range(1, ITERATIONS + 1):
        wave = 1.0 + 0.02 * math.sin(iteration)
        line = {name: value * wave if isinstance(value, float) else value for name, value in HEALTHY.items()}
        line |= EVALUATED if iteration % 10 == 0 else {}
        if iteration == 30:
            line |= {"mismatch/ratio_max": 1e5, "mismatch/ess": 0.01, "mismatch/kl_rollout_policy": 3.0}
        if since <= iteration <= until:
            line |= {k: v for k, v in (changes or {}).items() if not k.startswith("eval/") or iteration % 10 == 0}
        if iteration > 1:  # totals over the run stay what they were
            line |= {name: max(line[name], lines[-1][name]) for name in ("checkpoint/failed", "files/failed")}
        lines.append({"iteration": iteration, "time": float(iteration)} | line)
    for name in ("checkpoint/failed", "files/failed"):  # every iteration fails anew
        if name in (changes or {}):
            for line in lines[since : min(until, ITERATIONS) + 1]:
                line[name] = line["iteration"] - since + 1
    return lines


def test_a_healthy_run_with_a_wild_iteration_is_healthy(config: Config) -> None:
    found = diagnose(history(), [{"event": "skipped_step", "iteration": 3}], config)
    assert (found.verdict, found.findings, found.iteration) == ("healthy", (), ITERATIONS)


def test_a_wild_newest_iteration_is_no_alarm(config: Config) -> None:
    lines = history()[:31]
    assert lines[-1]["mismatch/kl_rollout_policy"] == 3.0
    assert diagnose(lines, [], config).verdict == "healthy"


@pytest.mark.parametrize("name", [rule.name for rule in RULES if not rule.metric.startswith("events/")])
def test_a_rule_fires_where_it_is_broken_and_nowhere_else(name: str, config: Config) -> None:
    if name in UNFILTERED:
        config = config.model_copy(update={"batch": small_config("batch.mini_batch_size=8").batch})
    found = diagnose(history(BROKEN[name]), [], config)
    assert found.verdict == "unhealthy"
    assert {finding.metric for finding in found.findings} == {name} | ALSO.get(name, set())
    finding = next(finding for finding in found.findings if finding.metric == name)
    # a median of 10 has moved on after 5 or 6 broken ones
    assert BROKEN_FROM <= finding.since <= BROKEN_FROM + 6
    assert (finding.now > finding.limit) == (finding.side == "above")
    assert (finding.then > finding.limit) == (finding.side == "above")


@pytest.mark.parametrize("name", [rule.name for rule in RULES if not rule.metric.startswith("events/")])
def test_what_is_over_is_no_finding(name: str, config: Config) -> None:
    assert diagnose(history(BROKEN[name], since=40, until=69), [], config).verdict == "healthy"


@pytest.mark.parametrize("name", ["stopped", "rollback", "corrupt_checkpoint"])
def test_an_event_is_a_finding_even_without_its_line(name: str, config: Config) -> None:
    found = diagnose(history(), [{"event": name, "iteration": ITERATIONS + 1}], config)
    assert [(finding.metric, finding.since) for finding in found.findings] == [(f"events/{name}", ITERATIONS + 1)]


def test_since_is_where_the_last_stay_beyond_the_limit_began(config: Config) -> None:
    lines = history({"mismatch/engine_gap": 0.1}, since=10, until=20)
    for line in lines[41:]:
        line["mismatch/engine_gap"] = 0.2
    [finding] = diagnose(lines, [], config).findings
    assert (finding.since, finding.then, finding.now) == (41, 0.2, 0.2)


def test_unhealthy_from_the_start_is_since_the_first_iteration(config: Config) -> None:
    [finding] = diagnose(history({"obrs/acceptance": 0.3}, since=1), [], config).findings
    assert finding.since == 1


def test_causes_stand_before_their_symptoms(config: Config) -> None:
    groups = [GROUPS.index(rule.group) for rule in RULES]
    assert groups == sorted(groups)
    names = ["response/truncated", "eval/policy_accuracy", "correction/clip_frac", "mismatch/kl_rollout_policy"]
    names += ["reward/frac_zero_std", "mismatch/engine_gap"]
    broken = {metric: value for name in names for metric, value in BROKEN[name].items()}
    found = diagnose(history(broken), [], config)
    assert [finding.metric for finding in found.findings] == names[::-1]
    assert "mismatch/engine_gap is 0.002, above the limit of 0.001" in found.summary
    assert "5 further findings" in found.summary


def test_bf16_may_round_more(config: Config) -> None:
    lines = history(BROKEN["mismatch/engine_gap"])
    assert diagnose(lines, [], config.model_copy(update={"precision": "bf16"})).verdict == "healthy"
    assert diagnose(lines, [], config).verdict == "unhealthy"


def test_what_the_guard_allowed_is_the_limit_of_the_gap(config: Config) -> None:
    lines = history({"mismatch/engine_gap": 5e-5})
    checked = [{"event": "engine_check", "iteration": n, "allowed": allowed} for n, allowed in ((1, 1e-3), (2, 1e-5))]
    assert diagnose(lines, checked[:1], config).verdict == "healthy"
    [finding] = diagnose(lines, checked, config).findings
    assert (finding.metric, finding.limit) == ("mismatch/engine_gap", 1e-5)


def test_the_gap_of_two_models_has_the_larger_limit_and_that_of_exact_answers_the_smaller() -> None:
    """Relaxed drafts move the policy's rollouts, by 0.25 at most, and not its answers in evaluations."""
    draft = ("rollout_model.share=0.5", "engine.draft={tokens: 3, lam: 0.7}")
    checked = [
        {"event": "engine_check", "iteration": 1, "model": model, "allowed": allowed}
        for model, allowed in (("policy", 0.25), ("rollout_model", 1e-5))
    ]
    lines = history({"mismatch/engine_gap": 1e-2})
    evaluated = {f"eval/{model}_engine_gap": gap for model, gap in (("policy", 2e-3), ("rollout_model", 2e-5))}
    for settings in (draft, (draft[0], "evaluation.engine={name: transformers, draft: {tokens: 3, lam: 0.7}}")):
        config = small_config(*settings)
        assert diagnose(lines, checked, config).verdict == "healthy"
        [finding] = diagnose(lines, checked[1:], config).findings
        assert finding.metric == "mismatch/engine_gap"
        found = {one.metric: one.limit for one in diagnose(history(evaluated), checked, config).findings}
        assert found == {"eval/policy_engine_gap": 1e-3, "eval/rollout_model_engine_gap": 1e-5}


@pytest.mark.parametrize("ratio", [0.8, 1.2])
@pytest.mark.parametrize(
    ("elsewhere", "is_a_bug"),
    [({}, True), ({"mismatch/kl_policy_rollout": 0.21}, False), ({"mismatch/ratio_stderr": 0.06}, False)],
    ids=["close models", "mass may be missing", "few tokens"],
)
def test_a_mean_ratio_is_a_bug_only_where_no_mass_can_be_missing(
    config: Config, ratio: float, elsewhere: dict[str, float], is_a_bug: bool
) -> None:
    found = diagnose(history({"mismatch/ratio": ratio} | elsewhere), [], config).findings
    assert [finding.metric for finding in found] == (["mismatch/ratio"] if is_a_bug else [])


def test_acceptance_and_z_may_differ_by_chance_and_by_the_bounds_of_z(config: Config) -> None:
    """4 standard errors of the mean of 20 iterations are 4 * 0.004 / sqrt(20) = 0.00358, the bounds 0.00004 apart."""
    fair = config.model_copy(update={"batch": small_config().batch})

    def found(**changes: float) -> list[str]:
        broken = {f"obrs/{name}": value for name, value in changes.items()}
        return [finding.metric for finding in diagnose(history(broken, since=1), [], fair).findings]

    assert found(acceptance_minus_z=0.0035, acceptance_minus_z_stderr=0.004) == []
    assert found(acceptance_minus_z=-0.0035, acceptance_minus_z_stderr=0.004) == []
    for gap in (0.0037, -0.0037):
        assert found(acceptance_minus_z=gap, acceptance_minus_z_stderr=0.004) == ["obrs/acceptance_error"]
    assert found(acceptance_minus_z=0.0037, acceptance_minus_z_stderr=0.004, z_bound_width=0.001) == []
    chosen = history({"obrs/acceptance_minus_z": 0.5}, since=1)
    assert diagnose(chosen, [], config).verdict == "healthy"  # groups were chosen by their rewards
    assert diagnose(chosen[:5], [], fair).findings == ()  # fewer than 5 iterations


def test_a_quantized_engine_is_a_mismatch_that_asks_for_a_correction(config: Config) -> None:
    engine = config.engine.model_copy(update={"quantization": "int8_w8a8"})
    quantized = config.model_copy(update={"engine": engine})
    assert diagnose(history({"mismatch/engine_gap": 0.009}), [], quantized).verdict == "healthy"
    [finding] = diagnose(history({"mismatch/engine_gap": 0.05}), [], quantized).findings
    assert (finding.group, finding.limit) == ("precision", 0.02)
    assert "objective.correction=tis" in finding.suggestion
    [finding] = diagnose(history({"mismatch/engine_gap": 0.05}), [], config).findings
    assert (finding.group, finding.limit) == ("bug", 0.001)


def test_accuracy_may_fall_by_what_chance_does(config: Config) -> None:
    few = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"problems": 64})})
    perfect = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"problems": 8})})
    lines = history({"eval/policy_accuracy": 0.3})
    # two standard errors of a difference at 206.8 of 516 right, and at 27.6 of 68: 0.061 and 0.168
    assert [finding.limit for finding in diagnose(lines, [], config).findings] == pytest.approx([0.339], abs=5e-4)
    assert diagnose(lines, [], few).verdict == "healthy"
    lines = [{"iteration": 0, "eval/policy_accuracy": 1.0}, {"iteration": 9, "eval/policy_accuracy": 0.75}]
    assert diagnose(lines, [], perfect).verdict == "healthy"


def test_no_verdict_before_five_iterations_but_on_bugs(config: Config) -> None:
    lines = history({"obrs/acceptance": 0.1}, since=1)
    assert [diagnose(lines[:count], [], config).verdict for count in (0, 1, 5, 6)] == 3 * ["too early"] + ["unhealthy"]
    assert diagnose(history(BROKEN["mismatch/engine_gap"], since=1)[:2], [], config).verdict == "unhealthy"


def test_rules_that_do_not_apply_stay_silent(config: Config) -> None:
    alone = config.model_copy(update={"rollout_model": None, "batch": small_config().batch})
    lines = history(BROKEN["sampling/gen_batches"] | {"rollout_model/ppo_grad_norm": 0.001})
    nothing = {name: None for name in HEALTHY if name.startswith(("rollout_model/", "obrs/", "correction/"))}
    assert diagnose(lines, [], alone).verdict == "healthy"
    assert diagnose([line | nothing for line in lines], [], alone).verdict == "healthy"
    early = history({"critic/explained_variance": -1.0}, since=1, until=49)[:50]  # 2 steps an iteration
    assert diagnose(early, [], config).verdict == "healthy"


def test_what_to_try_are_settings_that_exist() -> None:
    def fields(model: type[BaseModel]) -> set[str]:
        return set(model.model_fields).union(*(fields(child) for child in model.__subclasses__()))

    known = fields(config_base.Strict) | fields(Sampling)
    for rule in RULES:
        for path in re.findall(r"[a-z_]+(?:\.[a-z_]\w*)+", rule.suggestion.replace("events.jsonl", "")):
            assert set(path.split(".")) <= known, f"{rule.name}: {path}"


@pytest.fixture(scope="module")
def folder(finished_run: FinishedRuns) -> Path:
    """A small run that is not finished."""
    return finished_run("iterations=8", kill_after=6)


def test_the_command_on_a_run_that_is_still_going(folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    result = CliRunner().invoke(cli.app, ["diagnose", str(folder)])
    assert result.exit_code == 0 and "Healthy: after 6 iterations" in result.stdout
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_the_command_on_an_unhealthy_run(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((folder / "config.yaml").read_text())
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    unhealthy = [line | ({"obrs/acceptance": 0.3} if line["iteration"] else {}) for line in lines]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in unhealthy))
    result = CliRunner().invoke(cli.app, ["diagnose", str(tmp_path)], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    for text in ("Unhealthy since iteration 1", "obrs/acceptance", "at least 0.5", "Try: "):
        assert text in result.stdout
    result = CliRunner().invoke(cli.app, ["diagnose", str(tmp_path), "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code == 1 and found["verdict"] == "unhealthy" and found["iteration"] == 6
    [finding] = found["findings"]
    expected = {"metric": "obrs/acceptance", "since": 1, "then": 0.3, "now": 0.3, "limit": 0.5, "side": "below"}
    assert finding.items() >= expected.items() and finding["suggestion"]


def test_the_command_on_a_run_without_a_rollout_model(tmp_path: Path) -> None:
    run(small_config("iterations=6", arm="on_policy"), tmp_path / "run")
    result = CliRunner().invoke(cli.app, ["diagnose", str(tmp_path / "run"), "--json"])
    assert result.exit_code == 0 and json.loads(result.stdout)["verdict"] == "healthy"


def test_the_command_elsewhere(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not a run folder.*give the folder that train printed"):
        CliRunner().invoke(cli.app, ["diagnose", str(tmp_path)], catch_exceptions=False)
    (tmp_path / "config.yaml").write_text((folder / "config.yaml").read_text())
    result = CliRunner().invoke(cli.app, ["diagnose", str(tmp_path)])
    assert result.exit_code == 0 and "Too early to say" in result.stdout
