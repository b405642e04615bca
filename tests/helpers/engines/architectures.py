"""Tiny models of many architectures, requests of uneven lengths, and the check of what an engine decodes from them."""

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from jackpot.config.engines import TransformersEngineConfig
from jackpot.config.sampling import Sampling
from jackpot.core.types import Prompt, Rollout, Version
from jackpot.rollout.engines.base import Request
from jackpot.rollout.engines.transformers.engine import TransformersEngine

VOCAB_SIZE, EOS = 40, 1
CONTEXT, WINDOW = 128, 12  # tokens
LAYER_TYPES = ["sliding_attention", "full_attention"]
BASE_SETTINGS = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MAMBA = EXPERTS | {"mamba_d_state": 8, "mamba_d_head": 32, "mamba_n_groups": 1, "shared_intermediate_size": 32}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
LATENT |= {"head_dim": 8, "num_key_value_heads": 4, "first_k_dense_replace": 2}
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3 with windows": ("qwen3", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "qwen2": ("qwen2", {}),
    "qwen2 with windows": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "mistral without windows": ("mistral", {"sliding_window": None}),
    "mixtral": ("mixtral", EXPERTS | {"sliding_window": None}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"sliding_window": WINDOW, "layer_types": LAYER_TYPES, "query_pre_attn_scalar": 16}),
    "gemma3_text": ("gemma3_text", {"sliding_window": WINDOW, "layer_types": LAYER_TYPES, "query_pre_attn_scalar": 16}),
    "phi3": ("phi3", {"sliding_window": None}),
    "olmo2": ("olmo2", {}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.5}),
    "gpt2": ("gpt2", {}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"], "block_ff_dim": 96}),
    "bloom": ("bloom", {}),
    "deepseek_v3": ("deepseek_v3", LATENT),
    "diffllama": ("diffllama", {}),
    "nemotron": ("nemotron", {}),
}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {  # with recurrent states
    "jamba": ("jamba", MAMBA | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "num_experts": 1}),
    "granitemoehybrid": ("granitemoehybrid", MAMBA | {"layer_types": ["mamba", "attention"], "mamba_n_heads": 4}),
}


def make_config(name: str, **changes: Any) -> PreTrainedConfig:
    """Return the config of a tiny model, by its name in `CHANGES` or `HYBRIDS`."""
    model_type, own_settings = (CHANGES | HYBRIDS)[name]
    return CONFIG_MAPPING[model_type](**BASE_SETTINGS | own_settings | changes)


def make_model(name: str, attention: str = "sdpa", **changes: Any) -> PreTrainedModel:
    """Return a tiny model, by its name in `CHANGES` or `HYBRIDS`, with random weights, always the same."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(name, **changes), attn_implementation=attention)
    for parameter in model.parameters():  # biases and norms too, which start at 0 or 1
        parameter.data += 0.02 * torch.randn_like(parameter)
    return model.float().eval()


def make_engine(model: PreTrainedModel, **settings: Any) -> TransformersEngine:
    eos_token_ids = settings.pop("eos_token_ids", [EOS])
    config = TransformersEngineConfig(**{"max_num_seqs": 64} | settings)
    return TransformersEngine(model, config, eos_token_ids=eos_token_ids, version=Version(0, 0))


def make_requests(lengths: list[int], group: int = 3, num_new: int = 30) -> list[Request]:
    """Return `group` requests per prompt length, of five response lengths: rows end alone and together."""
    draw = torch.Generator().manual_seed(len(lengths))
    token_ids = [torch.randint(2, VOCAB_SIZE, (length,), generator=draw).tolist() for length in lengths]
    prompts = [Prompt(uid=f"{index}", text="", answer="", token_ids=tuple(ids)) for index, ids in enumerate(token_ids)]
    return [
        Request(
            uid=f"{prompt.uid}/{member}",
            prompt=prompt,
            seed=100 * member + index,
            # up to 12 tokens fewer, in steps of three
            sampling=Sampling(max_new_tokens=num_new - (7 * member + 3 * index) % 15 // 3 * 3, num_top_log_probs=5),
        )
        for index, prompt in enumerate(prompts)
        for member in range(group)
    ]


@torch.no_grad()
def check_log_probs(reference: PreTrainedModel, rollouts: list[Rollout]) -> None:
    """Compare log-probs with one pass over the whole sequence, without cache, padding or other rows."""
    for rollout in rollouts:
        prompt, tokens = rollout.prompt.token_ids, rollout.token_ids
        logits = reference(input_ids=torch.tensor([[*prompt, *tokens.tolist()]]), use_cache=False).logits[0]
        log_probs = logits[len(prompt) - 1 : -1].double().log_softmax(-1)
        token_log_probs = log_probs.gather(1, tokens[:, None])[:, 0]
        assert (rollout.rollout_log_probs - token_log_probs).abs().max() < 2e-4
        assert (rollout.top_log_probs - log_probs.topk(5).values).abs().max() < 2e-4
        assert (rollout.top_log_probs - log_probs.gather(1, rollout.top_ids)).abs().max() < 2e-4
