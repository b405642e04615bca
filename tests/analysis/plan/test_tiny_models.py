"""Small random models: they load as real ones do, with the architecture of the model that they stand for."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from jackpot.analysis.plan.tiny_models import BYTES, LARGE, SMALL, own_tokenizer, save_tiny
from jackpot.models.load import check_same_tokenizer, load_config, load_model, load_tokenizer, load_value_model

ANSWERS = ["72", r"\frac{1}{2}", "72"]
PLAIN = 258  # bytes, padding and the end
ARCHITECTURES = {
    "Qwen/Qwen3-8B-Base": "Qwen3ForCausalLM",
    "Qwen/Qwen2.5-3B": "Qwen2ForCausalLM",
    "meta-llama/Llama-3.1-8B": "LlamaForCausalLM",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with a tiny model of each architecture, by the name of the model that it stands for."""
    top, configs = tmp_path_factory.mktemp("tiny"), {}
    for name in ARCHITECTURES:
        configs[name] = AutoConfig.for_model("llama") if "lama" in name else load_config(name)
        save_tiny(top / name, configs[name], LARGE, BYTES, ANSWERS, seed=0)
    return {name: top / name for name in ARCHITECTURES}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_loads_with_its_tokenizer(folders: dict[str, Path], name: str) -> None:
    model, tokenizer = load_model(folders[name], torch.float32), load_tokenizer(folders[name])

    assert type(model).__name__ == ARCHITECTURES[name]

    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert (head is embedding) == (name == "Qwen/Qwen2.5-3B")
    assert len(tokenizer) < len(head) and len(head) % 64 == 0  # wider than the vocabulary, as the real ones are
    assert sum(parameter.numel() for parameter in model.parameters()) < 300_000
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 256

    value = load_value_model(folders[name], torch.float32)
    assert value(input_ids=torch.tensor([[1, 2]])).logits.abs().max() == 0.0


def test_each_answer_is_one_token_whatever_stands_around_it(folders: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(folders["Qwen/Qwen2.5-3B"])
    for text in (r"\boxed{72}", r" \boxed{\frac{1}{2}}", r"$\boxed{72}$", r"\boxed{72}."):
        [token_id] = tokenizer.encode(text, add_special_tokens=False)
        assert token_id >= PLAIN and tokenizer.decode([token_id], skip_special_tokens=True) == text


def test_two_sizes_share_a_vocabulary(tmp_path: Path) -> None:
    like = load_config("Qwen/Qwen3-8B-Base")
    for name, size, seed in (("a", LARGE, 3), ("b", LARGE, 3), ("c", LARGE, 4), ("d", SMALL, 3)):
        save_tiny(tmp_path / name, like, size, BYTES, ["1"], seed)
    large, again, other, small = (load_model(tmp_path / name, torch.float32) for name in "abcd")

    check_same_tokenizer(load_tokenizer(tmp_path / "a"), load_tokenizer(tmp_path / "d"))
    assert all(weight.equal(repeated) for weight, repeated in zip(large.parameters(), again.parameters(), strict=True))
    assert not large.lm_head.weight.equal(other.lm_head.weight)
    assert small.num_parameters() < large.num_parameters() / 2
    assert small.lm_head.weight.shape[0] == large.lm_head.weight.shape[0]


def test_answers_come_after_all_tokens_and_long_ones_do_not(tmp_path: Path) -> None:
    like = load_config("Qwen/Qwen3-8B-Base")
    for name, answers in (("few", ["9" * 101]), ("many", [*map(str, range(50))])):
        save_tiny(tmp_path / name, like, SMALL, BYTES, answers, seed=0)
    few, many = (load_tokenizer(tmp_path / name) for name in ("few", "many"))

    assert few.get_vocab() == own_tokenizer(BYTES).get_vocab() and few.get_vocab().items() <= many.get_vocab().items()
    assert len(few) == PLAIN and len(many) == PLAIN + 12 * 50


def test_a_folders_tokenizer_is_taken_and_answers_occur(tmp_path: Path) -> None:
    """A tokenizer of 5,000 tokens: of 12 answer tokens, each in a hundred samples has one."""
    tokenizer = own_tokenizer(BYTES)
    tokenizer.add_tokens([f"word{index}" for index in range(5_000)])
    tokenizer.save_pretrained(tmp_path / "large")
    like = load_config("Qwen/Qwen3-8B-Base")
    like.save_pretrained(tmp_path / "large")
    save_tiny(tmp_path / "tiny", like, LARGE, str(tmp_path / "large"), ["7"], seed=0)

    model, saved = load_model(tmp_path / "tiny", torch.float32), load_tokenizer(tmp_path / "tiny")

    assert len(saved) == len(tokenizer) + 12 and saved.convert_tokens_to_ids("word5") == PLAIN + 5

    with torch.no_grad():
        probs = model(input_ids=torch.arange(300)[None]).logits[0].softmax(dim=-1)
    assert 0.01 < probs[:, len(tokenizer) : len(saved)].sum(dim=-1).mean().item() < 0.5


def test_a_folder_without_tokenizer_files_has_no_tokenizer(tmp_path: Path) -> None:
    load_config("Qwen/Qwen2.5-3B").save_pretrained(tmp_path)
    assert own_tokenizer(str(tmp_path)) is None
