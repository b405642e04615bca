"""What a forward pass costs, against torch's own count of the operations that a real one did."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from jackpot.models.cost import ForwardCost, forward_cost
from jackpot.models.load import load_meta_model, load_model

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS = {
    "tied head, heads wider than hidden size / heads": (
        Qwen3ForCausalLM,
        Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
    ),
    "untied head": (LlamaForCausalLM, LlamaConfig(**SHAPE, tie_word_embeddings=False)),
    "experts": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**SHAPE, head_dim=8, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_forward_pass_does_what_is_counted(name: str) -> None:
    make, config = MODELS[name]
    config._attn_implementation = "eager"  # computes every pair, the masked ones too
    config._experts_implementation = "eager"  # in matrix products that torch counts
    model = make(config).eval()
    tokens = 13

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(tokens)[None], use_cache=False)

    cost = forward_cost(model)
    angles = 0
    for module, operations in counter.get_flop_counts().items():
        if module.endswith(".rotary_emb"):  # where each token is, which transformers 5.17 works out by a product
            angles += sum(operations.values())

    assert counter.get_total_flops() - angles == cost.per_token * tokens + cost.per_pair * tokens * tokens


def test_a_sequence_costs_what_writing_it_token_by_token_costs() -> None:
    cost = ForwardCost(per_token=10, per_pair=3)
    cost_by_token = sum(10 + 3 * (position + 1) for position in range(7))
    assert cost.sequence(7) == cost_by_token


def test_an_outline_costs_what_the_model_costs() -> None:
    outline = load_meta_model("starter:policy")
    model = load_model("starter:policy", torch.float32, torch.device("cpu"))
    assert forward_cost(outline) == forward_cost(model)
