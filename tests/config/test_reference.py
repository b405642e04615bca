"""`jackpot config` finds every setting and block, with its values, default and users, and prints them."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, get_args

import pytest
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from helpers.commands import jackpot
from jackpot.config.base import model_classes
from jackpot.config.config import Config
from jackpot.config.reference import COMMANDS, blocks, find, own_settings, settings
from jackpot.core.errors import ConfigError

SETTINGS = settings(*COMMANDS)
# Blocks that say what differs from another block.
DIFFERENCES = ("evaluation.engine.", "critic.optimizer.")


@pytest.mark.parametrize(
    ("key", "values", "default", "users"),
    [
        ("iterations", "integer >= 1", "required", "jackpot train"),
        ("threads", "integer >= 1 or auto", "auto", "jackpot train, jackpot eval, jackpot mismatch"),
        ("sampling.top_p", "number > 0 and <= 1", "1.0", "jackpot train, jackpot eval, jackpot mismatch"),
        ("policy.optimizer.betas", "list of 2: each number >= 0 and < 1", "[0.9, 0.99]", "jackpot train"),
        ("policy.optimizer.learning_rate", "number > 0 and finite", "required", "jackpot train"),
        ("policy.lora.target_modules", "list of strings (at least one)", "[all-linear]", "jackpot train"),
        (
            "engine.name",
            "transformers, vllm, vllm_server or sglang_server",
            "transformers",
            "jackpot train, jackpot eval",
        ),
        ("engine.dtype", "fp32 or bf16", "fp32", "jackpot train, jackpot eval"),
        (
            "engine.enforce_eager",
            "true, false or auto",
            "auto",
            "jackpot train, jackpot eval, with engine=transformers or vllm",
        ),
        (
            "task.train.limit",
            "integer >= 1 or null",
            "null",
            "jackpot train, jackpot eval, jackpot mismatch, with task=math",
        ),
        ("task.rewards[].name", "string", "required", "jackpot train, jackpot eval, jackpot mismatch, with task=math"),
        (
            "objective.correction.cap",
            "number > 0 or null",
            "3.0 (tis, min_prefix); 5.0 (drop); 2.0 (seq_tis, f_tis); 20.0 (dppo)",
            "jackpot train, with objective.correction=tis, drop, seq_tis, min_prefix, f_tis or dppo",
        ),
        (
            "sampling.max_new_tokens",
            "integer >= 1",
            "256; 4096 (jackpot eval)",
            "jackpot train, jackpot eval, jackpot mismatch",
        ),
        ("critic.optimizer", "settings of policy.optimizer", "required", "jackpot train"),
        ("evaluation.engine", "settings of engine", "null", "jackpot train"),
    ],
)
def test_a_setting_has_its_values_its_default_and_its_users(key: str, values: str, default: str, users: str) -> None:
    setting = SETTINGS[key]
    assert (setting.summary("values"), setting.summary("default"), setting.users) == (values, default, users)


@pytest.mark.parametrize(
    ("key", "resume"),
    [
        ("iterations", "may change"),
        ("engine.max_num_seqs", "may change"),
        ("device", "may change"),
        ("objective.clip_low", "must stay the same"),
        ("engine.dtype", "must stay the same"),
        ("top_log_probs", ""),  # of jackpot mismatch, which continues nothing
    ],
)
def test_a_setting_says_whether_it_may_change_in_a_run(key: str, resume: str) -> None:
    assert SETTINGS[key].resume == resume


def test_where_alternatives_differ_each_says_its_own_meaning() -> None:
    meaning = SETTINGS["objective.correction.low"].summary("meaning")
    assert meaning.startswith("icepop: Smallest rho of a token") and "seq_mask: Smallest R of a response" in meaning


def test_every_setting_and_every_block_has_a_meaning() -> None:
    assert [key for key, setting in SETTINGS.items() if not setting.summary("meaning")] == []
    assert [key for command in COMMANDS for key, block in blocks(command).items() if not block.meaning] == []


def test_a_number_without_bound_is_read_again_as_it_was() -> None:
    """JSON, and so config.yaml, has no inf: it is refused, or null stands for it."""

    def fields(kind: type) -> Iterator[tuple[str, FieldInfo]]:
        for name, field in kind.model_fields.items():
            yield f"{kind.__name__}.{name}", field
            for below in model_classes(field.annotation):
                yield from fields(below)

    accepted = []
    for name, field in dict(fields(Config)).items():
        adapter = TypeAdapter(Annotated[field.annotation, field])
        try:
            value = adapter.validate_python(math.inf, strict=True)
        except ValidationError:
            continue
        accepted.append(name)
        assert adapter.validate_json(adapter.dump_json(value)) == value, name

    assert "OBRSCorrection.c1" in accepted and "ObjectiveConfig.clip_high" not in accepted


def test_every_setting_of_a_run_is_found() -> None:
    """Counted by another walk: every field of every class that holds no class itself."""

    def leaves(kind: type, prefix: str = "") -> set[str]:
        keys = set()
        for name, field in kind.model_fields.items():
            classes = model_classes(field.annotation)
            below = f"{prefix}{name}" + ("[]." if name in ("rewards", "benchmarks", "dataset") else ".")
            keys |= set().union(*(leaves(cls, below) for cls in classes)) if classes else {prefix + name}
            # a number or a block
            if classes and any(float in get_args(alternative) for alternative in get_args(field.annotation)):
                keys.add(prefix + name)
        return keys

    expected = {key for key in leaves(Config) if not key.startswith(DIFFERENCES)}
    assert settings("train").keys() == expected | {block.removesuffix(".") for block in DIFFERENCES}


def test_a_block_is_found_with_choices_and_settings_below() -> None:
    engines, below = find("engine")
    assert {block.command for block in engines} == {"train", "eval"}
    assert [name for name, _ in engines[0].variants] == ["transformers", "vllm", "vllm_server", "sglang_server"]
    assert all(setting.key.startswith("engine.") for setting in below) and len(below) == 20

    below = find("task.rewards")[1]
    assert [setting.key for setting in below][:2] == ["task.rewards[].name", "task.rewards[].weight"]
    assert find("learners.0.autocast")[1] == [SETTINGS["learners[].autocast"]]
    assert find("evaluation.engine.dtype")[1] == [SETTINGS["engine.dtype"]]


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("temperature", "did you mean sampling.temperature, evaluation.sampling.temperature or"),
        ("objective.clip_lo", "did you mean objective.clip_low"),
        ("batch.epochs", "unknown setting 'batch.epochs'; did you mean batch.ppo_epochs, "),
        ("qqqqq", "unknown setting 'qqqqq'. jackpot config --all lists all of them"),
        ("", "unknown setting ''. jackpot config --all lists all of them"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_ones(key: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        find(key)
    assert message in str(error.value)


def test_the_other_commands_show_what_they_have_in_addition() -> None:
    additional, shared = own_settings("eval")

    assert {"model", "benchmarks", "k", "problems"} <= {setting.key for setting in additional}
    assert shared == [
        "arithmetic",
        "tool_arithmetic",
        "sums",
        "math",
        "columns",
        "answers",
        "task",
        "engine",
        "sampling",
    ]
    assert not {"engine.dtype", "math.template"} & {setting.key for setting in additional}


def test_the_command_prints_all_one_and_what_is_near(tmp_path: Path) -> None:
    everything = jackpot("config", "--all", cwd=tmp_path)
    assert everything.returncode == 0 and all(key in everything.stdout for key in settings("train"))

    short = jackpot("config", cwd=tmp_path, COLUMNS="80").stdout
    assert all(block in short for block in ("rollout_model", "objective", "placement", "jackpot mismatch"))
    assert "objective.clip_high" not in short and max(map(len, short.splitlines())) <= 80

    cap = jackpot("config", "objective.correction.cap", cwd=tmp_path).stdout.splitlines()
    assert cap[:3] == [
        "objective.correction.cap",
        "  values   number > 0 or null",
        "  default  3.0 (tis, min_prefix); 5.0 (drop); 2.0 (seq_tis, f_tis); 20.0 (dppo)",
    ]

    block = jackpot("config", "engine", cwd=tmp_path).stdout
    assert "`engine=vllm`: vLLM decodes in the learner's process" in block and "engine.max_num_seqs" in block

    wrong = jackpot("config", "clip_lo", cwd=tmp_path)
    assert (
        wrong.returncode == 2
        and "did you mean rollout_model.clip_low, critic.clip or objective.clip_low?" in wrong.stderr
    )


def test_a_setting_that_is_a_number_or_a_block_is_both():
    blocks, (share, *below) = find("rollout_model.share")
    assert blocks == [] and (share.summary("values"), share.summary("default")) == (
        "number >= 0 and <= 1 or a block",
        "1.0",
    )
    assert [setting.key.rpartition(".")[2] for setting in below] == ["schedule", "start", "end", "hold", "until"]
