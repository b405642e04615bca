"""How a recipe becomes settings: what is refused and in which words, what arms and overrides change, the defaults."""

import ast
import math
import re
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pydantic
import pytest
import torch

import jackpot
from helpers.paths import ROOT
from jackpot.config import build as config_build
from jackpot.config import config, reference
from jackpot.config import corrections as config_corrections
from jackpot.config import objective as config_objective
from jackpot.config import tasks as config_tasks
from jackpot.config.arms import build_config
from jackpot.config.base import model_classes
from jackpot.config.build import flat, merge, nest, validated
from jackpot.config.changes import settings_of
from jackpot.config.config import Config
from jackpot.config.published import RecipeNotes
from jackpot.config.recipes import load_recipe, resolve
from jackpot.config.tools import BenchmarksConfig, MismatchConfig
from jackpot.core.errors import ConfigError
from jackpot.objectives import advantages, corrections, joint, losses
from jackpot.objectives.corrections.budgeted import BEYOND_C1, MASKS
from jackpot.rollout.tasks.registry import TASKS

PACKAGE = Path(jackpot.__file__).parent
RECIPE = {
    "iterations": 3,
    "policy": {"path": "p", "optimizer": {"learning_rate": 1e-4}},
    "rollout_model": {"path": "r", "optimizer": {"learning_rate": 1e-3}},
    "batch": {"prompts": 6, "group_size": 4},
}
OBRS = {"objective": {"correction": "obrs"}}


def build(*changes, **options):
    """The recipe with changes laid over it; dotted keys are nested."""
    recipe = RECIPE
    for change in changes:
        for key, value in change.items():
            recipe = merge(recipe, nest(key, value))
    return build_config(recipe, **options)


def message(*changes, **options):
    """The words with which the changes are refused."""
    with pytest.raises(ConfigError) as error:
        build(*changes, **options)
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"objective.advantage": "reinforce_pp"}, "advantage 'reinforce_pp' compares with no group"),
        ({"objective.advantage": "gae", "critic": {"optimizer": {}}}, "advantage 'gae' compares with no group"),
        ({"rollout_model": None}, "without a rollout_model the policy generates all responses"),
        (
            {"rollout_model.split": "prompt"},
            "one model generates all responses to a prompt; use rollout_model.split: group",
        ),
        ({"rollout_model.share": 1.0}, "share is 0 or 1 in every iteration"),
        ({"rollout_model.share": {"schedule": "step", "hold": 1}}, "share is 0 or 1 in every iteration"),
    ],
)
def test_a_baseline_that_would_change_nothing_is_refused(changes, sentence):
    mixed = {"objective.baseline": "model", "rollout_model.split": "group", "rollout_model.share": 0.5}
    build(OBRS, mixed)

    assert sentence in message(OBRS, mixed, changes)


# Unknown and impossible settings


@pytest.mark.parametrize(
    ("key", "guess"),
    [
        ("objektive", "objective"),
        ("objective.clip_lo", "objective.clip_low"),
        ("objective.correction.lamb", "objective.correction.lam"),
        ("rollout_model.correction.kap", "rollout_model.correction.cap"),
        ("rollout_model.optimiser", "rollout_model.optimizer"),
        ("policy.optimizer.learning_rat", "policy.optimizer.learning_rate"),
        ("sampling.tempratur", "sampling.temperature"),
        ("task.max_operands", "task.max_operand"),
        ("engine.max_batchsize", "engine.max_num_seqs"),
        ("batch.group", "batch.group_size"),
    ],
)
def test_an_unknown_setting_is_refused_with_a_guess(key, guess):

    text = message({key: 1})
    assert text.startswith(f"unknown setting {key!r}; did you mean {guess!r}? Valid: ")
    assert guess in text.split("Valid: ")[1].split(", ")


@pytest.mark.parametrize(
    ("key", "guesses"),
    [
        ("lam", ["objective.correction.lam"]),
        ("learning_rate", ["policy.optimizer.learning_rate", "rollout_model.optimizer.learning_rate"]),
        ("temperature", ["sampling.temperature"]),
        ("max_steps", ["iterations"]),
        ("policy.lr", ["policy.optimizer.learning_rate"]),
    ],
)
def test_a_setting_in_the_wrong_block_is_refused_with_its_place(key, guesses):
    text = message({key: 1})
    assert text.startswith(f"unknown setting {key!r}; did you mean {' or '.join(guesses)}"), text


def test_names_of_other_trainers_are_those_of_the_page():
    rows = (ROOT / "docs" / "frameworks.md").read_text().splitlines()
    known = reference.settings("train")
    for theirs, ours in config_build.ELSEWHERE.items():
        assert ours in known
        assert any(re.search(rf"\b{theirs}`", row) and ours.split(".")[-1] in row for row in rows), theirs


@pytest.mark.parametrize(
    ("key", "value", "form"),
    [
        ("policy", "Qwen/Qwen3-0.6B", "write policy.path=Qwen/Qwen3-0.6B"),
        ("rollout_model", "none", "write rollout_model=null"),
        ("policy.lora", True, "write policy.lora.NAME=VALUE. Names: alpha, rank, target_modules"),
        ("batch", 64, "write batch.NAME=VALUE. Names: ahead, "),
    ],
)
def test_a_value_for_a_block_is_refused_with_the_right_form(key, value, form):
    assert message({key: value}).startswith(f"{key}: {value!r} was given, but {key} is a block of settings; {form}")


def test_a_value_of_two_kinds_gets_a_single_sentence():
    assert message({"threads": 0}) == "threads: 0 was given. Input should be greater than or equal to 1, or 'auto'"


def test_a_recipe_that_cannot_be_read_is_named_with_its_heir(tmp_path):
    missing = tmp_path / "missing.yaml"
    based = tmp_path / "based.yaml"
    based.write_text("base: quickstrat\n")
    empty = tmp_path / "empty.yaml"
    empty.write_text("")

    with pytest.raises(ConfigError, match=f"there is no file {missing}. jackpot recipes lists"):
        load_recipe(str(missing))
    with pytest.raises(ConfigError, match="the package's recipe is called quickstart"):
        load_recipe(str(tmp_path / "quickstart.yaml"))
    with pytest.raises(ConfigError, match=f"{based}: base: unknown recipe 'quickstrat'; did you mean 'quickstart'"):
        load_recipe(str(based))
    with pytest.raises(ConfigError, match=f"{empty} is empty; a recipe is a mapping"):
        load_recipe(str(empty))


def test_the_valid_settings_are_those_of_the_chosen_correction():
    text = message({"objective.correction": {"name": "tis", "c1": 2.0}})
    assert text.endswith("Valid: objective.correction.cap, objective.correction.name, objective.correction.proximal")


RATIO_CORRECTIONS = corrections.CORRECTIONS.keys() - {
    "obrs",
    "mask_only",
    "reweight_only",
    "z_only",
    "target_only",
    "coin_only",
    "dppo",
}
UNKNOWN_VALUES = [
    ("objective.correction", "obsr", "; did you mean 'obrs'?", ", ".join(sorted([*corrections.CORRECTIONS, "custom"]))),
    ("objective.correction.target", "oldd", "; did you mean 'old'?", "new, old"),
    (
        "objective.loss_agg_mode",
        "tokens",
        "; did you mean 'token-mean'?",
        "seq-mean-token-mean, seq-mean-token-sum-norm, token-mean",
    ),
    ("rollout_model.correction", "obrs", ".", ", ".join(sorted(RATIO_CORRECTIONS))),
    (
        "task",
        "arithmetik",
        "; did you mean 'arithmetic'?",
        "arithmetic, custom, environment, math, reasoning_gym, sums, tool_arithmetic",
    ),
    ("precision", "fp4", "; did you mean 'fp8'?", "bf16, fp32, fp8, int8"),
]
WRONG_VALUES = [
    ("objective.correction.lam", -2, "greater than 0"),
    ("objective.correction.c1", math.nan, "greater than 0"),
    ("batch.prompts", 0, "greater than or equal to 1"),
    ("iterations", 2.5, "a valid integer"),
    ("iterations", "5", "a valid integer"),
    ("seed", True, "a valid integer"),
    ("sampling.top_p", 1.5, "less than or equal to 1"),
]


@pytest.mark.parametrize(("key", "value", "guess", "valid"), UNKNOWN_VALUES)
def test_an_unknown_value_is_refused_with_a_guess(key, value, guess, valid):
    assert message({key: value}) == f"{key}: unknown value {value!r}{guess} Valid: {valid}"


@pytest.mark.parametrize(("key", "value", "allowed"), WRONG_VALUES)
def test_a_wrong_value_is_refused_with_what_is_allowed(key, value, allowed):
    assert message({key: value}) == f"{key}: {value!r} was given. Input should be {allowed}"


def test_a_wrong_value_in_a_list_is_refused_with_its_index():
    text = message({"policy.optimizer.betas": [0.9, -1]})
    assert text == "policy.optimizer.betas.1: -1 was given. Input should be greater than or equal to 0"


def test_what_every_run_must_set_is_named():
    with pytest.raises(ConfigError) as error:
        build_config({})
    named = [line.split(":")[0] for line in str(error.value).splitlines()]
    assert named == ["iterations", "policy", "rollout_model", "batch"]
    assert all(line.endswith("is missing; it has no default, so set it") for line in str(error.value).splitlines())


def test_several_mistakes_are_all_named():
    assert len(message({"seeds": 1, "iterations": 0, "objective.clip_low": -1}).splitlines()) == 3


# Batches


def test_a_step_that_does_not_divide_the_batch_is_refused():
    text = message({"batch.mini_batch_size": 5})
    assert text == (
        "batch: prompts 6 x group_size 4 = 24 sequences do not divide into optimizer steps of mini_batch_size 5; "
        "choose a mini_batch_size that divides 24, or other prompts or group_size"
    )
    assert "mini_batch_size 48" in message({"batch.mini_batch_size": 48})


@pytest.mark.parametrize(
    ("changes", "rollouts", "steps"),
    [
        ({}, 24, 1),
        ({"batch.mini_batch_size": 24}, 24, 1),
        ({"batch.mini_batch_size": 8}, 24, 3),
        ({"batch.mini_batch_size": 8, "batch.ppo_epochs": 2}, 24, 6),
        ({"batch.ppo_epochs": 4}, 24, 4),
    ],
)
def test_the_arithmetic_of_batches(changes, rollouts, steps):
    batch = build(changes).batch
    assert (batch.rollouts, batch.steps_per_iteration) == (rollouts, steps)


def test_groups_of_one_are_refused():
    assert "batch.group_size is 1, so every advantage of 'grpo' would be 0" in message({"batch.group_size": 1})


@pytest.mark.parametrize("pull", [{"objective.entropy_coeff": 0.01}, {"objective.reference": {"kl_loss_coef": 0.1}}])
def test_terms_of_all_tokens_are_not_divided_by_accepted(pull):
    assert "count: proposed" in message({"objective.count": "accepted"} | pull)


def test_oapl_takes_its_advantage_its_reference_and_no_lengths():
    oapl = {
        "objective.surrogate": "oapl",
        "objective.advantage": "oapl",
        "objective.correction": {"name": "none", "proximal": "rollout"},
    }

    assert build(oapl).objective.oapl_beta == 1.0

    build(oapl, {"objective.loss_agg_mode": "seq-mean-token-sum-norm"})
    for changes, sentence in (
        ({"objective.advantage": "grpo"}, "advantage is 'grpo'; set advantage to oapl"),
        ({"objective.correction.proximal": "old"}, "correction is 'none' with proximal 'old'; set correction to"),
        ({"objective.correction": {"name": "tis"}}, "correction is 'tis' with proximal 'old'; set correction to"),
        ({"objective.loss_agg_mode": "seq-mean-token-mean"}, "divides each response by its length; use token-mean"),
        ({"objective.oapl_beta": 0.0}, "greater than 0"),
    ):
        assert sentence in message(oapl, changes)


def test_a_constant_denominator_with_accepted_counts_is_refused():
    changes = {"objective.loss_agg_mode": "seq-mean-token-sum-norm", "objective.count": "accepted"}
    assert "use count: proposed, or loss_agg_mode: token-mean or seq-mean-token-mean" in message(changes)
    for key in changes:
        build({key: changes[key]})


# Normalizers


def test_topk_without_top_log_probs_is_refused():
    assert "normalizer 'topk' needs the engine's top-k" in message({"sampling.num_top_log_probs": 0})

    build({"sampling.num_top_log_probs": 0, "objective.correction": "tis"})
    topk = {"objective.correction.name": "dppo", "objective.correction.divergence": "topk"}
    assert "divergence 'topk' needs the engine's top-k" in message({"sampling.num_top_log_probs": 0} | topk)

    build({"sampling.num_top_log_probs": 0, "objective.correction": "dppo"})
    build({"sampling.num_top_log_probs": 0, "objective.correction.normalizer": "exact"})


@pytest.mark.parametrize("truncation", [{"sampling.top_p": 0.9}, {"sampling.top_k": 5}])
def test_an_exact_normalizer_of_a_truncated_engine_is_refused(truncation):
    exact = {"objective.correction.normalizer": "exact"}
    text = message(exact, truncation)

    assert "the engine samples with top_p" in text and "use top_p 1 and top_k 0, or normalizer: topk" in text
    build(exact)
    build(truncation)


def test_a_budget_replaces_lam_and_needs_whole_distributions():
    budget = {"objective.correction": {"name": "obrs", "budget": 0.9, "normalizer": "exact"}}
    assert build(budget).objective.correction.budget == 0.9
    assert "use normalizer: exact, or budget: null" in message(budget, {"objective.correction.normalizer": "topk"})
    assert "budget 0.9 chooses lam, but lam 2.0 was given" in message(budget, {"objective.correction.lam": 2.0})
    assert "less than 1" in message(budget, {"objective.correction.budget": 1.0})


def test_an_exact_normalizer_of_moved_weights_is_refused():
    exact_new = {"objective.correction": {"name": "obrs", "normalizer": "exact", "target": "new"}}
    for several, count in (({"batch.mini_batch_size": 8}, 3), ({"batch.ppo_epochs": 2}, 2)):
        assert f"with {count} optimizer steps per iteration they have moved on" in message(exact_new, several)
        build(exact_new, several, {"objective.correction.target": "old"})
        build(exact_new, several, {"rollout_model.optimizer": None})  # frozen: its weights stay
        assert "moved on" in message(exact_new, several, {"rollout_model": None})  # the policy itself moves

    build(exact_new)


def test_an_exact_normalizer_needs_unquantized_engines():
    exact = {"objective.correction.normalizer": "exact"}
    of_evaluations = {"evaluation.engine": {"name": "transformers", "quantization": "int8_w8a8"}}
    build(exact, of_evaluations)  # it generates in evaluations alone

    assert "evaluation.engine samples from a quantized copy" in message(
        exact, of_evaluations, {"rollout_model.share": 0.5}
    )

    of_rollouts = {"engine": {"quantization": "int8_w8a8"}, "evaluation.engine": {"name": "transformers"}}
    assert "but engine samples from a quantized copy" in message(exact, of_rollouts)

    build(exact, of_rollouts, {"rollout_model.share": 0.0})


def test_exact_z_of_rollouts_ahead_needs_a_frozen_rollout_model():
    exact, ahead = {"objective.correction.normalizer": "exact"}, {"batch.ahead": 1}
    for model in ({}, {"rollout_model.update": "iteration"}, {"rollout_model": None}):
        assert "with batch.ahead 1 they have moved on" in message(exact, ahead, model)
        build(ahead, model)
    build(exact, ahead, {"rollout_model.optimizer": None})


def test_at_most_eight_batches_are_generated_ahead():
    assert build().batch.ahead == 0 and build({"batch.ahead": 8}).batch.ahead == 8
    for wrong in (-1, 9):
        assert message({"batch.ahead": wrong}).startswith("batch.ahead")


# LoRA


def test_a_lora_block_has_defaults_and_takes_one_name_or_several():
    assert build().policy.lora is None and build().rollout_model.lora is None
    assert build({"policy.lora": {}}).policy.lora == config.LoraConfig(
        rank=16, alpha=32, target_modules=("all-linear",)
    )

    for modules, names in (("q_proj", ("q_proj",)), (["q_proj", "v_proj"], ("q_proj", "v_proj"))):
        assert build({"rollout_model.lora": {"target_modules": modules}}).rollout_model.lora.target_modules == names


@pytest.mark.parametrize("modules", [[], [1], 1])
def test_target_modules_that_are_no_names_are_refused(modules):
    assert message({"policy.lora": {"target_modules": modules}}).startswith("policy.lora.target_modules")


def test_an_unknown_setting_of_lora_is_refused():
    text = message({"policy.lora": {"dropout": 0.1}})
    assert text.endswith("Valid: policy.lora.alpha, policy.lora.rank, policy.lora.target_modules")


def test_an_adapter_on_a_frozen_rollout_model_is_refused():
    text = message({"rollout_model.optimizer": None, "rollout_model.lora": {"rank": 4}})
    assert text == (
        "rollout_model: lora of rank 4 was given for a frozen rollout model, which trains nothing; give it an "
        "optimizer, or set lora: null"
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"optimizer": None}, "distill_control was given for a frozen rollout model"),
        ({"ppo_weight": 0.0}, "AdamW does not see the scale of a single loss"),
        ({"distill_weight": 0.0}, "distill_weight 0 is not between distill_control.low 0.01 and high 100"),
        ({"distill_control.low": 200.0}, "low is 200 and high is 100"),
        (
            {"distill_control": {"metric": "acceptance", "target": 1.0}},
            "with lam 1 even equal models are accepted at 1",
        ),
        ({"distill_control": {"metric": "acceptance"}, "objective.correction.lam": 8.0}, "are accepted at 0.125"),
        (
            {
                "distill_control": {"metric": "acceptance"},
                "objective.correction": {"budget": 0.8, "normalizer": "exact"},
            },
            "which objective.correction.budget holds already",
        ),
        ({"distill_control": {"metric": "acceptance"}, "share": 0.0, "engine.draft": {}}, "0 in iteration 1 it is"),
        (
            {
                "distill_control": {"metric": "acceptance"},
                "share": {"schedule": "step", "hold": 2},
                "engine.draft": {},
            },
            "at its share of 0 in iteration 3 it is trained and generates none",
        ),
    ],
)
def test_a_distillation_that_cannot_be_controlled_is_refused(changes, sentence):
    # what is named without its block is of rollout_model
    block = {key if "." in key else f"rollout_model.{key}": value for key, value in changes.items()}
    block = {f"rollout_model.{key}" if key.startswith("distill") else key: value for key, value in block.items()}
    assert sentence in message(OBRS, {"rollout_model.distill_control": {"target": 0.5}}, block)


# Blocks that say what differs from another one


def test_the_critics_optimizer_differs_from_the_policys():
    changes = {"objective.advantage": "gae", "policy.optimizer.weight_decay": 0.5, "policy.optimizer.betas": [0.8, 0.9]}
    built = build(changes, {"critic": {"optimizer": {"learning_rate": 1e-5, "betas": [0.9, 0.99]}}})
    assert built.critic.optimizer == config.OptimizerConfig(learning_rate=1e-5, betas=(0.9, 0.99), weight_decay=0.5)
    assert "critic.optimizer: is missing" in message(changes, {"critic": {}})

    changes["policy.optimizer.weights_dtype"] = "bf16"
    assert build(changes, {"critic": {"optimizer": {}}}).critic.optimizer.weights_dtype is None


def test_held_out_data_without_a_source_is_refused():
    task = {"task": {"name": "math", "train": {"source": "mine"}, "test": {"limit": 5}}}
    assert "task.test.source: is missing" in message(task)


def test_the_engine_of_evaluations_differs_or_is_whole():
    vllm = {"engine": {"name": "vllm", "dtype": "bf16", "quantization": "fp8"}}
    assert build(vllm).evaluation.engine is None

    other = build(vllm, {"evaluation.engine.quantization": None}).evaluation.engine
    assert (other.name, other.dtype, other.quantization) == ("vllm", "bf16", None)
    assert build({"engine": "vllm", "evaluation.engine.dtype": "bf16"}).evaluation.engine.name == "vllm"
    assert build({"evaluation.engine.dtype": "bf16"}).evaluation.engine.name == "transformers"

    for name in ("transformers", "vllm"):
        other = build(vllm, {"evaluation.engine": name}).evaluation.engine
        assert (other.name, other.dtype, other.quantization) == (name, "fp32", None)

    assert message(vllm, {"evaluation.engine.urls": "x"}).startswith("unknown setting 'evaluation.engine.urls'")


# Recipes, arms, overrides


def test_a_correction_by_name_has_that_corrections_defaults():
    assert build({"objective.correction": "tis"}).objective.correction == config.TISCorrection()
    assert build({"objective.correction": {"cap": 2.0, "name": "tis"}}).objective.correction.cap == 2.0
    assert build({"objective.correction": {"lam": 2.0}}).objective.correction == config_corrections.OBRSCorrection(
        lam=2.0
    )
    assert build({"rollout_model.correction": {"cap": 2.0}}).rollout_model.correction.name == "tis"


def test_two_engines_never_share_a_server():
    server = {"engine": {"name": "vllm_server", "urls": ["http://a:8000", "http://b:8000"], "weights_folder": "/w"}}
    assert "http://b:8000 is a server of both" in message(server, {"evaluation.engine.urls": ["http://b:8000/"]})
    for inherited in ({"max_num_seqs": 4}, {}):  # says nothing of urls, so it has those of engine
        assert "http://a:8000, http://b:8000 is a server of both" in message(server, {"evaluation.engine": inherited})
    assert build(server, {"evaluation.engine.urls": ["http://c:8000"]}).evaluation.engine.urls == ("http://c:8000",)


@pytest.mark.parametrize("filters", [{"top_p": 0.9}, {"top_k": 5}])
def test_servers_with_log_probs_before_filters_get_none(filters):
    servers = {"engine": {"name": "sglang_server", "urls": "http://127.0.0.1:1"}, "evaluation.engine": "transformers"}
    assert "before these filters" in message(servers, {"sampling": filters})
    assert build(servers).engine.name == "sglang_server"
    assert "before these filters" in message(
        {"evaluation.engine": {"name": "sglang_server", "urls": "http://127.0.0.1:1"}}, {"sampling": filters}
    )


def test_weights_reach_other_machines_through_a_folder():
    servers = {
        "engine": {"name": "vllm_server", "urls": ["http://127.0.0.1:8000", "http://localhost:1", "http://[::1]:2"]}
    }
    engine = {"evaluation.engine": "transformers"}

    assert build(servers, engine).engine.weights_folder is None
    for far in ("http://gpu7:8000", "http://127.gpu7.org:8000"):
        urls = [*servers["engine"]["urls"], far]
        assert f"null, but {far} may be another machine" in message(servers, {"engine.urls": urls}, engine)


def test_a_task_by_name_has_that_tasks_settings():
    assert build().task == build({"task": "arithmetic"}).task == config_tasks.ArithmeticConfig()
    assert build({"task": "tool_arithmetic"}).task == config_tasks.ToolArithmeticConfig()

    tool = {"name": "tool_arithmetic", "max_operand": 12}
    assert build({"task": tool}).task == config_tasks.ToolArithmeticConfig(max_operand=12)
    assert build({"task.max_operand": 12}).task == config_tasks.ArithmeticConfig(max_operand=12)
    assert "min_terms 4 is above max_terms 3" in message({"task": tool | {"min_terms": 4}})

    text = message({"task": tool | {"max_operands": 12}})
    assert text.startswith("unknown setting 'task.max_operands'; did you mean 'task.max_operand'?")


MATH = {"name": "math", "train": "gsm8k", "test": "math500"}


def test_data_and_rewards_have_short_forms():
    task = build({"task": MATH}).task
    assert (task.train.source, task.test.source) == ("gsm8k", "math500")
    assert [reward.name for reward in task.rewards] == ["correct"]

    long = {
        "train": {"source": "gsm8k", "limit": 5},
        "rewards": [{"name": "correct"}, {"name": "format", "weight": 0.5}],
    }

    changed = build({"task": MATH, "task.train.limit": 5, "task.rewards": ["correct", "format"]}).task
    assert changed.train == build({"task": MATH | long}).task.train
    assert [(reward.name, reward.weight) for reward in build({"task": MATH | long}).task.rewards] == [
        ("correct", 1.0),
        ("format", 0.5),
    ]
    assert [reward.name for reward in changed.rewards] == ["correct", "format"]
    assert build({"task": MATH, "task.rewards": "format"}).task.rewards == changed.rewards[1:]


@pytest.mark.parametrize(
    ("verdict", "name", "threshold"),
    [
        (0.5, "reward", 0.5),
        (-1, "reward", -1.0),
        ("correct", "correct", 1.0),
        ("a.b:c", "a.b:c", 1.0),
        ({"threshold": 2.0}, "reward", 2.0),
        ({"name": "a:b", "threshold": 0.25}, "a:b", 0.25),
    ],
)
def test_a_verdict_has_short_forms(verdict, name, threshold):
    task = build({"task": MATH | {"rewards": "a:b", "verdict": verdict}}).task
    assert (task.verdict.name, task.verdict.threshold) == (name, threshold) and task.decides == task.verdict
    assert build({"task": task.model_dump()}).task == task  # as a run folder holds it


def test_without_a_verdict_the_rewarded_answer_decides():
    assert build({"task": MATH}).task.decides == config_tasks.VerdictConfig(name="correct")
    assert build({"task": MATH | {"rewards": "a:b"}}).task.decides is None
    verified = {"rewards": ["a:b", {"name": "correct", "weight": 0.0}]}
    assert build({"task": MATH | verified}).task.decides.name == "correct"


def test_rewards_that_cannot_be_are_refused():
    assert "timeout was given for 'correct'" in message({"task": MATH | {"rewards": {"name": "correct", "timeout": 9}}})
    assert "all have weight 0" in message({"task": MATH | {"rewards": {"name": "correct", "weight": 0.0}}})
    assert "task.verdict.threshold" in message({"task": MATH | {"verdict": {"threshold": float("nan")}}})


def test_another_source_replaces_its_block_and_the_same_not():
    block = {"x": {"source": "own.jsonl", "columns": {"answer": "gold"}}}
    assert merge(block, {"x": "gsm8k"}) == {"x": {"source": "gsm8k"}}
    assert merge(block, {"x": {"source": "gsm8k"}}) == {"x": {"source": "gsm8k"}}
    assert merge(block, {"x": "own.jsonl"}) == block
    assert merge(block, {"x": {"limit": 5}}) == {"x": block["x"] | {"limit": 5}}

    named = build({"task": MATH, "task.train": "math500"}).task.train
    assert build({"task": MATH, "task.train.limit": 5, "task.train.source": "math500"}).task.train == named


def test_settings_of_data_that_do_not_go_together_are_refused():
    assert "rewards: format is given more than once" in message({"task": MATH, "task.rewards": ["format", "format"]})

    assert message({"task": MATH, "task.train.lmit": 5}).startswith(
        "unknown setting 'task.train.lmit'; did you mean 'task.train.limit'?"
    )
    assert (
        message({"task": {"name": "math", "train": "gsm8k"}}) == "task.test: is missing; it has no default, so set it"
    )

    assert message({"task": MATH, "task.train.limit": 0}).startswith("task.train.limit: 0 was given.")
    assert message({"task": MATH, "task.train": 3}).startswith("task.train: 3 was given, but")
    assert "did you mean 'plain'" in message({"task": MATH, "task.train.answers": "plane"})


def test_merge_goes_down_and_leaves_its_arguments_alone():
    base = {"a": {"b": 1, "c": {"d": 2}}, "e": [1, 2]}
    changes = {"a": {"c": {"d": 3, "f": 4}}, "e": [3], "g": None}
    merged = merge(base, changes)

    assert merged == {"a": {"b": 1, "c": {"d": 3, "f": 4}}, "e": [3], "g": None}
    assert base == {"a": {"b": 1, "c": {"d": 2}}, "e": [1, 2]}
    assert changes == {"a": {"c": {"d": 3, "f": 4}}, "e": [3], "g": None}


def test_another_name_replaces_its_block_and_the_same_not():
    base = {"x": {"name": "obrs", "lam": 2.0}}
    assert merge(base, {"x": {"name": "tis"}}) == {"x": {"name": "tis"}}
    assert merge(base, {"x": "tis"}) == {"x": {"name": "tis"}}
    assert merge(base, {"x": {"name": "obrs", "c1": 1.0}}) == {"x": {"name": "obrs", "lam": 2.0, "c1": 1.0}}
    assert merge(base, {"x": "obrs"}) == base
    assert merge(base, {"x": {"c1": 1.0}}) == {"x": {"name": "obrs", "lam": 2.0, "c1": 1.0}}


def test_a_change_inside_a_short_block_keeps_its_name():
    recipe = {"objective": {"correction": "tis"}}
    assert merge(recipe, nest("objective.correction.cap", 7.0))["objective"]["correction"] == {
        "name": "tis",
        "cap": 7.0,
    }


def test_flat_folds_blocks_and_keeps_an_empty_one():
    assert flat({"a": {"b": 1, "c": {"d": [2]}}, "e": {}}) == {"a.b": 1, "a.c.d": [2], "e": {}}


def test_nest_unfolds_dots():
    assert nest("a.b.c", 1) == {"a": {"b": {"c": 1}}} and nest("a", {"b": 1}) == {"a": {"b": 1}}


def test_overrides_beat_the_arm_and_the_arm_the_recipe():
    recipe = RECIPE | {
        "seed": 1,
        "description": "recipe",
        "arms": {"b": {"seed": 2, "description": "arm"}, "empty": None},
    }

    assert build_config(recipe).seed == 1
    assert build_config(recipe, "empty").seed == 1
    assert build_config(recipe, "b").seed == 2

    both = build_config(recipe, "b", [nest("seed", 3), nest("iterations", 9), nest("seed", 4)])
    assert (both.seed, both.description, both.iterations) == (4, "arm", 9)


@pytest.mark.parametrize("correction", ["tis", {"name": "tis"}])
def test_a_chosen_block_keeps_what_was_set_in_it_before(correction):
    typed = [nest("objective.correction.cap", 5.0), nest("objective.correction", correction), nest("seed", 1)]
    orders = [typed, typed[::-1], [typed[0], {"objective": {"correction": correction, "clip_low": 0.2}}]]
    for overrides in orders:
        chosen = build_config(RECIPE, overrides=overrides).objective.correction
        assert (chosen.name, chosen.cap) == ("tis", 5.0)

    later = [*typed, nest("objective.correction", {"name": "tis", "cap": 4.0})]
    assert build_config(RECIPE, overrides=later).objective.correction.cap == 4.0

    alone = [nest("rollout_model.share", 0.5), nest("rollout_model", None)]
    assert build_config(RECIPE, overrides=alone).rollout_model is None

    without = [nest("engine.draft.tokens", 4), nest("engine", {"name": "transformers", "draft": None})]
    assert build_config(RECIPE, overrides=without).engine.draft is None


def test_an_arm_may_exchange_the_correction():
    recipe = RECIPE | {
        "objective": {"correction": {"name": "obrs", "lam": 2.0}},
        "arms": {"tis": {"objective": {"correction": {"name": "tis", "cap": 2.0}}}, "obrs": {}},
    }

    assert build_config(recipe, "tis").objective.correction == config.TISCorrection(cap=2.0)
    assert build_config(recipe, "obrs").objective.correction == config_corrections.OBRSCorrection(lam=2.0)


def test_an_unknown_arm_lists_the_known_ones():
    recipe = RECIPE | {"arms": {"obrs": {}, "tis": {}}}
    with pytest.raises(ConfigError, match=r"unknown arm 'obsr'; did you mean 'obrs'\? Valid: obrs, tis"):
        build_config(recipe, "obsr")
    with pytest.raises(ConfigError, match=r"unknown arm 'obrs'\. Valid: \(none\)"):
        build_config(RECIPE, "obrs")


def test_a_mistake_in_an_arm_is_found_when_the_arm_is_used():
    recipe = RECIPE | {"arms": {"bad": {"objectiv": {}}}}
    build_config(recipe)
    with pytest.raises(ConfigError, match=r"unknown setting 'objectiv'"):
        build_config(recipe, "bad")


def test_a_resolved_config_is_a_recipe_for_itself():
    for changes in ({}, {"objective.correction": "tis", "rollout_model": None}, {"rollout_model.optimizer": None}):
        resolved = build(changes)
        assert build_config(resolved.model_dump(mode="json")) == resolved


# The classes themselves


def blocks(*roots):
    """List these classes of settings, and all classes of settings inside them."""
    classes = list(roots)
    for block in classes:
        for field in block.model_fields.values():
            classes += [cls for cls in model_classes(field.annotation) if cls not in classes]
    return classes


ROOTS = (Config, BenchmarksConfig, MismatchConfig, RecipeNotes)


@pytest.mark.parametrize("block", blocks(*ROOTS), ids=lambda block: block.__name__)
def test_every_block_and_every_setting_has_a_docstring(block):
    """The name that chooses a class is explained by the docstring of the class."""
    assert (block.__doc__ or "").strip(), block
    fields = {name: field for name, field in block.model_fields.items() if name != "name" or field.is_required()}
    assert [name for name, field in fields.items() if not field.description] == []


def test_settings_are_read_without_heavy_packages():
    modules = (path.relative_to(PACKAGE).with_suffix("").parts for path in sorted((PACKAGE / "config").rglob("*.py")))
    names = [".".join(["jackpot", *parts]).removesuffix(".__init__") for parts in modules]
    assert "jackpot.config.config" in names and "jackpot.config.recipes" in names

    bare = [name for name in names if not name.startswith("jackpot.config.recipes")]
    program = "\n".join(f"import {name}" for name in [*bare, "sys"]) + "\nassert 'yaml' not in sys.modules\n"
    program += "\n".join(f"import {name}" for name in names)
    program += "\nprint({'torch', 'transformers', 'numpy', 'rich', 'typer'} & sys.modules.keys())"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stdout + done.stderr


@pytest.mark.parametrize("block", blocks(*ROOTS), ids=lambda block: block.__name__)
def test_every_block_is_frozen_and_refuses_unknown_keys(block):
    assert block.model_config["frozen"] and block.model_config["extra"] == "forbid"


def test_settings_cannot_be_changed_after_they_are_read():
    resolved = build()
    for target in (resolved, resolved.objective, resolved.objective.correction, resolved.sampling):
        with pytest.raises(pydantic.ValidationError, match="frozen"):
            setattr(target, next(iter(type(target).model_fields)), 1)


def test_the_defaults_are_those_of_the_paper():
    correction = build(OBRS).objective.correction
    assert (correction.lam, correction.c1, correction.c2) == (1.0, 3.0, 3.0)
    assert (correction.mask, correction.target, correction.kappa) == ("sampled", "old", "auto")
    assert build().sampling.num_top_log_probs == 20
    assert build().objective.count == "proposed"
    assert build().rollout_model.distill == "forward"


def test_every_name_that_a_setting_allows_exists_in_the_code():
    """And the other way round: what is registered can be chosen."""

    def allowed(block, field):
        return set(re.findall(r"'([\w-]+)'", str(block.model_fields[field].annotation)))

    assert allowed(config_objective.ObjectiveConfig, "advantage") == advantages.ADVANTAGES.keys() | {"gae"}
    assert allowed(config_objective.ReferenceConfig, "kl_loss_type") == losses.SAMPLED_KL.keys() | {"exact"}
    assert allowed(config_objective.ObjectiveConfig, "surrogate") == losses.SURROGATES.keys()
    assert allowed(config_objective.ObjectiveConfig, "loss_agg_mode") == losses.LOSS_AGG_MODES.keys()
    assert allowed(config_objective.ObjectiveConfig, "count") == joint.COUNTS.keys()
    assert allowed(config_corrections.OBRSCorrection, "mask") == MASKS.keys()
    assert allowed(config_corrections.OBRSCorrection, "beyond_c1") == BEYOND_C1.keys()
    assert allowed(config_corrections.OBRSCorrection, "normalizer") == joint.NORMALIZERS.keys()
    assert allowed(config.RolloutModelConfig, "distill") == losses.DISTILLATIONS.keys()
    assert allowed(config_corrections.OBRSCorrection, "proximal") == joint.references(*[torch.zeros(1)] * 3).keys()

    names = {block.model_fields["name"].default for block in blocks(Config) if block.__name__.endswith("Correction")}
    assert names == corrections.CORRECTIONS.keys() | {"custom"}
    tasks = model_classes(Config.model_fields["task"].annotation)
    assert {task.model_fields["name"].default for task in tasks} == TASKS.keys() | {"custom"}


def parameter_defaults(tree, names):
    """(line, name, source of the default) of every parameter with one of these names that has one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            positional = [*node.args.posonlyargs, *node.args.args]
            # defaults are those of the last parameters
            by_position = zip(positional[::-1], node.args.defaults[::-1], strict=False)
            by_name = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            for parameter, default in [*by_position, *by_name]:
                if default is not None and parameter.arg in names:
                    yield node.lineno, parameter.arg, ast.unparse(default)


@pytest.mark.seconds
def test_a_default_is_written_once():
    """No function or class elsewhere gives a parameter the name and the default of a setting."""
    # name and default of every setting but names and seeds
    defaults = {
        (name, repr(field.default))
        for module in (config, config_corrections, config_objective)
        for block in vars(module).values()
        if isinstance(block, type) and issubclass(block, pydantic.BaseModel)
        for name, field in block.model_fields.items()
        if isinstance(field.default, int | float | str | bool) and name not in ("name", "seed")
    }
    names = {name for name, _ in defaults}

    repeated = [
        f"{path.relative_to(PACKAGE)}:{line} {name} = {value}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if "config" not in path.relative_to(PACKAGE).parts
        for line, name, value in parameter_defaults(ast.parse(path.read_text()), names)
        if (name, value) in defaults
    ]

    assert repeated == []


@pytest.mark.parametrize("arms", [["x"], {"x": "none"}, 3])
def test_arms_that_are_no_mapping_of_mappings_are_refused(arms):
    with pytest.raises(ConfigError, match="arms"):
        build_config(RECIPE | {"arms": arms}, "x")


@pytest.mark.parametrize(
    ("key", "value"),
    [("betas", [0.9]), ("betas", [0.9, 1.0]), ("learning_rate", math.inf), ("learning_rate", math.nan)],
)
def test_numbers_that_no_optimizer_can_use_are_refused(key, value):
    with pytest.raises(ConfigError, match=f"policy.optimizer.{key}"):
        build_config(RECIPE, overrides=[nest(f"policy.optimizer.{key}", value)])


CAPS = ("objective.correction.c1", "objective.correction.c2", "policy.optimizer.max_grad_norm")


@pytest.mark.parametrize("value", ["null", ".inf"])
@pytest.mark.parametrize("key", CAPS)
def test_no_cap_is_null_or_inf_and_is_read_back(key: str, value: str) -> None:
    config = resolve("quickstart", "obrs", [f"{key}={value}"])
    assert attrgetter(key)(config) == math.inf
    assert validated(Config, settings_of(config)) == config
