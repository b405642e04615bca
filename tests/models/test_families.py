"""What a model's name tells. Expectations: the families' own config.json, tokenizer.json and tokenizer_config.json."""

import pytest

from jackpot.config.recipes import load_recipe, recipe_names, resolve
from jackpot.core.errors import ModelError
from jackpot.models.families import FAMILIES, known_model

NAMES = {  # architecture, whether it chats, whether embedding and output layer are one
    "Qwen/Qwen3-0.6B": ("Qwen3ForCausalLM", True, True),
    "Qwen/Qwen3-4B-Base": ("Qwen3ForCausalLM", False, True),
    "Qwen/Qwen3-8B-Base": ("Qwen3ForCausalLM", False, False),
    "Qwen/Qwen3-4B-Instruct-2507": ("Qwen3ForCausalLM", True, True),
    "Qwen/Qwen2.5-3B": ("Qwen2ForCausalLM", False, True),
    "Qwen/Qwen2.5-1.5B-Instruct": ("Qwen2ForCausalLM", True, True),
    "Qwen/Qwen2.5-Math-1.5B-Instruct": ("Qwen2ForCausalLM", True, True),
    "Qwen/Qwen2.5-Coder-7B": ("Qwen2ForCausalLM", False, False),
    "Qwen/Qwen2.5-32B": ("Qwen2ForCausalLM", False, False),
    "Qwen/Qwen2-0.5B": ("Qwen2ForCausalLM", False, True),
    "Qwen/Qwen2-7B-Instruct": ("Qwen2ForCausalLM", True, False),
    "meta-llama/Llama-3.2-1B": ("LlamaForCausalLM", False, True),
    "meta-llama/Meta-Llama-3-8B": ("LlamaForCausalLM", False, False),
    "meta-llama/Llama-3.1-8B-Instruct": ("LlamaForCausalLM", True, False),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": ("Qwen2ForCausalLM", True, False),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": ("LlamaForCausalLM", True, False),
    "/models/Qwen3-4B-Base": ("Qwen3ForCausalLM", False, True),
    "~/models/qwen2.5-0.5b-instruct": ("Qwen2ForCausalLM", True, True),
}
IDS = {
    "Qwen/Qwen3-4B": {"<|endoftext|>": 151643, "<|im_end|>": 151645, "<tool_call>": 151657, "</think>": 151668},
    "Qwen/Qwen2.5-3B": {"<|im_start|>": 151644, "<|fim_prefix|>": 151659, "<|file_sep|>": 151664},
    "Qwen/Qwen2-1.5B": {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645},
    "meta-llama/Llama-3.1-8B": {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001, "<|eot_id|>": 128009},
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": {
        "<｜end▁of▁sentence｜>": 151643,
        "<｜User｜>": 151644,
        "<｜Assistant｜>": 151645,
        "<｜begin▁of▁sentence｜>": 151646,
        "<think>": 151648,
        "</think>": 151649,
        "<|file_sep|>": 151664,
    },
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": {"<｜begin▁of▁sentence｜>": 128000, "<think>": 128013},
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_tells_architecture_chat_and_output_layer(name: str) -> None:
    known = known_model(name)
    assert (known.family.model.__name__, known.chats, known.tied) == NAMES[name]


@pytest.mark.parametrize("name", IDS)
def test_special_tokens_have_the_ids_of_the_familys_tokenizer(name: str) -> None:
    family = known_model(name).family
    places = {token: family.first_id + place for place, token in enumerate(family.tokens)}
    assert len(places) == len(family.tokens) and places.items() >= IDS[name].items()


@pytest.mark.parametrize(
    "name",
    ["Qwen/Qwen3-30B-A3B", "Qwen/Qwen2-57B-A14B", "Qwen/Qwen2.5-VL-7B", "meta-llama/Llama-3.2-11B-Vision", "my/model"],
)
def test_other_architectures_and_unknown_names_are_refused_with_the_families(name: str) -> None:
    with pytest.raises(ModelError, match="of no family") as refused:
        known_model(name)
    assert name in str(refused.value) and "policy.path=" in str(refused.value)
    assert all(family.name in str(refused.value) and family.example in str(refused.value) for family in FAMILIES)


def test_every_example_is_of_its_own_family() -> None:
    assert [known_model(family.example).family.name for family in FAMILIES] == [family.name for family in FAMILIES]


def test_every_model_of_every_recipe_is_known() -> None:
    seen = set()
    for recipe in recipe_names():
        for arm in load_recipe(recipe)["arms"]:
            config = resolve(recipe, arm, [])
            seen |= {config.policy.path, *([config.rollout_model.path] if config.rollout_model else [])}
    families = {known_model(path).family.name for path in seen if not path.startswith("starter:")}
    assert families == {"Qwen2.5", "Qwen3", "DeepSeek-R1-Distill-Qwen"}
