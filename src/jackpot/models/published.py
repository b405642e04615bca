"""The shapes of published models, for plans where the hub cannot be reached.

The settings are copied from each model's config.json: those that decide shapes and cost, and the end-of-sequence
tokens. The table has no weights.
"""

from typing import Any

from transformers import AutoConfig, PreTrainedConfig

OWN_TABLE = "Jackpot's own table: "  # prefix of `name_or_path` in a config of this table

_QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": 151_936,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 151_643,
    "rope_theta": 1_000_000.0,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
_LARGE = {"vocab_size": 152_064, "tie_word_embeddings": False}
_QWEN3 = _QWEN2 | {"model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 32_768}
_INSTRUCT = {"eos_token_id": 151_645, "max_position_embeddings": 32_768}


def _shape(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, int]:
    """Return the sizes of a model by the names that config.json has for them."""
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


_SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49_152,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "bos_token_id": 1,
    "rope_theta": 100_000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_15B = _QWEN2 | _shape(1536, 8960, 28, 12)

PUBLISHED: dict[str, dict[str, Any]] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": _SMOLLM2 | _shape(576, 1536, 30, 9) | {"num_key_value_heads": 3},
    "HuggingFaceTB/SmolLM2-360M-Instruct": _SMOLLM2 | _shape(960, 2560, 32, 15) | {"num_key_value_heads": 5},
    # SmolLM2-135M with half of its layers, which examples/shrink.py makes and no hub has
    "smollm2/writer": _SMOLLM2 | _shape(576, 1536, 15, 9) | {"num_key_value_heads": 3},
    "Qwen/Qwen2.5-0.5B": _QWEN2 | _shape(896, 4864, 24, 14) | {"max_position_embeddings": 32_768},
    "Qwen/Qwen2.5-0.5B-Instruct": _QWEN2 | _shape(896, 4864, 24, 14) | _INSTRUCT,
    "Qwen/Qwen2.5-1.5B": _15B,
    "Qwen/Qwen2.5-1.5B-Instruct": _15B | _INSTRUCT,
    "Qwen/Qwen2.5-Math-1.5B-Instruct": (_15B | _INSTRUCT | {"max_position_embeddings": 4096, "rope_theta": 10_000.0}),
    "Qwen/Qwen2.5-3B": _QWEN2 | _shape(2048, 11_008, 36, 16) | {"max_position_embeddings": 32_768},
    "Qwen/Qwen2.5-7B": _QWEN2 | _shape(3584, 18_944, 28, 28) | _LARGE | {"num_key_value_heads": 4},
    "Qwen/Qwen2.5-32B": (
        _QWEN2 | _shape(5120, 27_648, 64, 40) | _LARGE | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5}
    ),
    "Qwen/Qwen3-1.7B-Base": _QWEN3 | _shape(2048, 6144, 28, 16),
    "Qwen/Qwen3-4B-Base": _QWEN3 | _shape(2560, 9728, 36, 32),
    "Qwen/Qwen3-8B-Base": _QWEN3 | _shape(4096, 12_288, 36, 32) | {"tie_word_embeddings": False},
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": _15B | {"tie_word_embeddings": False, "rope_theta": 10_000.0},
}


def published_config(name: str) -> PreTrainedConfig | None:
    """Return the config of a model in the table, marked as coming from it (`is_from_table`); None for other names."""
    if name not in PUBLISHED:
        return None
    settings = dict(PUBLISHED[name])  # a copy, as `pop` removes entries below
    rope = {"rope_type": "default", "rope_theta": settings.pop("rope_theta")}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings, rope_parameters=rope, dtype="bfloat16")
    config.name_or_path = f"{OWN_TABLE}{name}"
    return config


def is_from_table(config: PreTrainedConfig) -> bool:
    """Tell whether a config comes from this table, and not from a model's folder or the hub."""
    return (config.name_or_path or "").startswith(OWN_TABLE)
