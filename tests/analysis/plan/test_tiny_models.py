"""Small random models: they load as real ones do, and their tokenizers have what the family's have."""

from pathlib import Path

import pytest
import torch

from jackpot.analysis.plan.tiny_models import LARGE, SMALL, save_tiny, tiny_token, tiny_tokenizer
from jackpot.models.families import FAMILIES, known_model
from jackpot.models.load import check_same_tokenizer, eos_token_ids, load_model, load_tokenizer, load_value_model
from jackpot.rollout.tasks.templates import Template

ANSWERS = ["72", r"\frac{1}{2}", "72"]
NAMES = [family.example for family in FAMILIES]
CHATTING = ["Qwen/Qwen3-4B", "Qwen/Qwen2.5-3B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"]
TEXT = "Natalia's clips: $x^2 + \\frac{1}{3}$ é 漢\n\n  #### 12"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("tiny")
    for name in [*NAMES, *CHATTING]:
        save_tiny(top / name, known_model(name), LARGE, ANSWERS, seed=0)
    return {name: top / name for name in [*NAMES, *CHATTING]}


@pytest.mark.parametrize("name", [*NAMES, *CHATTING])
def test_a_model_loads_with_its_tokenizer_and_they_belong_together(folders: dict[str, Path], name: str) -> None:
    known = known_model(name)
    model, tokenizer = load_model(folders[name], torch.float32), load_tokenizer(folders[name])
    assert type(model) is known.family.model
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert (head is embedding) == known.tied
    assert len(tokenizer) < len(head) and len(head) % 64 == 0  # wider than the vocabulary, as the real ones are
    assert sum(parameter.numel() for parameter in model.parameters()) < 300_000
    ends = {tokenizer.convert_ids_to_tokens(token_id) for token_id in eos_token_ids(model)}
    assert ends == {known.family.end} | ({known.family.message_end} if known.chats else set())
    assert tokenizer.eos_token == (known.family.message_end if known.chats else known.family.end)
    assert tokenizer.pad_token == known.family.pad and tokenizer.bos_token == known.family.begin
    value = load_value_model(folders[name], torch.float32)
    assert value(input_ids=torch.tensor([[1, 2]])).logits.abs().max() == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_text_comes_back_and_special_tokens_are_one_token_each(folders: dict[str, Path], name: str) -> None:
    family, tokenizer = known_model(name).family, load_tokenizer(folders[name])
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert tokenizer.decode(ids) == TEXT and max(ids) < 512 and len(ids) < len(TEXT.encode())
    for place, token in enumerate(family.tokens):
        assert tokenizer.encode(token, add_special_tokens=False) == [512 + place]
        assert tiny_token(family, family.first_id + place) == 512 + place
        kept = tokenizer.decode([512 + place], skip_special_tokens=True)
        assert kept == (token if token in family.kept else "")
    assert tiny_token(family, family.first_id - 1) is tiny_token(family, family.first_id + len(family.tokens)) is None
    begins = [tokenizer.bos_token_id] if family.begin else []
    assert tokenizer.encode("", add_special_tokens=True) == begins


@pytest.mark.parametrize("name", NAMES)
def test_each_answer_is_one_token_whatever_stands_around_it(folders: dict[str, Path], name: str) -> None:
    tokenizer = load_tokenizer(folders[name])
    for text in (r"\boxed{72}", r" \boxed{\frac{1}{2}}", r"$\boxed{72}$", r"\boxed{72}."):
        [token_id] = tokenizer.encode(text, add_special_tokens=False)
        assert token_id >= 512 and tokenizer.decode([token_id], skip_special_tokens=True) == text


CHATS = {  # from the families' own templates, for one message of the user
    "Qwen/Qwen3-4B": "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n",
    "Qwen/Qwen2.5-3B": "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    "<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n",
    "meta-llama/Llama-3.2-1B-Instruct": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nQ<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": "<｜begin▁of▁sentence｜><｜User｜>Q<｜Assistant｜><think>\n",
}


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_written_as_the_family_writes_it(folders: dict[str, Path], name: str) -> None:
    tokenizer = load_tokenizer(folders[name])
    template = Template("chat", tokenizer, instruction="", system_prompt=None)
    assert template.text("Q") == CHATS[name]
    with_system = Template("chat", tokenizer, instruction="", system_prompt="S").text("Q")
    assert "S" in with_system and "helpful" not in with_system
    ids = template.token_ids(template.text("Q"))
    assert tokenizer.decode(ids) == CHATS[name] and ids.count(tokenizer.bos_token_id) == int("begin" in CHATS[name])


def test_a_base_model_of_llama_has_no_chat_template_and_begins_its_text(folders: dict[str, Path]) -> None:
    tokenizer = load_tokenizer(folders["meta-llama/Llama-3.2-1B"])
    assert tokenizer.chat_template is None
    assert Template("base", tokenizer, instruction="", system_prompt=None).token_ids("Q")[0] == tokenizer.bos_token_id


def test_two_sizes_of_a_family_share_a_vocabulary_and_the_seed_decides_the_weights(tmp_path: Path) -> None:
    large, again = (save_tiny(tmp_path / name, known_model("Qwen/Qwen3-8B"), LARGE, ["1"], 3) for name in "ab")
    other = save_tiny(tmp_path / "c", known_model("Qwen/Qwen3-8B"), LARGE, ["1"], 4)
    small = save_tiny(tmp_path / "d", known_model("Qwen/Qwen3-1.7B"), SMALL, ["1"], 3)
    check_same_tokenizer(load_tokenizer(tmp_path / "a"), load_tokenizer(tmp_path / "d"))
    assert all(one.equal(two) for one, two in zip(large.parameters(), again.parameters(), strict=True))
    assert not large.lm_head.weight.equal(other.lm_head.weight)
    assert small.num_parameters() < large.num_parameters() / 2
    assert small.lm_head.weight.shape[0] == large.lm_head.weight.shape[0]


def test_the_answers_do_not_move_the_special_tokens_and_an_endless_one_is_no_token() -> None:
    known = known_model("Qwen/Qwen2.5-3B")
    few, many = tiny_tokenizer(known, ["9" * 101]), tiny_tokenizer(known, map(str, range(50)))
    assert all(few.convert_tokens_to_ids(token) == many.convert_tokens_to_ids(token) for token in known.family.tokens)
    assert len(few) == 512 + len(known.family.tokens) and len(many) == len(few) + 12 * 50
