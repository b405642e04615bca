"""`--tiny`: what it changes of a recipe, what it leaves, and that every architecture of the recipes trains that way."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from helpers.runs import run, weights
from helpers.trainable import learned
from jackpot.analysis.plan.tiny import TinyRun, make_tiny, replaced_models, tiny
from jackpot.analysis.plan.tiny_models import BYTES, own_tokenizer
from jackpot.config.arms import build_config
from jackpot.config.config import Config
from jackpot.config.engines import DraftConfig
from jackpot.config.recipes import load_recipe, recipe_names, resolve
from jackpot.config.tasks import ColumnsConfig
from jackpot.core.errors import CheckpointError, DataError, ModelError
from jackpot.models.load import check_same_tokenizer, load_config, load_tokenizer
from jackpot.rollout.tasks.base import PromptStream
from jackpot.rollout.tasks.data import DATA_FOLDER
from jackpot.rollout.tasks.math import Math

# Settings that `--tiny` may change; the rest of a recipe stays.
MAY_CHANGE = {
    "iterations", "device", "policy.path", "rollout_model.path", "critic.path", "objective.reference.path",
    "objective.overlong_buffer.len",
    "task.train.source", "task.train.subset", "task.train.split", "task.train.limit",
    "task.test.source", "task.test.subset", "task.test.split", "task.test.limit",
    "task.train.columns.problem", "task.train.columns.answer", "task.train.answers",
    "task.test.columns.problem", "task.test.columns.answer", "task.test.answers",
    "task.train",  # a mixture, each part as above
    "task.max_prompt_tokens", "task.reward_workers", "sampling.max_new_tokens", "sampling.stop_token_ids",
    "batch.prompts", "batch.group_size", "batch.mini_batch_size", "batch.micro_batch_tokens",
    "evaluation.problems", "evaluation.k", "evaluation.benchmarks",
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _without_data() -> Iterator[None]:
    """No folder has problems of benchmarks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(DATA_FOLDER, raising=False)
        yield


def flat(value: object, key: str = "") -> dict[str, object]:
    """Return nested settings by their dotted names."""
    if not isinstance(value, dict):
        return {key: value}
    return {name: item for field in value for name, item in flat(value[field], f"{key}.{field}".strip(".")).items()}


def small(config: Config) -> Config:
    """Return what `--tiny` makes of a config, without making models."""
    return tiny(config, replaced_models(config), Path("folder"))


def user_config(**settings: object) -> Config:
    """Make the config of a user's own recipe."""
    recipe = {
        "iterations": 100,
        "task": {"name": "math", "train": "gsm8k", "test": "gsm8k"},
        "policy": {"path": "Qwen/Qwen2.5-1.5B-Instruct", "optimizer": {"learning_rate": 1.0e-3}},
        "rollout_model": None,
        "batch": {"prompts": 64, "group_size": 8},
        "engine": "vllm",
    }

    changes = [{key: value} for key, value in settings.items()]
    return build_config(recipe, arm=None, overrides=changes)


# What changes

ENGINES = ("engine.", "evaluation.engine.")  # another engine has other settings


def assert_only_the_size_changes(config: Config) -> None:
    """Compare a recipe's config with what `--tiny` makes of it, setting by setting."""
    result = small(config)
    before, after = flat(config.model_dump()), flat(result.model_dump())
    changed = {key for key in before if before[key] != after.get(key) and not key.startswith(ENGINES)}
    added = {key for key in after.keys() - before.keys() if not key.startswith(ENGINES)}
    assert changed <= MAY_CHANGE
    assert added == set()

    kernels = ("engine.attn_implementation", "engine.quantization", "engine.kv_cache_dtype")
    assert all(after[key] == before[key] for key in kernels if key in before)

    assert result.batch.steps_per_iteration == config.batch.steps_per_iteration
    assert result.batch.rollouts <= max(32, 2 * config.batch.steps_per_iteration)
    assert min(config.batch.group_size, 2) <= result.batch.group_size <= 4

    longest = min(config.sampling.max_new_tokens, 32)
    assert result.iterations == 2 and result.sampling.max_new_tokens == longest

    assert result.engine.name == "transformers" and result.engine.dtype == config.engine.dtype
    assert (result.evaluation.engine is None) == (config.evaluation.engine is None)
    assert result.evaluation.engine is None or result.evaluation.engine.name == "transformers"
    assert result.evaluation.problems <= 4 and min(config.evaluation.k, 2) == result.evaluation.k

    if config.task.name == "math":
        assert result.task.test.source.startswith("folder/data/test/")
        assert result.batch.micro_batch_tokens < 600 < config.batch.micro_batch_tokens


@pytest.mark.parametrize("recipe", recipe_names())
def test_of_every_arm_only_the_size_changes(recipe: str) -> None:
    for arm in load_recipe(recipe)["arms"]:
        assert_only_the_size_changes(resolve(recipe, arm, []))


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"prompts": 512, "group_size": 8, "mini_batch_size": 64}, (32, 4, 2)),  # 64 steps of 2
        ({"prompts": 64, "group_size": 8}, (8, 4, None)),  # 1 step of 32
        ({"prompts": 21, "group_size": 6, "mini_batch_size": 18}, (14, 4, 8)),  # 7 steps: 56 is the least above 32
        ({"prompts": 21, "group_size": 6, "mini_batch_size": 18, "ppo_epochs": 3}, (14, 4, 8)),
        ({"prompts": 2, "group_size": 8, "mini_batch_size": 4}, (2, 8, 4)),  # is small
        ({"prompts": 300, "group_size": 2, "mini_batch_size": 200}, (18, 2, 12)),  # 3 steps
    ],
)
def test_a_batch_keeps_its_optimizer_steps(batch: dict, expected: tuple) -> None:
    config = user_config(batch=batch)
    result = small(config).batch
    assert (result.prompts, result.group_size, result.mini_batch_size) == expected
    assert result.steps_per_iteration == config.batch.steps_per_iteration


def test_lengths_keep_proportions_and_stop_tokens_meaning() -> None:
    overlong = {"len": 1024, "penalty_factor": 1.0}
    result = small(user_config(sampling={"max_new_tokens": 8192}, objective={"overlong_buffer": overlong}))

    assert result.objective.overlong_buffer.len == 4 and result.objective.overlong_buffer.penalty_factor == 1.0
    assert small(resolve("frozen_3b", None, [])).sampling.stop_token_ids == (256,)  # <end>, after all bytes
    assert small(user_config()).sampling.stop_token_ids == ()
    assert small(user_config(sampling={"num_top_log_probs": 1000})).sampling.num_top_log_probs == 128


def test_each_path_becomes_one_model() -> None:
    reference = {"path": "Qwen/Qwen2.5-1.5B-Instruct"}
    critic = {"path": "Qwen/Qwen2.5-7B", "optimizer": {"learning_rate": 1.0e-3}}
    result = small(
        user_config(
            objective={"reference": reference, "advantage": "gae"},
            critic=critic,
            rollout_model={"path": "Qwen/Qwen2.5-32B", "optimizer": None},
        )
    )

    assert result.policy.path == result.objective.reference.path == "folder/models/Qwen--Qwen2.5-1.5B-Instruct"
    assert result.critic.path == "folder/models/Qwen--Qwen2.5-7B"
    assert result.rollout_model.path == "folder/models/Qwen--Qwen2.5-32B"


def test_a_gpu_is_not_needed_and_nothing_is_sent() -> None:
    assert small(resolve("quickstart", None, ["tracking.wandb={project: mine}"])).tracking.wandb is None
    assert small(user_config(device="cuda")).device == "auto" and small(user_config(device="cpu")).device == "cpu"


def test_servers_become_transformers_too() -> None:
    server = {"name": "vllm_server", "urls": ["http://a:1"], "weights_folder": "/w", "dtype": "bf16"}
    result = small(user_config(engine=server, evaluation={"engine": {"name": "vllm", "dtype": "bf16"}}))
    assert {(engine.name, engine.dtype) for engine in (result.engine, result.evaluation.engine)} == {
        ("transformers", "bf16")
    }


def test_an_engine_of_another_kind_keeps_drafts_and_head() -> None:
    engine = {"name": "vllm", "draft": {"tokens": 3}, "head_dtype": "fp32"}
    rollout_model = {"path": "starter:rollout_model", "optimizer": {"learning_rate": 1e-4}, "share": 0.0}
    result = small(user_config(engine=engine, rollout_model=rollout_model))

    assert (result.engine.name, result.engine.head_dtype, result.draft) == (
        "transformers",
        "fp32",
        DraftConfig(tokens=3),
    )


def test_starters_and_small_models_of_ones_own_stay(tmp_path: Path) -> None:
    config = resolve("quickstart", None, [])
    assert (small(config).policy, small(config).rollout_model) == (config.policy, config.rollout_model)
    folder = make_tiny(user_config(), tmp_path).config.policy.path
    config = user_config(policy={"path": folder})
    assert small(config).policy.path == folder


def test_a_large_folder_is_replaced_by_its_architecture(tmp_path: Path) -> None:
    settings = Qwen2Config(vocab_size=200_000, hidden_size=64, num_hidden_layers=1, num_attention_heads=2)
    settings.save_pretrained(tmp_path / "mine")
    config = user_config(policy={"path": str(tmp_path / "mine")})
    assert replaced_models(config).configs[config.policy.path].model_type == "qwen2"
    assert small(config).policy.path.endswith("--mine")


def test_a_model_whose_architecture_cannot_be_found_is_refused() -> None:
    with pytest.raises(
        ModelError,
        match=r"the architecture of 'my/model', whose config\.json was not found.*starter:.*"
        r"give a folder that has the model's config\.json.*models/published\.py",
    ):
        small(user_config(policy={"path": "my/model"}))


# Tokenizers


def large_model(folder: Path, words: int | None) -> str:
    """Save the config of a large model and, unless `words` is None, a tokenizer with that many words more."""
    Qwen2Config(vocab_size=200_000, hidden_size=64, num_hidden_layers=1, num_attention_heads=2).save_pretrained(folder)
    if words is not None:
        tokenizer = own_tokenizer(BYTES)
        tokenizer.add_tokens([f"word{index}" for index in range(words)])
        tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("words", "others"), [(3, None), (3, 4), (None, 3)])
def test_all_models_take_the_policys_tokenizer_or_bytes(words: int | None, others: int | None, tmp_path: Path) -> None:
    policy, rollout_model = large_model(tmp_path / "a", words), large_model(tmp_path / "b", others)
    config = user_config(policy={"path": policy}, rollout_model={"path": rollout_model, "optimizer": None})

    made = make_tiny(config, tmp_path / "tiny")
    tokenizers = [load_tokenizer(model.path) for model in (made.config.policy, made.config.rollout_model)]

    check_same_tokenizer(*tokenizers)
    assert ("word2" in tokenizers[0].get_vocab()) == (words is not None)

    listed = [recipe for key, recipe, _ in made.changes if key == "tokenizer"]
    assert listed == ([] if words else ["the policy's own (not on this disk)"])


def test_a_small_model_is_replaced_beside_a_large_one(tmp_path: Path) -> None:
    other = {"path": large_model(tmp_path / "b", words=None), "optimizer": None}
    config = user_config(policy={"path": "starter:text_policy"}, rollout_model=other)
    made = make_tiny(config, tmp_path / "tiny").config
    assert made.policy.path == str(tmp_path / "tiny" / "models" / "starter--text_policy")
    check_same_tokenizer(*(load_tokenizer(path) for path in (made.policy.path, made.rollout_model.path)))


# Runs


SHORTENED = (
    "policy.optimizer.learning_rate=1e-3",
    "iterations=1",
    "threads=1",
    "sampling.max_new_tokens=16",
    "evaluation.benchmarks=[gsm8k]",
)


@pytest.fixture(scope="module")
def joint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Config, TinyRun, list[dict]]:
    """A tiny run of a recipe with two models: its folder, the recipe's config, what was made of it, and its metrics."""
    folder = tmp_path_factory.mktemp("joint")
    config = resolve("joint_3b", "jackpot", SHORTENED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jackpot.analysis.plan.tiny.SEQUENCES", 16)
        made = make_tiny(config, folder / "tiny")
    return folder, config, made, run(made.config, folder)


def test_a_recipe_runs_without_hub_or_data(joint) -> None:
    folder, _, made, lines = joint
    _, line = lines

    learned(line)
    assert line["mismatch/kl_rollout_policy"] > 0.01 and 0.3 < line["obrs/acceptance"] < 0.99
    assert math.isfinite(line["eval/gsm8k/mean_at_k"])
    assert len((folder / "eval" / "iteration-000001-gsm8k.jsonl").read_text().splitlines()) == 4 * 2
    assert len(made.data) == 3 and all("made up in place of" in line for line in made.data)

    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    shown = {(event["split"], event["source"], event["rows"]) for event in events if event["event"] == "data"}
    assert shown >= {("train", "math", 4), ("test", "math500", 4)}


def test_small_models_have_the_architecture_and_train_whole(joint) -> None:
    folder, config, made, _ = joint
    before, small_one = (
        AutoModelForCausalLM.from_pretrained(path) for path in (made.config.policy.path, made.config.rollout_model.path)
    )
    like = load_config(config.policy.path)

    assert before.config.model_type == small_one.config.model_type == like.model_type
    assert before.config.tie_word_embeddings == like.tie_word_embeddings
    assert small_one.num_parameters() < before.num_parameters() / 2

    after = weights(folder, "policy")
    moved = [not torch.equal(after[name], value) for name, value in before.state_dict().items() if name in after]
    assert len(moved) == len(after) and all(moved)

    saved = load_tokenizer(folder / "checkpoints" / "last" / "policy")
    assert saved.eos_token_id == own_tokenizer(BYTES).eos_token_id and len(saved) > len(own_tokenizer(BYTES))


def test_the_changes_told_are_the_settings_that_differ(joint) -> None:
    _, config, made, _ = joint
    shown = {key: (old, new) for key, old, new in made.changes}

    assert shown["engine"] == ("vllm", "transformers") and shown["batch.group_size"][1] == 4

    before, after = flat(config.model_dump()), flat(made.config.model_dump())
    differing = {key for key in before if before[key] != after.get(key)}
    engines = {"engine", "evaluation.engine"}

    assert shown.keys() == {key for key in differing if not key.startswith(ENGINES)} | engines | {"tokenizer"}
    assert all((before[key], after[key]) == shown[key] for key in shown.keys() - engines - {"tokenizer"})
    assert shown["tokenizer"] == ("the policy's own (not on this disk)", "bytes, plain chat format")


def test_the_same_again_finds_the_run_and_its_models(joint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jackpot.analysis.plan.tiny.SEQUENCES", 16)
    folder, config, made, _ = joint
    stamps = {path: path.stat().st_mtime_ns for path in (folder / "tiny").rglob("*")}

    again = make_tiny(config, folder / "tiny")

    assert again.config == made.config and run(again.config, folder) == []
    assert {path: path.stat().st_mtime_ns for path in (folder / "tiny").rglob("*")} == stamps


# Data


def rows_of(made: TinyRun, file: str) -> list[dict]:
    """Read a file of the data that was made."""
    path = Path(made.config.policy.path).parents[1] / "data" / file
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_benchmarks_that_are_here_give_their_first_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATA_FOLDER, str(tmp_path))
    real = [{"question": f"{index} " + "é" * 300, "answer": f"so\n#### 1{index}"} for index in range(9)]
    (tmp_path / "gsm8k_train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in real))

    made = make_tiny(user_config(), tmp_path / "tiny")

    assert made.data == [
        "train/gsm8k.jsonl: the first problems of gsm8k",
        "test/gsm8k.jsonl: made up in place of the problems of gsm8k",
    ]

    rows = rows_of(made, "train/gsm8k.jsonl")
    assert [row["answer"] for row in rows] == [[f"1{index}"] for index in range(4)]
    assert [row["problem"] for row in rows] == [f"{index} " + "é" * 149 for index in range(4)]  # 300 bytes

    ids = load_tokenizer(made.config.policy.path).encode(r"\boxed{10}\boxed{13}\boxed{14}", add_special_tokens=False)
    assert len(ids) > 3 and sum(token_id >= 258 for token_id in ids) == 2  # 14 is of the fifth


def test_a_file_of_ones_own_is_read_with_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps([{"q": f"what is {index}?", "a": index + 0.0, "when": "now"} for index in range(9)]))
    data = {"source": str(path), "columns": {"problem": "q", "answer": "a"}}
    config = user_config(task={"train": data, "test": data}, evaluation={"benchmarks": [str(path)]})

    made = make_tiny(config, tmp_path / "tiny")
    files = ("train/mine.jsonl", "test/mine.jsonl", "benchmarks/mine.jsonl")
    first, *others = (rows_of(made, file) for file in files)

    assert all(rows == first for rows in others)
    assert first[3] == {"id": "3", "problem": "what is 3?", "answer": ["3"]}

    prompts = PromptStream(Math(own_tokenizer(BYTES), made.config.task), "train", seed=0).next(4)
    assert {prompt.answer for prompt in prompts} == {str(index) for index in range(4)}  # the 4 rows, each once


@pytest.mark.parametrize("source", ["hub:some/body", "nowhere/mine.jsonl", "nowhere/folder"])
def test_what_is_not_here_is_made_up_in_columns_of_its_own(source: str, tmp_path: Path) -> None:
    columns = {"problem": "{a.b} {c}", "answer": "reward_model.ground_truth", "options": ["x", "y"], "uid": "key"}
    train = {"source": source, "columns": columns, "answers": {"regex": "is (.*)"}}
    parts = {"subset": "all", "split": "part"}  # of the hub; a file has neither

    made = make_tiny(user_config(task={"train": train | parts, "test": "gsm8k"}), tmp_path / "tiny")
    settings = made.config.task.train

    assert (settings.columns, settings.answers, settings.subset) == (ColumnsConfig(), None, None)

    rows = [json.loads(line) for line in Path(settings.source).read_text().splitlines()]
    assert len(rows) == 4 and all(row.keys() == {"problem", "answer", "id"} for row in rows)


def test_each_source_gets_a_file_and_long_texts_are_cut(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s" * 5000}, {"role": "user", "content": "u" * 5000}]
    chat = [{"prompt": messages, "reward_model": {"ground_truth": "1"}} for _ in range(9)]
    parts = [{"Body": "b" * 5000, "Question": "q" * 5000, "answer": ["2"]} for _ in range(9)]
    (tmp_path / "train.json").write_text(json.dumps(chat))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train.json").write_text(json.dumps(parts))
    train = [
        {
            "source": str(tmp_path / "train.json"),
            "columns": {"problem": "prompt", "answer": "reward_model.ground_truth"},
        },
        {"source": str(tmp_path / "other" / "train.json"), "columns": {"problem": "{Body} {Question}"}, "weight": 2.0},
        "gsm8k",
    ]

    made = make_tiny(user_config(task={"train": train, "test": "gsm8k"}), tmp_path / "tiny")
    task = Math(own_tokenizer(BYTES), made.config.task)
    room = made.config.batch.micro_batch_tokens - made.config.sampling.max_new_tokens

    assert all(len(task.prompt("train", index).token_ids) <= room for index in range(12))

    files = ["train/train.jsonl", "train1/train.jsonl", "train2/gsm8k.jsonl"]
    assert [dataset.source for dataset in made.config.task.train] == [
        str(tmp_path / "tiny" / "data" / file) for file in files
    ]
    assert [dataset.weight for dataset in made.config.task.train] == [1.0, 2.0, 1.0]

    (system, user), body = (rows_of(made, file)[0]["problem"] for file in files[:2])
    assert (system["role"], user["role"]) == ("system", "user")
    assert len(system["content"]) + len(user["content"]) == len(body) == 300


def test_what_is_wrong_with_the_data_is_told_as_in_any_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="unknown benchmark 'gsm8kk'"):
        make_tiny(user_config(task={"train": "gsm8kk"}), tmp_path)

    (tmp_path / "bad.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    config = user_config(task={"train": str(tmp_path / "bad.jsonl")})
    with pytest.raises(DataError, match="no column 'problem'"):
        make_tiny(config, tmp_path / "tiny")


def test_another_recipe_in_the_folder_of_a_run_is_refused(joint) -> None:
    folder = joint[0]
    made = make_tiny(resolve("joint_4b", "jackpot", []), folder / "tiny")
    with pytest.raises(CheckpointError, match="other settings"):
        run(made.config, folder)
