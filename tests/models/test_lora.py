"""LoRA adapters: a new one changes nothing, engines and saved folders have the merged weights, and an adapter is
loaded beside the weights that it was trained on alone.
"""

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
    """Return a model with biases in the attention and an output layer of its own."""
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
    """Return the folder of a model to put an adapter on, each of MODELS in turn."""
    MODELS[request.param]().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def adapted_model(folder: Path, config: LoraConfig = SMALL, seed: int = 0, is_new: bool = False) -> PreTrainedModel:
    """Return the model in a folder with an adapter that is new, or else as if it had been trained."""
    model = load_model(folder, torch.float32)
    add_adapter(model, config, seed)
    draw = torch.Generator().manual_seed(1)
    for parameter in trained_weights(model).values():
        if not is_new:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=draw)
    return model


def trained_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


@torch.no_grad()
def logits(model: torch.nn.Module) -> Tensor:
    return model(input_ids=IDS, use_cache=False).logits


def equal(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Return whether both have the same names and bits."""
    return weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in weights)


# A new adapter


def test_a_new_adapter_changes_nothing_and_alone_is_trained(folder: Path) -> None:
    plain_model = load_model(folder, torch.float32)

    model = adapted_model(folder, is_new=True)

    assert type(model) is type(plain_model)
    assert torch.equal(logits(model), logits(plain_model))
    assert equal(dict(merged_weights(model)), dict(plain_model.named_parameters()))

    assert trained_weights(model)
    assert all(".lora_" in name for name in trained_weights(model))


def test_the_seed_alone_decides_a_new_adapter(folder: Path) -> None:
    torch.manual_seed(0)
    weights_3 = trained_weights(adapted_model(folder, seed=3, is_new=True))
    global_draws = torch.rand(4)

    weights_3_again = trained_weights(adapted_model(folder, seed=3, is_new=True))  # with torch's generator elsewhere
    weights_4 = trained_weights(adapted_model(folder, seed=4, is_new=True))

    assert equal(weights_3, weights_3_again)
    assert not equal(weights_3, weights_4)

    torch.manual_seed(0)
    assert torch.equal(global_draws, torch.rand(4))  # an adapter takes nothing of torch's generator


@pytest.mark.parametrize("config", [SMALL, ATTENTION], ids=["all-linear", "attention"])
def test_the_size_told_beforehand_is_that_of_the_adapter(folder: Path, config: LoraConfig) -> None:
    told_size = adapter_size(load_model(folder, torch.float32), config)
    weights = trained_weights(adapted_model(folder, config))
    assert told_size == sum(weight.numel() for weight in weights.values())


def test_all_linear_leaves_the_head_out_and_names_choose_layers(folder: Path) -> None:
    layers = {name.split(".")[-1] for name in target_layers(load_model(folder, torch.float32), ("all-linear",))}
    assert layers == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}

    names = {name.split(".")[-4] for name in trained_weights(adapted_model(folder, ATTENTION))}
    assert names == {"q_proj", "v_proj"}


@pytest.mark.parametrize("unknown_name", ["q_pro", "lm_head"])
def test_an_unknown_target_module_is_refused_with_the_valid_ones(folder: Path, unknown_name: str) -> None:
    with pytest.raises(ModelError) as error:
        adapted_model(folder, LoraConfig(target_modules=("v_proj", unknown_name)))

    message = str(error.value)
    assert message.startswith("unknown target module of Qwen")
    assert f" {unknown_name!r}" in message
    assert message.endswith("Valid: all-linear, down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj")


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
    model = adapted_model(folder, config)
    plain_weights = dict(load_model(folder, torch.float32).named_parameters())
    adapter = trained_weights(model)
    original_state = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    merged = list(merged_weights(model))

    assert [name for name, _ in merged] == list(plain_weights)

    changed_layers = set()
    for name, weight in merged:
        layer = name.removesuffix(".weight")
        expected = plain_weights[name].double()
        if f"{layer}.lora_A.default.weight" in adapter:
            a, b = (adapter[f"{layer}.lora_{side}.default.weight"].double() for side in "AB")
            expected = expected + config.alpha / config.rank * b @ a
            changed_layers.add(layer)

        assert weight.dtype == torch.float32
        assert not weight.requires_grad
        torch.testing.assert_close(weight.double(), expected, rtol=1e-6, atol=1e-6)

    assert len(adapter) == 2 * len(changed_layers)  # A and B of each
    assert changed_layers
    assert equal(original_state, model.state_dict())


def test_an_engine_gets_merged_weights_in_its_dtype(folder: Path) -> None:
    """Those of layers without an adapter are the model's own, which the engine casts: a copy would take memory."""
    model = adapted_model(folder)
    model_addresses = {parameter.data_ptr() for parameter in model.parameters()}
    exact_weights = dict(merged_weights(model))

    merged = dict(merged_weights(model, torch.bfloat16))

    is_shared = {name: weight.data_ptr() in model_addresses for name, weight in merged.items()}
    assert len(set(is_shared.values())) == 2  # some are, some are not
    for name, weight in merged.items():
        assert weight.dtype == (torch.float32 if is_shared[name] else torch.bfloat16)
        assert torch.equal(weight.bfloat16(), exact_weights[name].bfloat16())


def test_the_merged_model_says_what_the_adapter_says(folder: Path) -> None:
    model = adapted_model(folder)
    merged = load_model(folder, torch.float32)
    plain_logits = logits(merged)
    merged.load_state_dict(dict(merged_weights(model)), strict=False)

    assert (logits(model) - plain_logits).abs().max() > 0.1
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-5, atol=1e-5)


# What is written down


def test_a_saved_folder_is_a_plain_model_and_pefts_adapter(folder: Path, tmp_path: Path) -> None:
    model = adapted_model(folder)

    model_writer(model, tmp_path / "saved", WHOLE)()

    saved_model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()
    assert type(saved_model) is type(model)
    assert equal(dict(saved_model.named_parameters()), dict(merged_weights(model)))

    names = {path.name for path in (tmp_path / "saved").glob("*.safetensors")}
    assert names == {"model.safetensors"}

    base = AutoModelForCausalLM.from_pretrained(folder)
    peft_model = peft.PeftModel.from_pretrained(base, tmp_path / "saved" / "adapter").eval()

    assert torch.equal(logits(peft_model), logits(model))
    assert json.loads((tmp_path / "saved" / "adapter" / "adapter_config.json").read_text())["r"] == SMALL.rank


def test_a_model_without_an_adapter_is_saved_as_ever(folder: Path, tmp_path: Path) -> None:
    model = load_model(folder, torch.float32)
    model_writer(model, tmp_path / "saved", WHOLE)()
    assert not (tmp_path / "saved" / "adapter").exists()
    assert equal(load_file(tmp_path / "saved" / "model.safetensors"), load_file(folder / "model.safetensors"))


def test_a_loaded_adapter_is_the_saved_one_bit_by_bit(folder: Path, tmp_path: Path) -> None:
    model = adapted_model(folder)
    loaded_model = adapted_model(folder, seed=5, is_new=True)
    model_writer(model, tmp_path / "saved", WHOLE)()

    load_adapter(loaded_model, tmp_path / "saved")

    assert equal(trained_weights(loaded_model), trained_weights(model))
    assert equal(loaded_model.state_dict(), model.state_dict())


def test_an_adapter_is_refused_beside_other_weights(folder: Path, tmp_path: Path) -> None:
    model_writer(adapted_model(folder), tmp_path / "step-2" / "policy", WHOLE)()
    other_model = load_model(folder, torch.float32)
    other_model.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1e-3
    add_adapter(other_model, SMALL, 0)

    with pytest.raises(CheckpointError, match=r"trained on other weights than those now in .*base"):
        load_adapter(other_model, tmp_path / "step-2" / "policy")


@pytest.mark.parametrize("damage", ["missing", "cut short", "a tensor less", "another shape"])
def test_a_damaged_adapter_is_refused_and_named(folder: Path, tmp_path: Path, damage: str) -> None:
    model = adapted_model(folder)
    saved_folder = tmp_path / "step-2" / "policy"
    model_writer(model, saved_folder, WHOLE)()
    path = saved_folder / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    first_name = next(iter(tensors))

    if damage == "missing":
        shutil.rmtree(saved_folder / "adapter")
    elif damage == "cut short":
        path.write_bytes(path.read_bytes()[:200])
    else:
        replacement = {} if damage == "a tensor less" else {first_name: tensors[first_name][:1]}
        save_file({name: tensor for name, tensor in tensors.items() if name != first_name} | replacement, path)

    original_weights = {name: tensor.clone() for name, tensor in trained_weights(model).items()}

    with pytest.raises(CheckpointError, match=r"cannot read the adapter .*step-2/policy.*continue from the checkpoint"):
        load_adapter(model, saved_folder)

    assert equal(original_weights, trained_weights(model))
