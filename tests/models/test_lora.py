"""Adapters: what they change, what others see of them, and what is written down."""

import json
import shutil
import sys
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from helpers.engines.reference import VOCAB_SIZE, tiny_model
from jackpot.config.config import LoraConfig
from jackpot.core.errors import CheckpointError, ConfigError, ModelError
from jackpot.models.load import load_model
from jackpot.models.lora import adapter_size, add_adapter, load_adapter, merged_weights, model_writer, target_layers
from jackpot.models.parts import WHOLE

SMALL = LoraConfig(rank=3, alpha=5)
ATTENTION = LoraConfig(rank=2, alpha=7, target_modules=("q_proj", "v_proj"))
IDS = torch.arange(2, 14).view(2, 6)


def qwen2() -> Qwen2ForCausalLM:
    """With biases in the attention and a head of its own."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=VOCAB_SIZE, num_key_value_heads=1, tie_word_embeddings=False, **sizes)
    model = Qwen2ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model


MODELS = {"tied": lambda: tiny_model(0).eval(), "biases": qwen2}


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model to put an adapter on."""
    MODELS[request.param]().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def adapted(folder: Path, config: LoraConfig = SMALL, seed: int = 0, moved: bool = True) -> PreTrainedModel:
    """The model in a folder with an adapter that has been trained, or a new one."""
    model = load_model(folder, torch.float32)
    add_adapter(model, config, seed)
    draw = torch.Generator().manual_seed(1)
    for parameter in trainable(model).values():
        if moved:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)
    return model


def trainable(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def logits(model: torch.nn.Module) -> Tensor:
    return model(input_ids=IDS, use_cache=False).logits


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# A new adapter


def test_a_new_adapter_changes_nothing_and_alone_is_trained(folder: Path) -> None:
    plain, model = load_model(folder, torch.float32), adapted(folder, moved=False)
    assert type(model) is type(plain)
    assert torch.equal(logits(model), logits(plain))
    assert equal(dict(merged_weights(model)), dict(plain.named_parameters()))
    assert trainable(model)
    assert all(".lora_" in name for name in trainable(model))


def test_the_seed_alone_decides_a_new_adapter(folder: Path) -> None:
    torch.manual_seed(0)
    first = trainable(adapted(folder, seed=3, moved=False))
    drawn = torch.rand(4)

    second, other = (trainable(adapted(folder, seed=seed, moved=False)) for seed in (3, 4))

    assert equal(first, second)
    assert not equal(first, other)

    torch.manual_seed(0)
    assert torch.equal(drawn, torch.rand(4))


@pytest.mark.parametrize("config", [SMALL, ATTENTION], ids=["all-linear", "attention"])
def test_the_size_told_beforehand_is_that_of_the_adapter(folder: Path, config: LoraConfig) -> None:
    told = adapter_size(load_model(folder, torch.float32), config)
    assert told == sum(parameter.numel() for parameter in trainable(adapted(folder, config)).values())


def test_all_linear_is_every_linear_layer_but_the_head(folder: Path) -> None:
    layers = {name.split(".")[-1] for name in target_layers(load_model(folder, torch.float32), ("all-linear",))}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    names = {name.split(".")[-4] for name in trainable(adapted(folder, ATTENTION))}
    assert names == {"q_proj", "v_proj"}


@pytest.mark.parametrize("wrong", ["q_pro", "lm_head"])
def test_an_unknown_target_module_is_refused_with_the_valid_ones(folder: Path, wrong: str) -> None:
    with pytest.raises(ModelError) as error:
        adapted(folder, LoraConfig(target_modules=("v_proj", wrong)))

    text = str(error.value)
    assert text.startswith("unknown target module of Qwen")
    assert f" {wrong!r}" in text
    assert text.endswith("Valid: all-linear, down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj")


def test_a_model_without_linear_layers_is_refused() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=1))  # they are Conv1D there
    with pytest.raises(ModelError, match="GPT2LMHeadModel has no linear layer below its head; set lora: null"):
        add_adapter(model, SMALL, 0)


def test_a_missing_peft_is_named_with_its_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    model = load_model(folder, torch.float32)
    assert equal(dict(merged_weights(model)), dict(model.named_parameters()))
    with pytest.raises(ConfigError, match=r"pip install -c constraints\.txt '\.\[lora\]'"):
        add_adapter(model, SMALL, 0)


# Merged weights


@pytest.mark.parametrize("config", [SMALL, ATTENTION], ids=["all-linear", "attention"])
def test_merged_weights_are_w_plus_alpha_over_rank_times_b_a(folder: Path, config: LoraConfig) -> None:
    model, plain = adapted(folder, config), dict(load_model(folder, torch.float32).named_parameters())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merged = list(merged_weights(model))
    adapter = trainable(model)

    changed = set()

    assert [name for name, _ in merged] == list(plain)

    for name, weight in merged:
        place = name.removesuffix(".weight")
        wanted = plain[name].double()
        if f"{place}.lora_A.default.weight" in adapter:
            a, b = (adapter[f"{place}.lora_{side}.default.weight"].double() for side in "AB")
            wanted = wanted + config.alpha / config.rank * b @ a
            changed.add(place)

        assert weight.dtype == torch.float32
        assert not weight.requires_grad
        torch.testing.assert_close(weight.double(), wanted, rtol=1e-6, atol=1e-6)
    assert len(adapter) == 2 * len(changed) > 0
    assert equal(before, model.state_dict())


def test_an_engine_gets_merged_weights_in_its_dtype(folder: Path) -> None:
    """All others are the model's own, which the engine casts: a copy of them would take memory of its own."""
    model = adapted(folder)
    own = {parameter.data_ptr() for parameter in model.parameters()}
    merged, exact = dict(merged_weights(model, torch.bfloat16)), dict(merged_weights(model))

    is_own = {name: weight.data_ptr() in own for name, weight in merged.items()}

    assert len(set(is_own.values())) == 2
    for name, weight in merged.items():
        assert weight.dtype == (torch.float32 if is_own[name] else torch.bfloat16)
        assert torch.equal(weight.bfloat16(), exact[name].bfloat16())


def test_the_merged_model_says_what_the_adapter_says(folder: Path) -> None:
    model, merged = adapted(folder), load_model(folder, torch.float32)
    start = logits(merged)
    merged.load_state_dict(dict(merged_weights(model)), strict=False)
    assert (logits(model) - start).abs().max() > 0.1
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-5, atol=1e-5)


# What is written down


def test_a_saved_folder_is_a_plain_model_and_pefts_adapter(folder: Path, tmp_path: Path) -> None:
    model = adapted(folder)
    model_writer(model, tmp_path / "saved", WHOLE)()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()

    assert type(saved) is type(model)
    assert equal(dict(saved.named_parameters()), dict(merged_weights(model)))

    names = {path.name for path in (tmp_path / "saved").glob("*.safetensors")}
    assert names == {"model.safetensors"}

    base = AutoModelForCausalLM.from_pretrained(folder)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "saved" / "adapter").eval()

    assert torch.equal(logits(theirs), logits(model))
    assert json.loads((tmp_path / "saved" / "adapter" / "adapter_config.json").read_text())["r"] == SMALL.rank


def test_a_model_without_an_adapter_is_saved_as_ever(folder: Path, tmp_path: Path) -> None:
    model = load_model(folder, torch.float32)
    model_writer(model, tmp_path / "saved", WHOLE)()
    assert not (tmp_path / "saved" / "adapter").exists()
    assert equal(load_file(tmp_path / "saved" / "model.safetensors"), load_file(folder / "model.safetensors"))


def test_a_loaded_adapter_is_the_saved_one_bit_by_bit(folder: Path, tmp_path: Path) -> None:
    model, again = adapted(folder), adapted(folder, seed=5, moved=False)
    model_writer(model, tmp_path / "saved", WHOLE)()
    load_adapter(again, tmp_path / "saved")
    assert equal(trainable(again), trainable(model))
    assert equal(again.state_dict(), model.state_dict())


def test_an_adapter_is_refused_beside_other_weights(folder: Path, tmp_path: Path) -> None:
    model_writer(adapted(folder), tmp_path / "step-2" / "policy", WHOLE)()
    other = load_model(folder, torch.float32)
    other.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1e-3

    add_adapter(other, SMALL, 0)

    with pytest.raises(CheckpointError, match=r"trained on other weights than those now in .*base"):
        load_adapter(other, tmp_path / "step-2" / "policy")


@pytest.mark.parametrize("damage", ["missing", "cut short", "a tensor less", "another shape"])
def test_a_damaged_adapter_is_refused_and_named(folder: Path, tmp_path: Path, damage: str) -> None:
    model, place = adapted(folder), tmp_path / "step-2" / "policy"
    model_writer(model, place, WHOLE)()
    path = place / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    first = next(iter(tensors))
    if damage == "missing":
        shutil.rmtree(place / "adapter")
    elif damage == "cut short":
        path.write_bytes(path.read_bytes()[:200])
    else:
        changed = {} if damage == "a tensor less" else {first: tensors[first][:1]}
        save_file({name: tensor for name, tensor in tensors.items() if name != first} | changed, path)

    before = {name: tensor.clone() for name, tensor in trainable(model).items()}

    with pytest.raises(CheckpointError, match=r"cannot read the adapter .*step-2/policy.*continue from the checkpoint"):
        load_adapter(model, place)
    assert equal(before, trainable(model))
