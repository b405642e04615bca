"""A run trains as usual while the policy generates the rollouts and the rollout model drafts them."""

from contextlib import closing

import pytest

from helpers.runs import SHORT, assert_same_run, read_lines, run, run_and_copy, small_config
from jackpot.core.errors import ConfigError
from jackpot.launch.start import launch
from jackpot.training.components import RunComponents
from jackpot.training.run_folder.folder import RunFolder

DRAFTED = ("rollout_model.share=0.0", "engine.draft={tokens: 2}")


def test_the_policy_generates_what_a_fresh_rollout_model_drafts(tmp_path):
    config = small_config(*DRAFTED, "batch.ahead=1", "iterations=2")

    run(config, tmp_path)

    lines = read_lines(tmp_path)[1:]
    for line in lines:
        assert line["sampling/rollout_model_share"] == 0.0
        assert 1.0 < line["draft/accepted_length"] <= 3.0
        assert 0.0 < line["draft/acceptance"] <= 1.0
        assert line["draft/policy_passes_per_token"] < 1.0
        assert line["rollout_model/grad_norm"] > 0.0  # it is still trained
        assert line["rollout_model/weight"] is None  # of its own tokens, of which there are none

    assert lines[0]["mismatch/engine_gap"] < 1e-5  # the weights of the next batch, generated ahead, have moved on
    assert lines[0]["obrs/acceptance"] > 0.999

    checks = [event for event in RunFolder(tmp_path).read("events.jsonl") if event["event"] == "engine_check"]
    assert checks
    assert {event["model"] for event in checks} == {"policy"}


def test_the_drafting_model_has_the_newest_weights(tmp_path):
    config = small_config(SHORT, "iterations=2", *DRAFTED, "evaluation.every=9")  # evaluates at the ends alone
    versions = []

    def listen(line):
        components = trainer._components
        versions.append((components.engine.version, components.policy_engine.version, components.learner.version))

    with closing(launch(config, tmp_path, listen)) as trainer:
        trainer.train()

    assert [drafter.rollout_model for drafter, _, _ in versions] == [0, 1, 2]
    assert all(drafter == newest for drafter, _, newest in versions)
    assert all(policy == newest for _, policy, newest in versions)


STEP = "rollout_model.share={schedule: step, hold: 2}"


@pytest.mark.parametrize(
    ("overrides", "iteration", "roles"),
    [
        (DRAFTED, 1, {"policy", "rollout_model"}),
        (DRAFTED[:1], 1, {"policy"}),
        ((STEP,), 1, {"rollout_model"}),
        ((STEP,), 2, {"policy"}),
        ((STEP, "batch.ahead=1"), 1, {"policy", "rollout_model"}),
        ((STEP, DRAFTED[1]), 1, {"rollout_model"}),  # the policy generates nothing yet
        ((STEP, DRAFTED[1]), 2, {"policy", "rollout_model"}),
    ],
)
def test_who_generates_or_drafts_next_needs_new_weights(overrides, iteration, roles):
    config = small_config(*overrides)
    absent_parts = dict.fromkeys(("task", "tokenizer", "engine", "policy_engine", "learner"))
    assert RunComponents(config=config, costs={}, **absent_parts).next_writers(iteration).keys() == roles


def test_drafts_count_in_the_flops(tmp_path):
    flops_per_token = {}

    for name, overrides in {"alone": DRAFTED[:1], "drafted": DRAFTED}.items():
        run(small_config(*overrides, "iterations=1", "batch.prompts=2", "evaluation.problems=2"), tmp_path / name)
        line = read_lines(tmp_path / name)[1]
        flops_per_token[name] = line["flops/rollout"] / line["tokens/rollout"]

    reads = read_lines(tmp_path / "drafted")[1]["draft/policy_reads"]
    assert reads > 1.0  # else less FLOPs than without drafts would pass
    assert reads < flops_per_token["drafted"] / flops_per_token["alone"] < 2.0 * reads


@pytest.mark.slow
def test_a_drafted_run_that_was_killed_ends_as_one_that_was_not(tmp_path):
    config = small_config(*DRAFTED[:1], "engine.draft={tokens: auto}")

    run_and_copy(config, tmp_path / "whole", tmp_path / "killed", after=2)
    run(config, tmp_path / "killed")

    assert_same_run(tmp_path / "whole", tmp_path / "killed", ["policy", "rollout_model"])


def test_relaxed_drafts_are_corrected_as_what_drew_them(tmp_path):
    run(small_config(*DRAFTED[:1], "engine.draft={tokens: 2, lam: 0.3}", "iterations=1"), tmp_path)

    line = read_lines(tmp_path)[1]
    assert line["mismatch/engine_gap"] > 1e-3
    assert line["eval/policy_engine_gap"] < 1e-5  # evaluations are exact
    assert line["mismatch/ratio"] == pytest.approx(1.0, abs=0.1)
    assert line["obrs/acceptance"] < 0.999


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("rollout_model=null",), "share below 1"),
        (("rollout_model.share=1.0",), "share below 1"),
        (("engine.draft.lam=0.5", "objective.correction={name: obrs, normalizer: exact}"), "lam 0.5"),
        (("engine=vllm", "evaluation.engine={name: transformers, draft: {}}"), "one kind of engine"),
        (("evaluation.engine=transformers",), "the policy's with draft"),
        (("engine={name: vllm, draft: {tokens: auto}}",), "vLLM drafts the same number"),
        (("engine={name: vllm, draft: {lam: 0.5}}",), "draft.lam is 0.5"),
        (("engine={name: vllm, draft: {}, kv_cache_dtype: fp8}",), "plain weights"),
        (("engine={name: vllm, draft: {}, enable_sleep_mode: true}",), "one that sleeps waits"),
        (("engine={name: vllm_server, urls: http://a:1, weights_folder: w, draft: {}}",), "not for servers"),
    ],
)
def test_settings_that_drafts_do_not_go_with_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        small_config(*DRAFTED, *overrides)
