"""Every refusal inside TRL: what it tells to do, done, makes a trainer, or a run of a step where a run is refused."""

import dataclasses
import re
import sys
from ast import literal_eval
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from helpers import trl_async
from helpers.engines.reference import save_longer
from helpers.engines.threaded import ThreadedEngine
from helpers.refusals import is_provoked, remedies_of, texts_of
from helpers.trl_runs import POLICY, ROLLOUT_MODEL, arguments
from jackpot.config.engines import TransformersEngineConfig
from jackpot.core.errors import CheckpointError, ConfigError, JackpotError, ModelError
from jackpot.core.types import Version
from jackpot.models.load import load_model
from jackpot.rollout.engines.transformers.engine import TransformersEngine

pytestmark = pytest.mark.trl

OUT = object()  # of an argument: leave it out
GROUP = re.compile(r"\\\d")
# of a trainer and of its GRPOConfig; a value that can be called is made by calling it with the adapters
Arguments = Mapping[str, Any]


def literal(text: str) -> Any:
    """Return what Python reads in a text, or the text itself."""
    try:
        return literal_eval(text)
    except (SyntaxError, ValueError):
        return text


class Refused(NamedTuple):
    """Arguments that are refused, and the remedies: a pattern in the message, and the arguments that are then given.

    A text with a group of the pattern, such as a backslash and 1, is what the message says there.
    """

    arguments: Arguments
    remedies: Mapping[str, Arguments | None]  # None: it cannot be done here
    name: str = "CorrectedGRPOTrainer"
    trains: bool = False  # a step; else it is refused as the trainer is made


def engine(adapter: ModuleType) -> TransformersEngine:
    """An engine of the small starter."""
    model = load_model(ROLLOUT_MODEL, torch.float32)
    return TransformersEngine(model, TransformersEngineConfig(), eos_token_ids=[1], version=Version(0, 0))


def rollouts(**settings: Any) -> Callable[[ModuleType], Any]:
    """A rollout function of ours, which is made when the adapters are there."""
    return lambda adapter: adapter.EngineRollouts(ROLLOUT_MODEL, **settings)


def without(*missing: str) -> Callable[[ModuleType], Any]:
    """A rollout function of the user's that returns None for some of what is needed."""

    def make(adapter: ModuleType) -> Callable:
        complete = adapter.EngineRollouts(ROLLOUT_MODEL)
        return lambda prompts, trainer: complete(prompts, trainer) | dict.fromkeys(missing)

    return make


def shortened(adapter: ModuleType) -> Callable:
    """A rollout function of the user's that returns a list less than there are tokens."""
    complete = adapter.EngineRollouts(ROLLOUT_MODEL)

    def rollouts(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        returned = complete(prompts, trainer)
        return returned | {"top_ids": [rows[:-1] for rows in returned["top_ids"]]}

    return rollouts


def peft(name: str, **settings: Any) -> Callable[[ModuleType], Any]:
    """A config of peft's, which is made where peft is installed."""
    return lambda adapter: getattr(pytest.importorskip("peft"), name)(task_type="CAUSAL_LM", **settings)


def of_images(adapter: ModuleType) -> Any:
    """A processor of images, that nothing has set up."""
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
    Refused(
        {"rollout_func": shortened, "correction": "obrs"},
        {r"each must be \[T, K\], a row for every token of the completion, with one K for all": OURS},
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
    Refused(
        MIXED | {"engine": lambda adapter: ThreadedEngine(engine(adapter)), "policy_engine": {"draft": {"tokens": 2}}},
        {"leave draft out of the policy's engine": {"policy_engine": {}}},
        TWO,
        trains=True,
    ),
]


def expanded(value: Any, remedy: re.Match[str]) -> Any:
    """Put what a message says into the texts of a remedy."""
    if isinstance(value, dict):
        return {expanded(name, remedy): expanded(item, remedy) for name, item in value.items()}
    return literal(remedy.expand(value)) if isinstance(value, str) and GROUP.search(value) else value


def start(adapter: ModuleType, folder: Path, options: Arguments, refused: Refused) -> None:
    """Make the trainer, and train a step where that is refused; TRL may lack vLLM, jmespath or a template here."""
    trl = import_module("trl")
    options = {
        name: value(adapter) if callable(value) else value for name, value in options.items() if value is not OUT
    }
    fields = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    settings = {name: value for name, value in options.items() if name in fields}

    all_arguments = arguments(folder, **{"max_steps": 1, "per_device_train_batch_size": 16} | settings)
    all_arguments |= {name: value for name, value in options.items() if name not in fields}
    kind = all_arguments.pop("trainer", refused.name)
    try:
        trainer = getattr(adapter, kind, None) or getattr(trl, kind)
        trainer = trainer(**all_arguments)
    except (ImportError, ValueError) as error:
        if isinstance(error, JackpotError):
            raise
        assert re.search("vLLM|jmespath|does not support tool calling", str(error)), error
        return
    if refused.trains:
        trainer.train()


@cache
def message_of(adapter: ModuleType, index: int) -> str:
    """Return what a row of REFUSED is refused with."""
    refused = REFUSED[index]
    base = PAIR if refused.name == TWO else {}
    with TemporaryDirectory() as folder, pytest.raises(JackpotError) as error:
        start(adapter, Path(folder), base | refused.arguments, refused)
    return str(error.value)


@pytest.mark.parametrize("index", range(len(REFUSED)))
def test_every_remedy_works(adapter: ModuleType, index: int, tmp_path: Path) -> None:
    refused, message = REFUSED[index], message_of(adapter, index)
    base = PAIR if refused.name == TWO else {}
    for remedy, changes in remedies_of(message, refused.remedies):
        try:
            start(adapter, tmp_path, base | refused.arguments | expanded(dict(changes), remedy), refused)
        except JackpotError as error:
            pytest.fail(f"{message}\n{remedy[0]!r} was done, and refused:\n{error}")


def placement(fsdp: bool = False, zero: int | None = None) -> SimpleNamespace:
    """A trainer, of which nothing but what accelerate has set up is read."""
    state = SimpleNamespace(deepspeed_plugin=zero and SimpleNamespace(zero_stage=zero))
    accelerator = SimpleNamespace(state=state)
    return SimpleNamespace(accelerator=accelerator, is_fsdp_enabled=fsdp, processing_class=None)


def processes(zero: int | None = None, used: str = "no", bf16: bool = False, gpus: int = 1) -> SimpleNamespace:
    """A trainer, of which accelerate's settings and two of its arguments are read."""
    trainer = placement(zero=zero)
    trainer.accelerator.mixed_precision = used
    trainer.args = SimpleNamespace(bf16=bf16, n_gpu=gpus)
    return trainer


def server(mode: str) -> SimpleNamespace:
    """A server of vLLM, of which the mode of its log-probs is read."""
    return SimpleNamespace(get_server_info=lambda: {"model_config": {"logprobs_mode": mode}})


CALLED = [  # a check, what it refuses, and the remedies: a pattern in the message, and what is then checked
    (
        "refuse_placement",
        placement(**setup),
        {
            r"use DDP": lambda remedy: placement(),
            r"or DeepSpeed ZeRO-(1) or 2": lambda remedy: placement(zero=int(remedy[1])),
            r"or DeepSpeed ZeRO-1 or (2)": lambda remedy: placement(zero=int(remedy[1])),
            r"train with `jackpot train`": None,
        },
    )
    for setup in ({"fsdp": True}, {"zero": 3})
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


@pytest.mark.parametrize(("name", "setup", "remedies"), CALLED)
def test_every_remedy_of_what_was_set_up_works(adapter: ModuleType, name: str, setup: Any, remedies: Any) -> None:
    check = getattr(import_module("jackpot.adapters.trl.refusals"), name)
    with pytest.raises(JackpotError) as error:
        check(setup)
    for remedy, make in remedies_of(str(error.value), remedies):
        check(make(remedy))


def test_a_policy_cut_as_told_is_trained(adapter: ModuleType, tmp_path: Path) -> None:
    save_longer(ROLLOUT_MODEL, tmp_path / "long")
    trainer_arguments = arguments(tmp_path) | PAIR | {"model": str(tmp_path / "long")}

    with pytest.raises(ModelError, match="TRL's loss reads all") as error:
        adapter.JackpotGRPOTrainer(**trainer_arguments)
    [(remedy, _)] = remedies_of(str(error.value), {r"give TRL a policy that (model\.\S+) has cut": {}})

    model = load_model(tmp_path / "long", torch.float32)
    eval(remedy[1], {"model": model})
    model.save_pretrained(tmp_path / "cut")
    adapter.JackpotGRPOTrainer(**trainer_arguments | {"model": str(tmp_path / "cut")})


def test_checkpoints_as_told_are_continued(adapter: ModuleType, tmp_path: Path) -> None:
    steps = {"max_steps": 2, "per_device_train_batch_size": 16, "save_strategy": "steps", "save_steps": 1}

    def train(checkpoint: str | None = None, **settings: Any) -> None:
        trainer = adapter.JackpotGRPOTrainer(**arguments(tmp_path, **steps | settings), **PAIR)
        trainer.train(resume_from_checkpoint=checkpoint and str(tmp_path / checkpoint))

    train(save_only_model=True)

    with pytest.raises(CheckpointError, match="has no rollout model with its optimizer") as error:
        train("checkpoint-1")
    pattern = r"continue from a checkpoint of JackpotGRPOTrainer, saved with (save_only_model)=(False)"
    [(remedy, _)] = remedies_of(str(error.value), {pattern: {}})

    train(**{remedy[1]: literal(remedy[2])})
    train("checkpoint-1")

    state = tmp_path / "checkpoint-2" / "rollout_model_optimizer" / "state.pt"
    torch.save(torch.load(state, weights_only=True) | {"step": 1}, state)
    with pytest.raises(CheckpointError, match="holds the policy after 2 optimizer steps") as error:
        train("checkpoint-2")
    assert remedies_of(str(error.value), {"continue from another checkpoint": {}})
    train("checkpoint-1")


# The asynchronous trainer: whether rollouts come with top-k lists, the temperature of our head, and the rest.
LISTS = Refused(
    {"correction": "obrs"},
    {
        r"make them \[T, 1 \+ 2K\] as `ListingLoop` does": {"listed": True},
        r"or use correction (tis)": {"correction": r"\1"},
    },
)
SCALED = Refused(  # by our head alone, as if the model scaled its logits itself
    {"correction": "obrs", "listed": True, "temperature": 3.0},
    {r"use a correction that reads the ratio alone, such as (\w+)": {"correction": r"\1"}},
)


def start_asynchronous(
    asynchronous: ModuleType, folder: Path, correction: str, listed: bool = False, temperature: float = 1.0
) -> None:
    """Compute the loss of a step and its gradient, as an asynchronous trainer does."""
    cls = asynchronous.CorrectedAsyncGRPOTrainer
    trainer, batch = trl_async.made(cls, folder, listed, correction=correction)
    trainer.temperature = temperature
    trainer.compute_loss(trainer.model, batch).backward()


@pytest.mark.parametrize("refused", [LISTS, SCALED])
def test_every_remedy_of_asynchronous_steps_works(asynchronous: ModuleType, tmp_path: Path, refused: Refused) -> None:
    with pytest.raises(JackpotError) as error:
        start_asynchronous(asynchronous, tmp_path, **refused.arguments)
    for remedy, changes in remedies_of(str(error.value), refused.remedies):
        start_asynchronous(asynchronous, tmp_path, **refused.arguments | expanded(dict(changes), remedy))


def test_trl_sends_an_adapter_that_is_not_ours(asynchronous: ModuleType, tmp_path: Path) -> None:
    server = trl_async.StarterServer()
    server.settings["parallel_config"] |= {"data_parallel_size": 1}
    server.settings["lora_config"] = {"max_lora_rank": 16, "max_loras": 16}  # as with --enable-lora
    trainer_arguments = trl_async.arguments(tmp_path, vllm_server_base_url=server.url) | {"correction": "tis"}
    trainer_arguments["peft_config"] = peft("LoraConfig", **LORA)(asynchronous)
    trainer = asynchronous.CorrectedAsyncGRPOTrainer

    try:
        with pytest.raises(ConfigError) as error:
            trainer(**trainer_arguments, weight_transfer=asynchronous.ServerWeights())
        remedy = "leave weight_transfer out: TRL then sends the adapter alone to a server with --enable-lora"
        assert remedies_of(str(error.value), {remedy: {}})
        assert trainer(**trainer_arguments)._lora_sync
    finally:
        server.close()


def test_another_asynchronous_trainer_has_two_remedies(
    adapter: ModuleType, asynchronous: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = import_module("jackpot.adapters.trl.base")

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "trl.experimental.async_grpo.packing", None)
        with pytest.raises(ImportError) as error:
            base.asynchronous()

    remedies = {r"install trl ([\d.]+)": {}, r"or use (\w+)": {}}
    [(installed, _), (other, _)] = remedies_of(str(error.value), remedies)
    assert version("trl").startswith(installed[1]) and base.asynchronous()
    assert hasattr(adapter, other[1])


NOT_HERE = {  # the start of a message: where it is provoked, or why nothing is done
    "Unsloth": "it names no remedy: test_refusals.py",
    "TRL's loss reads all": "above",
    "{} has no rollout model": "above",
    "{} holds the policy after": "above",
    "the engine gave up": "it names no remedy: test_joint.py",
    "jackpot.adapters.trl needs the extra": "it tells to install TRL",
    "TRL's log-probs of the policy are": "above",
    "correction {} needs the top-k of every token, and the old_log_probs": "above",
    "the policy has an adapter of peft": "above",
    "TRL {} has no AsyncGRPOTrainer": "above",
}


def test_every_refusal_stands_in_a_table(adapter: ModuleType) -> None:
    messages = [message_of(adapter, index) for index in range(len(REFUSED))]
    refusals = import_module("jackpot.adapters.trl.refusals")

    for name, setup, _ in CALLED:
        with pytest.raises(JackpotError) as error:
            getattr(refusals, name)(setup)
        messages.append(str(error.value))

    unsaid = [
        text
        for text in sorted(texts_of(Path(refusals.__file__).parent.glob("*.py")))
        if not is_provoked(text, messages)
    ]
    missing = [text for text in unsaid if not text.startswith(tuple(NOT_HERE))]

    assert not missing, missing
    assert all(any(text.startswith(start) for text in unsaid) for start in NOT_HERE)
