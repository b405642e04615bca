"""Every refusal inside TRL: what it tells to do, done, makes a trainer, or a run of a step where a run is refused."""

import dataclasses
import re
from ast import literal_eval
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from helpers.refusals import TELLS, is_provoked, texts_of
from helpers.trl_runs import POLICY, ROLLOUT_MODEL, arguments
from jackpot.config.engines import TransformersEngineConfig
from jackpot.core.errors import JackpotError
from jackpot.core.types import Version
from jackpot.models.load import load_model
from jackpot.rollout.engines.transformers.engine import TransformersEngine

pytestmark = pytest.mark.trl

OUT = object()  # of an argument: leave it out
GROUP = re.compile(r"\\\d")
Given = Mapping[str, Any]  # arguments of a trainer and of its GRPOConfig; what is called is called, with the adapters


def literal(text: str) -> Any:
    try:
        return literal_eval(text)
    except (SyntaxError, ValueError):
        return text


class Refused(NamedTuple):
    """Arguments that are refused, and the remedies: a pattern in the message, and the arguments that are then given.

    A text with a group of the pattern, such as a backslash and 1, is what the message says there.
    """

    given: Given
    remedies: Mapping[str, Given | None]  # None: it cannot be done here
    name: str = "CorrectedGRPOTrainer"
    trains: bool = False  # a step; else it is refused as the trainer is made


def engine(adapter: ModuleType) -> TransformersEngine:
    model = load_model(ROLLOUT_MODEL, torch.float32)
    return TransformersEngine(model, TransformersEngineConfig(), eos_token_ids=[1], version=Version(0, 0))


def rollouts(**settings: Any) -> Callable[[ModuleType], Any]:
    return lambda adapter: adapter.EngineRollouts(ROLLOUT_MODEL, **settings)


def without(*missing: str) -> Callable[[ModuleType], Any]:
    """A rollout function of the user's that returns None for some of what is needed."""

    def make(adapter: ModuleType) -> Callable:
        whole = adapter.EngineRollouts(ROLLOUT_MODEL)
        return lambda prompts, trainer: whole(prompts, trainer) | dict.fromkeys(missing)

    return make


def peft(name: str, **settings: Any) -> Callable[[ModuleType], Any]:
    return lambda adapter: getattr(pytest.importorskip("peft"), name)(task_type="CAUSAL_LM", **settings)


def of_images(adapter: ModuleType) -> Any:
    return object.__new__(import_module("transformers").ProcessorMixin)


def of_text(adapter: ModuleType) -> Any:
    return import_module("transformers").AutoTokenizer.from_pretrained(POLICY)


OURS = {"rollout_func": rollouts()}
VLLM = {"use_vllm": True, "vllm_importance_sampling_correction": False}
TRL = {"trainer": "GRPOTrainer", "correction": OUT}
PAIR = {"rollout_model": {"path": ROLLOUT_MODEL, "optimizer": {"learning_rate": 0.1}}}
MIXED = {"rollout_model": PAIR["rollout_model"] | {"share": 0.5}}
LORA = {"r": 4, "target_modules": ["q_proj"]}
EXACT = {"name": "obrs", "normalizer": "exact"}
TWO = "JackpotGRPOTrainer"

REFUSED = [
    Refused({"correction": "obrs"}, {"neither .* nor a rollout_func was given": OURS, "use TRL's (GRPOTrainer)": TRL}),
    *(
        Refused(
            OURS | {"use_vllm": True, "correction": correction},
            {r"set GRPOConfig\((vllm_importance_sampling_correction)=(False)\)": {r"\1": r"\2"}},
        )
        for correction in ("obrs", "tis")
    ),
    Refused(
        OURS | {"importance_sampling_level": "sequence"},
        {
            "use '(token)'": {"importance_sampling_level": r"\1"},
            r"(?:or one of the corrections |, )(\w+)(?=,|$)": {"correction": r"\1"},
        },
    ),
    Refused(OURS | {"use_liger_kernel": True}, {"(use_liger_kernel) is True.* Set it to (False)": {r"\1": r"\2"}}),
    *(
        Refused(
            OURS | {"correction": EXACT | budget},
            {"use (normalizer): (topk), and no budget": {"correction": {"name": "obrs", r"\1": r"\2"}}},
        )
        for budget in ({}, {"budget": 0.5})
    ),
    Refused(
        OURS | {"num_top_log_probs": 5},
        {
            "leave it out": {"num_top_log_probs": OUT},
            "`EngineRollouts` has an argument of this name": {
                "num_top_log_probs": OUT,
                "rollout_func": rollouts(num_top_log_probs=5),
            },
        },
    ),
    Refused(
        {"rollout_func": lambda adapter: adapter.EngineRollouts(engine(adapter), dtype="bf16")},
        {"leave it out": {"rollout_func": lambda adapter: adapter.EngineRollouts(engine(adapter))}},
    ),
    Refused(
        OURS | {"min_p": 0.1},
        {"leave them out": {"min_p": OUT}, "or sample with vLLM": VLLM | {"rollout_func": OUT}},
    ),
    Refused(
        OURS | {"tools": [len], "correction": "obrs"},
        {
            r"use a correction that reads the ratio alone, such as (\w+)": {"correction": r"\1"},
            "or a rollout_func in their place": OURS | {"tools": OUT},
        },
    ),
    Refused(
        OURS | {"peft_config": peft("PromptTuningConfig", num_virtual_tokens=4)},
        {r"use an adapter inside the layers, such as LoRA": {"peft_config": peft("LoraConfig", **LORA)}},
    ),
    Refused(
        OURS | {"processing_class": of_images},
        {"give a model of text and its tokenizer": {"processing_class": of_text}},
    ),
    Refused(
        {"rollout_func": without("logprobs"), "correction": "tis"},
        {
            "return the log-probs of the distribution that the tokens were sampled from": OURS,
            "or use TRL's (GRPOTrainer)": TRL,
        },
        trains=True,
    ),
    Refused(
        {"rollout_func": without("top_ids"), "correction": "obrs"},
        {
            r"return top_ids and top_log_probs, \[T, K\] for each completion": OURS,
            r"or use correction (tis)": {"correction": r"\1"},
        },
        trains=True,
    ),
    Refused(
        OURS | {"beta": 0.1, "top_k": 5},
        {r"use (beta)=(0.0)": {r"\1": r"\2"}, r"or (top_k)=(0)": {r"\1": r"\2"}},
        trains=True,
    ),
    # Two models
    Refused({"args": None}, {"give a GRPOConfig": {"args": OUT}}, TWO),
    Refused(
        {"use_vllm": True},
        {"set it to (False), and give an engine of ours": {"use_vllm": r"\1", "engine": engine}},
        TWO,
    ),
    Refused(
        OURS,
        {
            "leave it out": {"rollout_func": OUT},
            r"or use (CorrectedGRPOTrainer)": {"trainer": r"\1", "rollout_model": OUT},
        },
        TWO,
    ),
    Refused(
        {"num_iterations": 2},
        {
            "use (1), and (steps_per_generation) for several optimizer steps": {
                "num_iterations": r"\1",
                "per_device_train_batch_size": 16,
                r"\2": 2,
            }
        },
        TWO,
    ),
    Refused({"tools": [len]}, {}, TWO),
    Refused({"loss_type": "luspo"}, {"use another": {"loss_type": "dapo"}}, TWO),
    Refused(
        {"fp16": True},
        {"use (bf16)=(True)": {"fp16": OUT, r"\1": r"\2"}, "or float32": {"fp16": OUT}},
        TWO,
    ),
    Refused(
        {"engine": {"name": "vllm"}},
        {
            "only one of (transformers) is made here": {"engine": {"name": r"\1"}},
            "Make the engine.* give that": {"engine": engine},
        },
        TWO,
    ),
    *(
        Refused(
            {"rollout_model": PAIR["rollout_model"] | changes},
            {"leave it out": PAIR, "or train with `jackpot train`": None},
            TWO,
        )
        for changes in ({"update": "iteration"}, {"lora": {}})
    ),
    *(
        Refused(
            MIXED | {"peft_config": peft("LoraConfig", **LORA | changes)},
            {"give it one adapter of plain LoRA on linear layers": {"peft_config": peft("LoraConfig", **LORA)}},
            TWO,
        )
        for changes in ({"use_dora": True}, {"target_modules": ["embed_tokens"]})
    ),
]


def expanded(value: Any, remedy: re.Match[str]) -> Any:
    if isinstance(value, dict):
        return {expanded(name, remedy): expanded(one, remedy) for name, one in value.items()}
    return literal(remedy.expand(value)) if isinstance(value, str) and GROUP.search(value) else value


def start(adapter: ModuleType, folder: Path, given: Given, refused: Refused) -> None:
    """Make the trainer, and train a step where that is refused; TRL may say that vLLM or a template is not here."""
    trl = import_module("trl")
    given = {name: one(adapter) if callable(one) else one for name, one in given.items() if one is not OUT}
    fields = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    settings = {name: value for name, value in given.items() if name in fields}

    all_given = arguments(folder, **{"max_steps": 1, "per_device_train_batch_size": 16} | settings)
    all_given |= {name: value for name, value in given.items() if name not in fields}
    kind = all_given.pop("trainer", refused.name)
    try:
        trainer = getattr(adapter, kind, None) or getattr(trl, kind)
        trainer = trainer(**all_given)
    except (ImportError, ValueError) as error:
        if isinstance(error, JackpotError):
            raise
        assert re.search("vLLM|does not support tool calling", str(error)), error
        return
    if refused.trains:
        trainer.train()


@cache
def message_of(adapter: ModuleType, number: int) -> str:
    refused = REFUSED[number]
    base = PAIR if refused.name == TWO else {}
    with TemporaryDirectory() as folder, pytest.raises(JackpotError) as error:
        start(adapter, Path(folder), base | refused.given, refused)
    return str(error.value)


def remedies_of(message: str, remedies: Mapping[str, Any]) -> list[tuple[re.Match[str], Any]]:
    """Read the remedies out of a message, which may tell to do nothing else."""
    rest, read = message, []
    for pattern, given in remedies.items():
        found = list(re.finditer(pattern, message))
        assert found, (pattern, message)
        read += [(remedy, given) for remedy in found if given is not None]
        for remedy in found:
            rest = rest.replace(remedy[0], "", 1)
    assert not TELLS.search(rest), f"{message}\nNothing does what this tells to do: {rest}"
    return read


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_every_remedy_works(adapter: ModuleType, number: int, tmp_path: Path) -> None:
    refused, message = REFUSED[number], message_of(adapter, number)
    base = PAIR if refused.name == TWO else {}
    for remedy, given in remedies_of(message, refused.remedies):
        try:
            start(adapter, tmp_path, base | refused.given | expanded(dict(given), remedy), refused)
        except JackpotError as error:
            pytest.fail(f"{message}\n{remedy[0]!r} was done, and refused:\n{error}")


def placement(fsdp: bool = False, zero: int | None = None) -> SimpleNamespace:
    """A trainer, of which nothing but what accelerate has set up is read."""
    state = SimpleNamespace(deepspeed_plugin=zero and SimpleNamespace(zero_stage=zero))
    accelerator = SimpleNamespace(state=state)
    return SimpleNamespace(accelerator=accelerator, is_fsdp_enabled=fsdp, processing_class=None)


def processes(zero: int | None = None, used: str = "no", bf16: bool = False, gpus: int = 1) -> SimpleNamespace:
    trainer = placement(zero=zero)
    trainer.accelerator.mixed_precision = used
    trainer.args = SimpleNamespace(bf16=bf16, n_gpu=gpus)
    return trainer


def server(mode: str) -> SimpleNamespace:
    return SimpleNamespace(get_server_info=lambda: {"model_config": {"logprobs_mode": mode}})


CALLED = [  # a check, what it refuses, and the remedies: a pattern in the message, and what is then checked
    (
        "refuse_placement",
        placement(**given),
        {
            r"use DDP": lambda remedy: placement(),
            r"or DeepSpeed ZeRO-(1) or 2": lambda remedy: placement(zero=int(remedy[1])),
            r"or DeepSpeed ZeRO-1 or (2)": lambda remedy: placement(zero=int(remedy[1])),
            r"train with `jackpot train`": None,
        },
    )
    for given in ({"fsdp": True}, {"zero": 3})
]
CALLED += [
    (
        "refuse_processes",
        processes(zero=1),
        {"use DDP": lambda remedy: processes(), "or train with `jackpot train`": None},
    ),
    (
        "refuse_processes",
        processes(used="bf16"),
        {
            "leave --mixed_precision out, and": lambda remedy: processes(),
            r"set (bf16) in GRPOConfig": lambda remedy: processes(used=remedy[1], **{remedy[1]: True}),
        },
    ),
    (
        "refuse_processes",
        processes(gpus=2),
        {
            "start one process for each with `accelerate launch`": lambda remedy: processes(),
            "or hide all but one by CUDA_VISIBLE_DEVICES": lambda remedy: processes(),
        },
    ),
    (
        "check_server",
        server("raw_logprobs"),
        {r"start it with --logprobs-mode (\w+)": lambda remedy: server(remedy[1])},
    ),
]


@pytest.mark.parametrize(("name", "given", "remedies"), CALLED)
def test_every_remedy_of_what_was_set_up_works(adapter: ModuleType, name: str, given: Any, remedies: Any) -> None:
    check = getattr(import_module("jackpot.adapters.trl.refusals"), name)
    with pytest.raises(JackpotError) as error:
        check(given)
    for remedy, make in remedies_of(str(error.value), remedies):
        check(make(remedy))


NOT_HERE = {  # the start of a message: where it is provoked, or why nothing is done
    "Unsloth": "it names no remedy: test_refusals.py",
    "top_ids and top_log_probs of completions": "test_corrected.py",
    "TRL's loss reads all": "test_joint.py",
    "{} has no rollout model": "test_joint.py",
    "{} holds the policy after": "test_joint.py",
    "the engine gave up": "it names no remedy: test_joint.py",
}


def test_every_refusal_stands_in_a_table(adapter: ModuleType) -> None:
    said = [message_of(adapter, number) for number in range(len(REFUSED))]
    refusals = import_module("jackpot.adapters.trl.refusals")
    for name, given, _ in CALLED:
        with pytest.raises(JackpotError) as error:
            getattr(refusals, name)(given)
        said.append(str(error.value))

    files = [Path(refusals.__file__).parent / f"{name}.py" for name in ("refusals", "corrected", "rollouts", "joint")]
    unsaid = [text for text in sorted(texts_of(files)) if not is_provoked(text, said)]
    missing = [text for text in unsaid if not text.startswith(tuple(NOT_HERE))]
    assert not missing, missing
    assert all(any(text.startswith(start) for text in unsaid) for start in NOT_HERE)
