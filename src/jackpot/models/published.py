"""Shapes of published models, for plans where the hub cannot be reached.

The settings are copied from the models' own config.json: those that decide shapes and cost, and the end-of-sequence
token. The table has no weights.
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
}
_QWEN25_05B = _QWEN2 | {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
_QWEN25_15B = _QWEN2 | {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
_QWEN25_3B = _QWEN2 | {
    "hidden_size": 2048,
    "intermediate_size": 11_008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
_QWEN25_7B = _QWEN2 | {
    "vocab_size": 152_064,
    "hidden_size": 3584,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
}
_QWEN25_32B = _QWEN2 | {
    "vocab_size": 152_064,
    "hidden_size": 5120,
    "intermediate_size": 27_648,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}
_QWEN3 = _QWEN2 | {"model_type": "qwen3", "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 32_768}
_QWEN3_17B = _QWEN3 | {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
_QWEN3_4B = _QWEN3 | {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": True,
}
_QWEN3_8B = _QWEN3 | {
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "tie_word_embeddings": False,
}
_INSTRUCT = {"eos_token_id": 151_645, "max_position_embeddings": 32_768}

PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-0.5B-Instruct": _QWEN25_05B | _INSTRUCT,
    "Qwen/Qwen2.5-1.5B": _QWEN25_15B,
    "Qwen/Qwen2.5-1.5B-Instruct": _QWEN25_15B | _INSTRUCT,
    "Qwen/Qwen2.5-Math-1.5B-Instruct": _QWEN25_15B
    | _INSTRUCT
    | {"max_position_embeddings": 4096, "rope_theta": 10_000.0},
    "Qwen/Qwen2.5-3B": _QWEN25_3B,
    "Qwen/Qwen2.5-7B": _QWEN25_7B,
    "Qwen/Qwen2.5-32B": _QWEN25_32B,
    "Qwen/Qwen3-1.7B-Base": _QWEN3_17B,
    "Qwen/Qwen3-4B-Base": _QWEN3_4B,
    "Qwen/Qwen3-8B-Base": _QWEN3_8B,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": _QWEN25_15B | {"tie_word_embeddings": False, "rope_theta": 10_000.0},
}


def published_config(name: str) -> PreTrainedConfig | None:
    """Return the config of a model of the table, marked as such (`is_from_table`); None for every other name."""
    if name not in PUBLISHED:
        return None
    settings = dict(PUBLISHED[name])
    rope = {"rope_type": "default", "rope_theta": settings.pop("rope_theta")}
    config = AutoConfig.for_model(settings.pop("model_type"), **settings, rope_parameters=rope, dtype="bfloat16")
    config.name_or_path = f"{OWN_TABLE}{name}"
    return config


def is_from_table(config: PreTrainedConfig) -> bool:
    """Tell whether a config comes from this table and not from a model's folder or the hub."""
    return config.name_or_path.startswith(OWN_TABLE)
