"""Every refusal of settings: what it tells to do, typed as it stands there, is accepted.

A remedy is read from the error: its part after the last semicolon, of which each alternative is tried. A name without
its block is typed as it is, in the block that the error begins with, or where the answer to an unknown setting guesses.
"""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import jackpot
from helpers.refusals import is_provoked, texts_of
from jackpot.config.build import keys_of
from jackpot.config.config import Config
from jackpot.config.processes import place_engines
from jackpot.config.recipes import resolve
from jackpot.core.errors import ConfigError, EngineError
from jackpot.launch.checks import check_start
from jackpot.ui.cli import main

APART = ("published.py", "reference.py")  # of tables and of names
PACKAGE = Path(jackpot.__file__).parent
KEYS = keys_of(Config)
NAMES = "|".join(sorted({key.rpartition(".")[2] for key in KEYS}, key=len, reverse=True))
KEY = rf"(?:[a-z_]+\.)*(?:{NAMES})\b"
VALUE = r"\{[^}]*\}|[^\s,;]+"
STEP = re.compile(
    rf"leave (?P<left>{KEY}(?:(?:, | and ){KEY})*) out"
    rf"|(?P<key>{KEY})(?:(?:=|: | to )(?P<value>{VALUE})| (?P<plain>[\d.]+|null|true|false|fp32|bf16)\b)"
)


class Refused(NamedTuple):
    """Settings that are refused, and what is typed for alternatives that leave a choice: None for those of no use."""

    settings: tuple[str, ...]
    chosen: Mapping[str, tuple[str, ...] | None] = {}
    ranks: int = 0  # that are to start with these settings; 0: they are refused before


SERVER = "engine={name: vllm_server, urls: 'http://127.0.0.1:1'}"
SGLANG = ("engine={name: sglang_server, urls: 'http://127.0.0.1:1'}", "evaluation.engine=transformers")
EVALUATES = ("evaluation.engine={name: sglang_server, urls: 'http://127.0.0.1:1'}",)
OTHER = "evaluation.engine={name: vllm_server, urls: 'http://127.0.0.1:2'}"
EXACT = "objective.correction.normalizer=exact"
CONTROL = "rollout_model.distill_control.target=0.5"
ACCEPTANCE = (CONTROL, "rollout_model.distill_control.metric=acceptance")
FROZEN = "policy.optimizer=null"
DRAFT = "rollout_model.share=0.5"
MATH = "task={name: math, train: a.jsonl, test: b.jsonl}"
OAPL = "objective.surrogate=oapl"
OAPL_WEIGHS = "objective.correction={name: none, proximal: rollout}"
OPTIMIZER = ("rollout_model.optimizer.learning_rate=1e-3",)
HERE = "engine=transformers"

REFUSED = [
    Refused(("rollout_model.optimizer=null", "rollout_model.lora={rank: 4}"), {"give it an optimizer": OPTIMIZER}),
    Refused(("rollout_model.optimizer=null", CONTROL), {"give it an optimizer": OPTIMIZER}),
    Refused((CONTROL, "rollout_model.ppo_weight=0.0"), {"raise ppo_weight": ("rollout_model.ppo_weight=0.5",)}),
    Refused(
        (CONTROL, "rollout_model.distill_weight=0.0"),
        {"the controller begins with it": ("rollout_model.distill_weight=0.01",)},
    ),
    Refused(
        ("objective.overlong_buffer.len=33",),
        {"it counts the last tokens before that limit": ("objective.overlong_buffer.len=32",)},
    ),
    Refused(("sampling.num_top_log_probs=0",), {"set it (20 is usual)": ("sampling.num_top_log_probs=20",)}),
    Refused(
        ("objective.correction={name: dppo, divergence: topk}", "sampling.num_top_log_probs=0"),
        {"set it (20 is usual)": ("sampling.num_top_log_probs=20",)},
    ),
    Refused(("fp8_backward=fp8",)),
    Refused(("precision=fp8",)),
    Refused(("precision=int8",)),
    Refused(("precision=fp8", *SGLANG)),
    Refused(("precision=fp8", "engine.quantization=fp8", "rollout_model.share=0.0", "engine.draft.tokens=2")),
    Refused(("precision=fp8", "engine.quantization=fp8", "engine.attn_implementation=eager")),
    Refused((EXACT, "sampling.top_p=0.9")),
    Refused((EXACT, "sampling.top_k=9")),
    Refused((EXACT, "rollout_model.share=0.0", "engine.draft.lam=0.5")),
    Refused((EXACT, DRAFT, "evaluation.engine={name: transformers, draft: {lam: 0.5}}")),
    *(
        Refused((EXACT, *quantized), {})
        for key, *quantized in (
            ("engine", "engine={quantization: int8_w8a8}"),
            ("engine", "engine={kv_cache_dtype: fp8}", "evaluation.engine=transformers"),
            ("evaluation.engine", "evaluation.engine={quantization: int8_w8a8}", DRAFT),
        )
    ),
    *(
        Refused(
            (EXACT, "batch.ahead=1", *share),
            {
                "a frozen rollout model that generates all rollouts": (
                    "rollout_model.optimizer=null",
                    "rollout_model.share=1.0",
                )
            },
        )
        for share in ((), (DRAFT,))
    ),
    Refused((EXACT, "objective.correction.target=new", "batch.ppo_epochs=2")),
    Refused((EXACT, "objective.correction.target=new", "batch.ppo_epochs=2", DRAFT)),
    Refused((EXACT, "objective.correction.target=new", "batch.ppo_epochs=2", "rollout_model=null")),
    Refused(
        ("batch.group_size=1",),
        {
            "use at least 2": ("batch.group_size=2",),
            "an advantage without groups: reinforce_pp": ("objective.advantage=reinforce_pp",),
            "gae with a critic": ("objective.advantage=gae", "critic.optimizer={}"),
        },
    ),
    Refused(
        ("objective.advantage=gae",),
        {"gae needs a critic (critic.optimizer at least) and nothing else uses one": ("critic.optimizer={}",)},
    ),
    Refused(
        ("critic.optimizer={}",),
        {"gae needs a critic (critic.optimizer at least) and nothing else uses one": ("critic=null",)},
    ),
    Refused(
        ("batch.group_size=1", "objective.advantage=reinforce_pp", "batch.filter_groups={}"),
        {"use null": ("batch.filter_groups=null",)},
    ),
    Refused(
        (FROZEN, "objective.correction=none", "rollout_model.optimizer=null"),
        {"give rollout_model.optimizer": OPTIMIZER},
    ),
    Refused((FROZEN,), {"set it to none": ("objective.correction=none",)}),
    Refused(
        (FROZEN, "objective.correction=none", "policy.lora.rank=4"),
        {"set them to null": ("policy.lora=null", "policy.ess_scaling=null", "critic=null")},
    ),
    Refused(("engine.draft.tokens=2",)),
    Refused(("engine.draft.tokens=2", "rollout_model=null")),
    Refused(("engine=vllm", "engine.draft.tokens=4", "evaluation.engine=transformers", DRAFT)),
    Refused(("evaluation.engine=vllm", "evaluation.engine.draft.tokens=4", DRAFT)),
    Refused((*SGLANG, "sampling.top_p=0.9"), {"vllm_server in its place": (SERVER,)}),
    Refused((*SGLANG, "evaluation.sampling.top_p=0.9"), {"vllm_server in its place": (SERVER,)}),
    Refused((*EVALUATES, "sampling.top_k=9"), {"vllm_server in its place": (OTHER,)}),
    Refused((SERVER,), {"to vllm_server or sglang_server with the urls of other servers": (OTHER,)}),
    *(
        Refused(
            (SERVER, *same),
            {
                "set evaluation.engine.urls to other servers": ("evaluation.engine.urls=http://127.0.0.1:2",),
                "evaluation.engine=transformers": ("-evaluation.engine", "evaluation.engine=transformers"),
            },
        )
        for same in (
            (OTHER.replace(":2'", ":1/'"),),
            ("evaluation.engine.urls=http://127.0.0.1:1/",),
            ("evaluation.engine.max_num_seqs=4",),
        )
    ),
    Refused((SERVER, OTHER, "placement.engines=2")),
    Refused((SERVER, "rollout_model=null", "objective.correction=none", "placement.engines=2")),
    Refused(
        ("engine=vllm", "engine.device=1", "placement.engines=2"),
        {"leave one of the two out": ("-engine.device",)},
    ),
    *(
        Refused(
            (
                engine,
                "engine.enable_sleep_mode=true",
                "evaluation.engine=transformers",
                "placement.engines=2",
                "batch.ahead=1",
            )
        )
        for engine in ("engine=vllm", "engine=transformers")
    ),
    Refused(("engine.enable_sleep_mode=true", "engine.draft.tokens=2", DRAFT)),
    Refused(("engine=vllm", "engine.enable_sleep_mode=true")),
    Refused(("engine=vllm", "engine.enable_sleep_mode=true", "evaluation.engine.dtype=bf16")),
    Refused(
        ("objective.baseline=model", "objective.advantage=reinforce_pp", DRAFT, "rollout_model.split=group"),
        {"use another advantage": ("objective.advantage=grpo",)},
    ),
    Refused(("objective.baseline=model", "rollout_model=null"), {"give a rollout_model": None}),
    Refused(("objective.baseline=model", DRAFT)),
    Refused(
        ("objective.baseline=model", "rollout_model.split=group"),
        {"give one between, such as 0.5": ("rollout_model.share=0.5",)},
    ),
    Refused((*ACCEPTANCE, "objective.correction={budget: 0.8, normalizer: exact}")),
    Refused(
        ("rollout_model.distill_control={target: 1.0, metric: acceptance}",),
        {"give a target below that": ("rollout_model.distill_control.target=0.9",)},
    ),
    Refused(
        (*ACCEPTANCE, "rollout_model.share=0.0", "engine.draft.tokens=2"),
        {"a share above 0": ("rollout_model.share=0.5",)},
    ),
    Refused(
        ("batch.mini_batch_size=5",),
        {
            "choose a mini_batch_size that divides 256": ("batch.mini_batch_size=64",),
            "other prompts or group_size": ("batch.prompts=5",),
        },
    ),
    Refused((OAPL, "objective.advantage=oapl")),
    Refused((OAPL, OAPL_WEIGHS)),
    Refused(
        (OAPL, OAPL_WEIGHS, "objective.advantage=oapl", "objective.loss_agg_mode=seq-mean-token-mean"),
        {"use token-mean or seq-mean-token-sum-norm": ("objective.loss_agg_mode=token-mean",)},
    ),
    Refused(("objective.count=accepted", "objective.loss_agg_mode=seq-mean-token-sum-norm")),
    Refused(("objective.count=accepted", "objective.entropy_coeff=0.1")),
    Refused(
        ("objective.correction={name: icepop, low: 6.0}",),
        {"low must lie from 0 to high": ("objective.correction.low=5.0",)},
    ),
    Refused(
        ("objective.correction.budget=0.9", EXACT, "objective.correction.lam=2.0"),
        {"leave one of them out": ("-objective.correction.lam",)},
    ),
    Refused(("objective.correction.budget=0.9",)),
    Refused(("objective.correction=ppo_is",), {"write {name: none, proximal: rollout}": (OAPL_WEIGHS,)}),
    Refused(
        ("engine=vllm", DRAFT, "engine.draft.tokens=auto"),
        {"give a number, 4 is usual": ("engine.draft.tokens=4",), "take transformers for every engine": (HERE,)},
    ),
    Refused(
        ("engine=vllm", DRAFT, "engine.draft={tokens: 4, lam: 0.5}"), {"take transformers for every engine": (HERE,)}
    ),
    Refused(
        ("engine=vllm", DRAFT, "evaluation.engine=vllm", "evaluation.engine.draft={tokens: 4, lam: 0.5}"),
        {"take transformers for every engine": (HERE, "evaluation.engine=transformers")},
    ),
    Refused(("engine=vllm", DRAFT, "engine.draft.tokens=4", "engine.quantization=fp8"), {"draft": ("-engine.draft",)}),
    Refused(
        ("engine=vllm_server", "engine.urls=http://gpu7:1", "evaluation.engine=transformers"),
        {
            "set weights_folder to a folder that all of them share": ("engine.weights_folder=/shared",),
            "give addresses such as http://127.0.0.1:8000": ("engine.urls=http://127.0.0.1:8000",),
        },
    ),
    Refused(
        ("evaluation.engine=vllm_server", "evaluation.engine.urls=http://gpu7:1"),
        {
            "set weights_folder to a folder that all of them share": ("evaluation.engine.weights_folder=/shared",),
            "give addresses such as http://127.0.0.1:8000": ("evaluation.engine.urls=http://127.0.0.1:8000",),
        },
    ),
    Refused(
        ("engine=vllm_server", "engine.urls=gpu7", "evaluation.engine=transformers"),
        {"give it as http://HOST:PORT, without a path, user or password": ("engine.urls=http://127.0.0.1:80",)},
    ),
    Refused(
        (
            "engine=vllm_server",
            "engine.urls=['http://127.0.0.1:1','http://127.0.0.1:1/']",
            "evaluation.engine=transformers",
        ),
        {"name each server once": ("engine.urls=http://127.0.0.1:1",)},
    ),
    *(
        Refused(
            (f"{key}={{name: vllm_server, urls: 'http://127.0.0.1:1', draft: {{tokens: 4}}}}", *others),
            {"leave draft out": (f"{key}={{name: vllm_server, urls: 'http://127.0.0.1:1'}}",)},
        )
        for key, *others in (("engine", "evaluation.engine=vllm"), ("evaluation.engine",))
    ),
    Refused((*SGLANG, "engine.quantization=fp8"), {"take vllm_server or transformers in its place": (SERVER,)}),
    Refused(
        (*EVALUATES, "evaluation.engine.kv_cache_dtype=fp8"),
        {"take vllm_server or transformers in its place": ("evaluation.engine=transformers",)},
    ),
    Refused(("task.min_terms=9",), {"lower it or raise the other": ("task.max_terms=9",)}),
    Refused((MATH, "task.rewards=[correct, correct]"), {"give it once, with its weight": ("task.rewards=correct",)}),
    Refused(
        (MATH, "task.rewards={name: correct, weight: 0.0}"),
        {"give one a weight": ("task.rewards={name: correct, weight: 1.0}",)},
    ),
    Refused(
        (MATH, "task.rewards={name: correct, timeout: 9.0}"),
        {
            "only functions of your own, package.module:function, have limits of their own": (
                "task.rewards={name: 'mine:judge', timeout: 9.0}",
            )
        },
    ),
    Refused((MATH, "task.train.answers.name=regex"), {"give one": ("task.train.answers.regex=(.*)",)}),
    Refused(
        ("rollout_model.share={schedule: step, hold: 2, until: 3}",),
        {"leave until out": ("rollout_model.share={schedule: step, hold: 2}",)},
    ),
    Refused(
        ("rollout_model.share={schedule: linear, hold: 2}",),
        {"give a later one": ("rollout_model.share={schedule: linear, hold: 2, until: 3}",)},
    ),
    Refused(
        (CONTROL, "rollout_model.distill_control.low=200.0"),
        {"low must be at most high": ("rollout_model.distill_control.low=0.1",)},
    ),
    Refused(("placement.chunk=4", "placement.engines=0"), {"set placement.engines": ("placement.engines=2",)}),
    Refused(("policy=a/b",)),
    Refused(("rollout_model=none", "objective.correction=none")),
]
REFUSED += [
    Refused(
        ("sampling.max_new_tokens=100000",),
        {"lower max_new_tokens": ("sampling.max_new_tokens=32",), "take models with a longer one": None},
        1,
    ),
    Refused(
        ("batch.micro_batch_tokens=32",),
        {
            "lower max_new_tokens": ("sampling.max_new_tokens=16",),
            "raise batch.micro_batch_tokens": ("batch.micro_batch_tokens=64",),
        },
        1,
    ),
    Refused(
        ("engine=vllm", "engine.max_model_len=32"),
        {
            "lower max_new_tokens": ("sampling.max_new_tokens=16",),
            "raise engine.max_model_len": ("engine.max_model_len=64",),
        },
        1,
    ),
    Refused(("sampling.num_top_log_probs=100",), {"lower it": ("sampling.num_top_log_probs=10",)}, 1),
    Refused(
        (EXACT, "precision=bf16"),
        {"fp32 on both sides and no quantization": ("precision=fp32", "engine.dtype=fp32", "engine.quantization=null")},
        1,
    ),
    Refused(
        ("engine=vllm", "evaluation.engine=transformers", "placement.engines=0"),
        {
            "use engine=vllm_server": (SERVER,),
            "one process": None,  # is torchrun's
        },
        2,
    ),
]
NOT_HERE = {  # the start of a message: why nothing types what it tells to do
    "ranks is ": "it tells to start another program, torchrun; tests/system/test_torchrun.py",
    "arms": "it is of a recipe's file: tests/config/test_config.py",
    "autocast is of": "it is of jackpot mismatch: tests/analysis/mismatch/test_sides.py",
    "a prompt of ": "its numbers come from the prompts: tests/launch/test_lengths.py",
    "{}={}{} samples from all": "it wants another model: tests/training/test_head_rows.py",
}


def begin(settings: list[str], ranks: int) -> None:
    """Do what a start does with settings before it makes anything."""
    config = resolve("quickstart", None, settings)
    if ranks:
        placed = place_engines(config, ranks, on_gpu=False)
        check_start(placed, placed.model_paths(), ranks)


def accept(settings: list[str], ranks: int) -> None:
    """Begin with what is typed, and follow the guess where a name stands in the wrong block."""
    for _ in range(5):
        try:
            return begin(settings, ranks)
        except ConfigError as error:
            guess = re.match(r"unknown setting '([\w.]+)'; did you mean ([\w.]+)", str(error))
            if not guess:
                raise
            settings = [re.sub(rf"^{re.escape(guess[1])}=", f"{guess[2]}=", setting) for setting in settings]

    raise AssertionError(settings)


@cache
def message_of(index: int) -> str:
    """The message with which an entry of the table is refused."""
    refused = REFUSED[index]
    with pytest.raises((ConfigError, EngineError)) as error:
        begin(list(refused.settings), refused.ranks)

    return str(error.value)


def alternatives(message: str) -> list[str]:
    """Split a message's remedy into its alternatives."""
    return re.split(
        rf"(?:,? or (?=use |{KEY}(?:: |=))|, or |, (?={KEY}(?:: |=)))(?![^{{]*\}})", message.rpartition("; ")[2]
    )


def typed(alternative: str, message: str, refused: Refused) -> list[str] | None:
    """Return the whole command line of a remedy; None where the table says that it cannot be typed."""
    is_chosen = alternative in refused.chosen
    if is_chosen:
        steps = refused.chosen[alternative]
    else:
        steps = tuple(step for match in STEP.finditer(alternative) for step in steps_of(match))
        assert steps, f"{alternative!r} names no setting and no value: what would be typed stands in no table"
    if steps is None:
        return None

    within = message.partition(": ")[0]
    line = [] if alternative.startswith("write ") else list(refused.settings)  # in place of what was typed
    for step in steps:
        name, sign, value = step.lstrip("-").partition("=")
        key = f"{within}.{name}" if f"{within}.{name}" in KEYS else name
        if sign:
            line = [setting for setting in line if not (is_chosen and setting.startswith(f"{key}="))]
            line.append(f"{key}={value}")
        else:
            line = [setting for setting in line if not re.match(rf"{re.escape(key)}[=.]", setting)]
    return line


def steps_of(match: re.Match[str]) -> list[str]:
    """List what a remedy tells to type; a name that it leaves out begins with a dash."""
    if match["left"]:
        return [f"-{key}" for key in re.findall(KEY, match["left"])]
    return [f"{match['key']}={match['value'] or match['plain']}"]


@pytest.mark.parametrize("index", range(len(REFUSED)), ids=[" ".join(refusal.settings) for refusal in REFUSED])
def test_every_remedy_of_a_refusal_works(index: int) -> None:
    refused, message = REFUSED[index], message_of(index)

    for alternative in alternatives(message):
        line = typed(alternative, message, refused)
        if line is not None:
            try:
                accept(line, refused.ranks)
            except (ConfigError, EngineError) as error:
                pytest.fail(f"{message}\n{alternative!r} was typed as {line}, and refused:\n{error}")

    assert refused.chosen.keys() <= set(alternatives(message)), message


def test_every_refusal_of_settings_stands_in_the_table() -> None:
    """Conflicts of settings, and what a start refuses before it makes anything."""
    messages = list(map(message_of, range(len(REFUSED))))
    files = [*(PACKAGE / "config").glob("*.py"), PACKAGE / "launch" / "checks.py"]
    texts = texts_of(file for file in files if file.name not in APART)
    assert len(texts) > 60

    unsaid = [text for text in sorted(texts) if not is_provoked(text, messages)]
    missing = [text for text in unsaid if not text.startswith(tuple(NOT_HERE))]
    assert not missing, missing
    assert all(any(text.startswith(start) for text in unsaid) for start in NOT_HERE)


@pytest.mark.parametrize(
    ("setting", "block"),
    [("engine.max_model_len=64", "engine"), ("objective.correction.cap=2.0", "objective.correction")],
)
def test_a_setting_of_another_choice_says_of_which(
    setting: str, block: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError) as error:
        resolve("quickstart", None, [setting])

    command = re.search(r"(jackpot config [\w.]+) says which have it", str(error.value))
    assert command

    monkeypatch.setattr("sys.argv", command[1].split())
    with pytest.raises(SystemExit):
        main()

    choice = re.search(rf"with {re.escape(block)}=(\w+)", capsys.readouterr().out)
    assert choice

    resolve("quickstart", None, [f"{block}={choice[1]}", "evaluation.engine=transformers", setting])


@pytest.mark.parametrize("settings", ["lam=2.0", "objective.lr=1.0"])
def test_the_command_that_explains_settings_is_one(settings: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(ConfigError) as error:
        resolve("quickstart", None, [settings])

    command = re.search(r"(jackpot config) explains each", str(error.value))
    assert command
    with pytest.raises(SystemExit) as end, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", command[1].split())
        main()
    assert end.value.code == 0 and "objective" in capsys.readouterr().out
