"""Rules that fire where they should and only there; what `jackpot diagnose` prints."""

import json
import math
import re
from pathlib import Path

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from helpers.folders import write_lines
from helpers.metric_lines import BROKEN_FROM, HEALTHY, ITERATIONS, LEARNING, evaluated, history
from helpers.runs import FinishedRuns, read_lines, small_config
from jackpot.analysis.diagnose.causes import LOOKS
from jackpot.analysis.diagnose.diagnose import diagnose
from jackpot.analysis.diagnose.rules import RULES
from jackpot.config import base as config_base
from jackpot.config.batch import FilterGroupsConfig
from jackpot.config.config import Config
from jackpot.config.sampling import Sampling
from jackpot.core.errors import CheckpointError
from jackpot.ui import cli

GROUPS = ["bug", "data", "precision", "learning", "signal", "mismatch", "correction", "models", "length", "disk"]
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
    "reward/mean": {"reward/mean": 0.05},
    "eval/rollout_model_accuracy": {"eval/rollout_model_accuracy": 0.32, "eval/policy_accuracy": 0.3},
    "rollout_model/ppo_grad_norm / rollout_model/distill_grad_norm": {"rollout_model/ppo_grad_norm": 0.05},
    "rollout_model/grad_cosine": {"rollout_model/grad_cosine": -0.95},
    "critic/explained_variance": {"critic/explained_variance": -0.1},
    "response/tokens": {"response/tokens": 15.0, "saved/length_reward": 0.9, "eval/policy_accuracy": 0.43},
    "response/truncated": {"response/truncated": 0.4},
    "files/failed": {"files/failed": 1},
    "saved/ambiguous_prompts": {"saved/ambiguous_prompts": 0.6},
    "saved/commonest": {"saved/commonest": 1.0, "reward/mean": 0.5},
    "saved/end_inside": {"saved/end_inside": 1.0},
    "saved/ended_by_stop_ids": {"saved/ended_by_stop_ids": 1.0, "eval/policy_accuracy": 0.43},
    "saved/held_out": {"saved/held_out": 0.5},
    "saved/repeated_prompts": {"saved/repeated_prompts": 0.9},
    "saved/right_earn": {"saved/right_earn": -1.0},
}
WITH = {  # settings with which a rule applies, where they are not those of `config`
    "obrs/acceptance_error": ("batch.mini_batch_size=8",),
    "mismatch/ratio_max": ("batch.mini_batch_size=8", "objective.correction=is"),
}
STAYS = ("events/", "seconds/")  # what happened once stays a finding
RULE_NAMES = list(dict.fromkeys(rule.name for rule in RULES if not rule.metric.startswith(STAYS)))
ALSO = {"eval/rollout_model_accuracy": {"eval/policy_accuracy"}}  # rules that fire with another


@pytest.fixture(scope="module")
def config() -> Config:
    """Settings with which most rules apply: 512 problems, two steps an iteration, and groups chosen by rewards."""
    plain = small_config("evaluation.problems=512", "batch.mini_batch_size=8")
    return plain.model_copy(
        update={"batch": plain.batch.model_copy(update={"filter_groups": FilterGroupsConfig(max_num_gen_batches=10)})}
    )


def test_a_healthy_run_with_a_wild_iteration_has_no_finding(config: Config) -> None:
    diagnosis = diagnose(history(), [{"event": "skipped_step", "iteration": 3}], config)
    assert (diagnosis.verdict, diagnosis.findings, diagnosis.iteration) == ("no finding", (), ITERATIONS)


def test_a_wild_newest_iteration_is_no_alarm(config: Config) -> None:
    lines = history()[:31]
    assert lines[-1]["mismatch/kl_rollout_policy"] == 3.0
    assert diagnose(lines, [], config).verdict == "no finding"


@pytest.mark.parametrize("name", RULE_NAMES)
def test_a_rule_fires_where_it_is_broken_and_nowhere_else(name: str, config: Config) -> None:
    config = small_config(*WITH[name]) if name in WITH else config
    diagnosis = diagnose(history(BROKEN[name]), [], config)

    assert diagnosis.verdict == "unhealthy"
    assert {finding.metric for finding in diagnosis.findings} == {name} | ALSO.get(name, set())

    finding = next(finding for finding in diagnosis.findings if finding.metric == name)
    # a median of 10 has moved on after 5 or 6 broken ones
    assert BROKEN_FROM <= finding.since <= BROKEN_FROM + 6
    assert (finding.now > finding.limit) == (finding.side == "above")
    assert (finding.then > finding.limit) == (finding.side == "above")


@pytest.mark.parametrize("name", RULE_NAMES)
def test_what_is_over_is_no_finding(name: str, config: Config) -> None:
    assert diagnose(history(BROKEN[name], since=40, until=69), [], config).verdict == "no finding"


@pytest.mark.parametrize("name", ["stopped", "corrupt_checkpoint"])
def test_an_event_is_a_finding_even_without_its_line(name: str, config: Config) -> None:
    diagnosis = diagnose(history(), [{"event": name, "iteration": ITERATIONS + 1}], config)
    assert [(finding.metric, finding.since) for finding in diagnosis.findings] == [(f"events/{name}", ITERATIONS + 1)]


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

    diagnosis = diagnose(history(broken), [], config)

    assert [finding.metric for finding in diagnosis.findings] == names[::-1]
    assert "mismatch/engine_gap is 0.002, above the limit of 0.001" in diagnosis.summary
    assert "may follow from it: reward/frac_zero_std, mismatch/kl_rollout_policy" in diagnosis.summary


def test_bf16_may_round_more(config: Config) -> None:
    lines = history(BROKEN["mismatch/engine_gap"])
    assert diagnose(lines, [], config.model_copy(update={"precision": "bf16"})).verdict == "no finding"
    assert diagnose(lines, [], config).verdict == "unhealthy"


def test_what_the_guard_allowed_is_the_limit_of_the_gap(config: Config) -> None:
    lines = history({"mismatch/engine_gap": 5e-5})
    checked = [{"event": "engine_check", "iteration": n, "allowed": allowed} for n, allowed in ((1, 1e-3), (2, 1e-5))]
    assert diagnose(lines, checked[:1], config).verdict == "no finding"
    [finding] = diagnose(lines, checked, config).findings
    assert (finding.metric, finding.limit) == ("mismatch/engine_gap", 1e-5)


def test_the_gap_of_two_models_has_the_larger_limit() -> None:
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
        assert diagnose(lines, checked, config).verdict == "no finding"
        [finding] = diagnose(lines, checked[1:], config).findings
        assert finding.metric == "mismatch/engine_gap"
        limits = {finding.metric: finding.limit for finding in diagnose(history(evaluated), checked, config).findings}
        assert limits == {"eval/policy_engine_gap": 1e-3, "eval/rollout_model_engine_gap": 1e-5}


@pytest.mark.parametrize("ratio", [0.8, 1.2])
@pytest.mark.parametrize(
    ("elsewhere", "is_a_bug"),
    [({}, True), ({"mismatch/kl_policy_rollout": 0.21}, False), ({"mismatch/ratio_stderr": 0.06}, False)],
    ids=["close models", "mass may be missing", "few tokens"],
)
def test_a_mean_ratio_is_a_bug_only_where_no_mass_can_be_missing(
    config: Config, ratio: float, elsewhere: dict[str, float], is_a_bug: bool
) -> None:
    findings = diagnose(history({"mismatch/ratio": ratio} | elsewhere), [], config).findings
    assert [finding.metric for finding in findings] == (["mismatch/ratio"] if is_a_bug else [])


def test_acceptance_and_z_may_differ_by_chance_and_bounds_of_z(config: Config) -> None:
    """4 standard errors of the mean of 20 iterations are 4 * 0.004 / sqrt(20) = 0.00358, the bounds 0.00004 apart."""
    fair = config.model_copy(update={"batch": small_config().batch})

    def findings(**changes: float) -> list[str]:
        broken = {f"obrs/{name}": value for name, value in changes.items()}
        return [finding.metric for finding in diagnose(history(broken, since=1), [], fair).findings]

    assert findings(acceptance_minus_z=0.0035, acceptance_minus_z_stderr=0.004) == []
    assert findings(acceptance_minus_z=-0.0035, acceptance_minus_z_stderr=0.004) == []

    for gap in (0.0037, -0.0037):
        assert findings(acceptance_minus_z=gap, acceptance_minus_z_stderr=0.004) == ["obrs/acceptance_error"]

    assert findings(acceptance_minus_z=0.0037, acceptance_minus_z_stderr=0.004, z_bound_width=0.001) == []

    chosen = history({"obrs/acceptance_minus_z": 0.5}, since=1)
    assert diagnose(chosen, [], config).verdict == "no finding"  # groups were chosen by their rewards
    assert diagnose(chosen[:5], [], fair).findings == ()  # fewer than 5 iterations


def test_a_quantized_engine_asks_for_a_correction(config: Config) -> None:
    engine = config.engine.model_copy(update={"quantization": "int8_w8a8"})
    quantized = config.model_copy(update={"engine": engine})

    assert diagnose(history({"mismatch/engine_gap": 0.009}), [], quantized).verdict == "no finding"

    [finding] = diagnose(history({"mismatch/engine_gap": 0.05}), [], quantized).findings
    assert (finding.group, finding.limit) == ("precision", 0.02)
    assert "objective.correction=tis" in finding.suggestion

    [finding] = diagnose(history({"mismatch/engine_gap": 0.05}), [], config).findings
    assert (finding.group, finding.limit) == ("bug", 0.001)


def learning(lines: list[dict], config: Config) -> list[tuple[str, str, str]]:
    """Group, metric and first words of the findings about learning."""
    findings = diagnose(lines, [], config).findings
    return [
        (finding.group, finding.metric, finding.explanation.split(":")[0])
        for finding in findings
        if finding.metric in LEARNING
    ]


@pytest.mark.parametrize("measure", ["accuracy", "reward"])
def test_a_run_whose_evaluations_do_not_rise_learned_nothing(measure: str, config: Config) -> None:
    """One standard error of a difference is 0.0283."""
    nothing = [("models", f"eval/policy_{measure}", "the run has learned nothing")]
    assert learning(evaluated(0.418, 0.43, 0.41, 0.418, measure=measure), config) == nothing
    assert learning(evaluated(0.418, 0.40, 0.41, 0.445, measure=measure), config) == nothing
    assert learning(evaluated(0.418, 0.40, 0.41, 0.448, measure=measure), config) == []


def test_a_run_may_have_learned_nothing_before_30_iterations(config: Config) -> None:
    flat = evaluated(0.4, 0.4, 0.4, 0.4)

    assert learning(flat, config) and learning(flat[:30], config) == []
    assert "not known: the newest evaluation is within chance" in diagnose(flat[:30], [], config).summary

    warm = small_config("batch.mini_batch_size=8", "policy.optimizer.warmup_steps=60")  # 2 steps an iteration
    assert learning(flat, warm) == [] and learning(evaluated(*7 * [0.4]), warm)
    assert learning(evaluated(*4 * [0.99]), config) == []  # there is nothing left to learn


def test_answers_are_read_first_where_none_was_ever_right(config: Config) -> None:
    never = {"reward/all_wrong": 1.0, "reward/mean": 0.0}
    lines = [line | (never if line["iteration"] else {}) for line in evaluated(0.0, 0.0, 0.0, 0.0, error=0.004)]
    diagnosis = diagnose(lines, [], config)

    assert [finding.metric for finding in diagnosis.findings] == [
        "reward/mean",
        "reward/all_wrong",
        "eval/policy_accuracy",
    ]
    assert "never had a reward" in diagnosis.summary
    assert "First: read answers (`jackpot sample RUN`)" in diagnosis.summary


def test_a_fall_right_after_the_start_is_of_the_learning_rate(config: Config) -> None:
    lines = evaluated(0.4, 0.31, 0.3)
    assert [group for group, _, _ in learning(lines, config)] == ["learning"]
    diagnosis = diagnose(lines, [], config)
    assert diagnosis.findings[0].since == 10 and "First: lower policy.optimizer.learning_rate." in diagnosis.summary
    assert learning(evaluated(0.4, 0.35), config) == []  # 0.057 are two standard errors


def test_what_was_learned_and_is_lost_is_a_finding_of_its_own(config: Config) -> None:
    [(group, _, explanation)] = learning(evaluated(0.4, 0.6, 0.7, 0.5), config)
    assert group == "models" and "what the run had learned" not in explanation
    assert "is lost" in diagnose(evaluated(0.4, 0.6, 0.7, 0.5), [], config).summary


def test_the_best_of_many_evaluations_may_be_best_by_chance(config: Config) -> None:
    """A fall by 2.4 standard errors is more than chance below the best of 2 evaluations, not below that of 10."""
    fall = 0.7 - 2.4 * 0.02 * math.sqrt(2)
    assert learning(evaluated(0.5, 0.7, fall), config)
    assert learning(evaluated(0.5, *9 * [0.7], fall), config) == []
    [(group, _, _)] = learning(evaluated(0.7, *9 * [0.69], fall), config)  # the first is not chosen as the best
    assert group == "learning"


def test_training_rewards_speak_where_evaluations_do_not(config: Config) -> None:
    lines = evaluated(*5 * [0.4])
    for line in lines[1:]:
        line |= {"eval/policy_accuracy": None, "reward/mean": 0.4 + 0.02 * math.sin(line["iteration"])}

    assert learning(lines, config) == [("models", "reward/mean", "the run has learned nothing")]
    assert "the run has 1 evaluation, and 2 are needed" in diagnose(lines[:20], [], config).summary

    for setting in ("rollout_model.optimizer=null", "rollout_model.share=0.5"):
        assert learning(lines, small_config(setting)) == []

    for line in lines[30:]:
        line["reward/mean"] = 0.5
    assert learning(lines, config) == []

    for line in lines[30:]:
        line["reward/mean"] = 0.1
    assert [group for group, _, _ in learning(lines, config)] == ["learning"]

    for line in lines[1:]:  # a level is 8 standard errors below the best, and above half of it
        line["reward/mean"] = 0.4 if line["iteration"] < 20 else 0.5 if line["iteration"] < 30 else 0.45
    assert learning(lines, config) == []

    for line in lines[1:]:  # half of a negative reward says nothing
        line["reward/mean"] = -0.1 if line["iteration"] < 20 else -0.05 if line["iteration"] < 30 else -0.09
    assert learning(lines, config) == []


def test_a_low_entropy_is_a_collapse_unless_the_policy_rose(config: Config) -> None:
    collapsed = {"policy/entropy": 0.07 * 0.3}
    for accuracies, is_found in (((0.4, 0.42, 0.42), True), ((0.4, 0.6, 0.7), False)):
        lines = [line | (collapsed if line["iteration"] > 5 else {}) for line in evaluated(*accuracies)]
        metrics = [finding.metric for finding in diagnose(lines, [], config).findings]
        assert metrics == (["policy/entropy"] if is_found else [])


CLIPPED_AT_ENGINE = "{name: none, proximal: rollout}"
EXPLAINED = [  # settings, what is beyond its limit, the setting that explains it
    ("objective.correction.lam=2", {"obrs/acceptance": 0.26}, "objective.correction.lam=2"),
    ("objective.correction={budget: 0.3, normalizer: exact}", {"obrs/acceptance": 0.3}, "budget=0.3"),
    ("objective.correction.lam=25", {"correction/accepted": 0.03}, "lam=25"),
    ("objective.correction.lam=2", {"correction/ess": 0.3}, "lam=2"),
    ("objective.correction={name: tis, cap: 1}", {"correction/clip_frac": 0.4}, "cap=1"),
    ("objective.correction.c1=1", {"correction/clip_frac": 0.4}, "c1=1"),
    ("objective.correction.c2=1", {"correction/clip_frac_c2": 0.4}, "c2=1"),
    ("objective.correction=icepop", {"correction/clip_frac": 0.4}, "objective.correction=icepop"),
    (
        f"objective.correction={CLIPPED_AT_ENGINE}",
        {"policy/clip_frac": 0.4},
        "objective.correction.proximal=rollout",
    ),
    (
        f"rollout_model.correction={CLIPPED_AT_ENGINE}",
        {"rollout_model/clip_frac": 0.4},
        "rollout_model.correction.proximal=rollout",
    ),
    ("objective.correction=tis", {"obrs/z_bound_width": 1.0}, "objective.correction=tis"),
    ("objective.correction=tis", {"mismatch/ratio_max": 1500.0}, "objective.correction=tis"),
    ("sampling.top_p=0.8", {"mismatch/ratio": 0.85}, "sampling.top_p=0.8"),
    ("sampling.top_p=0.8", {"mismatch/engine_gap": 0.03}, "sampling.top_p=0.8"),
    ("rollout_model.correction=geo_mask", {"rollout_model/weight": 0.5}, "rollout_model.correction=geo_mask"),
    ("batch.ahead=2", {"rollout_model/weight": 0.85}, "batch.ahead=2"),
    ("batch.filter_groups={}", {"obrs/acceptance_minus_z": 0.5}, "batch.filter_groups"),
    ("rollout_model.ppo_weight=0", {"rollout_model/ppo_grad_norm": 0.0}, "rollout_model.ppo_weight=0"),
]


@pytest.mark.parametrize(("setting", "broken", "named"), EXPLAINED)
def test_what_the_settings_explain_is_no_finding(setting: str, broken: dict[str, float], named: str) -> None:
    diagnosis = diagnose(history(broken), [], small_config(setting))

    assert (diagnosis.verdict, diagnosis.findings) == ("no finding", ())

    [explained] = diagnosis.explained.values()
    assert named in explained
    assert f"but what the settings explain: {next(iter(diagnosis.explained))}" in diagnosis.summary

    without = "objective.correction=is" if "mismatch/ratio_max" in broken else "seed=1"
    assert diagnose(history(broken), [], small_config(without)).findings


def test_single_responses_are_all_right_or_all_wrong() -> None:
    single = small_config("batch.group_size=1", "batch.prompts=8", "objective.advantage=reinforce_pp")
    assert diagnose(history({"reward/all_wrong": 0.95}), [], single).explained
    assert diagnose(history({"reward/all_wrong": 1.0}), [], single).findings


def test_a_clip_of_the_engine_s_ratio_caps_no_weight() -> None:
    [finding] = diagnose(
        history({"mismatch/ratio_max": 1500.0}),
        [],
        small_config(f"objective.correction={CLIPPED_AT_ENGINE}"),
    ).findings

    assert finding.metric == "mismatch/ratio_max"


def test_what_is_worse_than_the_settings_make_it_is_a_finding() -> None:
    """At lam 2 the acceptance is at least half of that at lam 1, whose limit is 0.5."""
    lines = history({"obrs/acceptance": 0.26})
    for line in lines[80:]:
        line["obrs/acceptance"] = 0.2
    [finding] = diagnose(lines, [], small_config("objective.correction.lam=2")).findings
    assert finding.metric == "obrs/acceptance" and 80 <= finding.since <= 86


def test_a_diagnosis_says_what_it_looked_at_and_what_not(config: Config) -> None:
    lines = [{name: value for name, value in line.items() if name != "response/truncated"} for line in history()]
    diagnosis = diagnose(lines, [], config)
    known = set(diagnosis.looked_at) | set(diagnosis.not_looked_at)

    assert known == {rule.name for rule in RULES} and not set(diagnosis.looked_at) & set(diagnosis.not_looked_at)
    assert diagnosis.not_looked_at["response/truncated"] == "without a value in this run"
    assert {"obrs/acceptance", "events/stopped", "eval/policy_accuracy"} <= set(diagnosis.looked_at)
    assert f"{len(diagnosis.looked_at)} signs were looked at, and none is there." in diagnosis.summary

    first, *others = diagnosis.coverage
    assert first.startswith("Looked at: ") and "obrs/acceptance, " in first and "response/truncated" not in first
    assert any(line.startswith("Not looked at, without a value") and "response/truncated" in line for line in others)

    alone = diagnose(lines[:6], [], config)
    assert "Whether the policy learns is not known: the run has 1 evaluation, and 2 are needed." in alone.summary
    assert alone.not_looked_at["eval/policy_accuracy"] == "for its limit does not apply"


def test_remedies_that_name_settings_the_run_lacks_are_left_out() -> None:
    drifts = history({"mismatch/kl_rollout_policy": 0.9})
    [joint] = diagnose(drifts, [], small_config()).findings
    [frozen] = diagnose(drifts, [], small_config("rollout_model.optimizer=null")).findings

    assert "rollout_model.optimizer.learning_rate; lower policy.optimizer.learning_rate; " in joint.suggestion
    assert frozen.suggestion.startswith("lower policy.optimizer.learning_rate; ")

    [errors] = diagnose(history({"reward/errors": 0.02}), [], small_config()).findings
    assert errors.suggestion.startswith("read events.jsonl; ")  # a file, no setting


def test_no_verdict_before_five_iterations_but_on_bugs(config: Config) -> None:
    lines = history({"obrs/acceptance": 0.1}, since=1)
    assert [diagnose(lines[:count], [], config).verdict for count in (0, 1, 5, 6)] == 3 * ["too early"] + ["unhealthy"]
    assert diagnose(history(BROKEN["mismatch/engine_gap"], since=1)[:2], [], config).verdict == "unhealthy"


def test_rules_that_do_not_apply_stay_silent(config: Config) -> None:
    alone = config.model_copy(update={"rollout_model": None, "batch": small_config().batch})
    lines = history(BROKEN["sampling/gen_batches"] | {"rollout_model/ppo_grad_norm": 0.001})
    nothing = {name: None for name in HEALTHY if name.startswith(("rollout_model/", "obrs/", "correction/"))}

    assert diagnose(lines, [], alone).verdict == "no finding"
    assert diagnose([line | nothing for line in lines], [], alone).verdict == "no finding"

    early = history({"critic/explained_variance": -1.0}, since=1, until=49)[:50]  # 2 steps an iteration
    assert diagnose(early, [], config).verdict == "no finding"


def test_what_to_try_are_settings_that_exist() -> None:
    def fields(model: type[BaseModel]) -> set[str]:
        return set(model.model_fields).union(*(fields(child) for child in model.__subclasses__()))

    known = fields(config_base.Strict) | fields(Sampling)

    for rule in RULES:
        for path in re.findall(r"[a-z_]+(?:\.[a-z_]\w*)+", rule.suggestion.replace("events.jsonl", "")):
            assert set(path.split(".")) <= known, f"{rule.name}: {path}"


def test_limits_have_a_source_and_verdicts_something_to_look_at() -> None:
    assert all(rule.source and (rule.look or LOOKS[rule.group]) for rule in RULES)


def test_a_verdict_has_five_lines(config: Config) -> None:
    diagnosis = diagnose(history(BROKEN["obrs/acceptance"]), [], config)
    labels = [line.split(" ")[0] for line in diagnosis.summary.splitlines()]
    assert labels == ["Unhealthy", "Sign:", "First:", "Then:", "Look"]
    assert "`jackpot report RUN`" in diagnosis.summary


@pytest.fixture(scope="module")
def folder(finished_run: FinishedRuns, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run that is not finished: two of its four iterations stand in for the fifth and the sixth."""
    folder = finished_run.copy(tmp_path_factory.mktemp("unfinished"))
    lines = read_lines(folder)
    lines += [line | {"iteration": line["iteration"] + 2} for line in lines[3:]]
    write_lines(folder, lines)
    (folder / "config.yaml").write_text((folder / "config.yaml").read_text().replace("iterations: 4", "iterations: 8"))
    return folder


def test_the_command_finds_nothing_and_changes_no_file(folder: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    result = CliRunner().invoke(cli.app, ["diagnose", str(folder)])
    assert result.exit_code == 0 and "No finding: after 6 iterations" in result.stdout
    assert "Looked at: health/non_finite_tokens, " in result.stdout and "critic/explained_variance" in result.stdout
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_the_command_says_what_is_unhealthy_and_exits_with_1(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((folder / "config.yaml").read_text())
    lines = [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]
    unhealthy = [line | ({"obrs/acceptance": 0.3} if line["iteration"] else {}) for line in lines]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in unhealthy))

    result = CliRunner().invoke(cli.app, ["diagnose", str(tmp_path)], env={"COLUMNS": "200"})

    assert result.exit_code == 1
    for text in (
        "Unhealthy since iteration 1",
        "Sign: obrs/acceptance is 0.3, below the limit of 0.5",
        "First: ",
        "Look at: ",
    ):
        assert text in result.stdout

    result = CliRunner().invoke(cli.app, ["diagnose", str(tmp_path), "--json"])
    answer = json.loads(result.stdout)
    assert result.exit_code == 1 and answer["verdict"] == "unhealthy" and answer["iteration"] == 6

    [finding] = answer["findings"]
    expected = {"metric": "obrs/acceptance", "since": 1, "then": 0.3, "now": 0.3, "limit": 0.5, "side": "below"}
    assert finding.items() >= expected.items() and finding["suggestion"]


def test_another_folder_is_refused_and_a_new_run_is_too_early(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not a run folder.*give the folder that train printed"):
        CliRunner().invoke(cli.app, ["diagnose", str(tmp_path)], catch_exceptions=False)
    (tmp_path / "config.yaml").write_text((folder / "config.yaml").read_text())
    result = CliRunner().invoke(cli.app, ["diagnose", str(tmp_path)], env={"COLUMNS": "200"})
    assert result.exit_code == 0 and "It is too early to say more: 5 iterations are needed." in result.stdout
