"""What a vLLM server runs, and whether that is what the run needs. Needs no vLLM."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from jackpot.core.errors import EngineError

_DTYPE_WORDS = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_FP8_WORDS = ("fp8", "fp8_e4m3")
_HEAD = "lm_head.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFacts:
    """Of one server."""

    sizes: Mapping[str, int]  # of its model, under the names of Hugging Face's config; what it does not tell is missing
    parameters: frozenset[str]  # vLLM's names
    dtype: str
    device: str
    splits_prompts: bool  # reads a long prompt in several steps
    quantization: str | None  # vLLM's word for it
    cache_dtype: str  # of keys and values
    log_probs_mode: str
    num_top_log_probs: int
    context_length: int

    @property
    def quantised(self) -> bool:
        return self.quantization is not None or self.cache_dtype not in ("auto", *_DTYPE_WORDS.values())

    @property
    def ties_head(self) -> bool:
        """Whether the output layer is the input embedding."""
        return not any(name.endswith(_HEAD) for name in self.parameters)


def read_facts(settings: Mapping[str, Any], structure: str, checksums: Mapping[str, str]) -> ServerFacts:
    """
    Args:
        settings, structure, checksums: as `ServerClient` gives them.

    Raises:
        LookupError: not the settings of a vLLM server of a known version.
    """
    model = settings["model_config"]
    tensor_parallel, pipeline_parallel = (
        settings["parallel_config"][f"{kind}_parallel_size"] for kind in ("tensor", "pipeline")
    )
    sizes = _sizes(structure, tensor_parallel, whole=pipeline_parallel == 1)
    max_log_probs = int(model["max_logprobs"])
    return ServerFacts(
        sizes=sizes,
        parameters=frozenset(plain_name(key) for key in checksums),
        dtype=str(model["dtype"]).removeprefix("torch."),
        device=str(settings["device_config"]["device"]),
        splits_prompts=bool(settings["scheduler_config"]["enable_chunked_prefill"]),
        quantization=model["quantization"],
        cache_dtype=str(settings["cache_config"]["cache_dtype"]),
        log_probs_mode=str(model["logprobs_mode"]),
        num_top_log_probs=sizes["vocab_size"] if max_log_probs < 0 else min(max_log_probs, sizes["vocab_size"]),
        context_length=int(model["max_model_len"]),
    )


def plain_name(key: str) -> str:
    """A parameter's name without the rank that `checksums` puts before it."""
    return key.rpartition(":")[2]


def _sizes(structure: str, tensor_parallel: int, whole: bool) -> dict[str, int]:
    """
    Args:
        structure: of the first rank.
        whole: False where a rank has some of the layers only.
    """
    sizes = {}
    if found := re.search(r"embedding_dim=(\d+), org_vocab_size=(\d+)", structure):
        sizes |= {"hidden_size": int(found[1]), "vocab_size": int(found[2])}
    if found := re.search(r"Attention\(head_size=(\d+), num_heads=(\d+), num_kv_heads=(\d+)", structure):
        sizes |= {"head_dim": int(found[1]), "num_attention_heads": int(found[2]) * tensor_parallel}
        sizes |= {"num_key_value_heads": int(found[3])} if tensor_parallel == 1 else {}
    if found := re.search(r"\(down_proj\): RowParallelLinear\(in_features=(\d+)", structure):
        sizes |= {"intermediate_size": int(found[1]) * tensor_parallel}
    if (layers := re.findall(r"\((?:\d+-)?(\d+)\): (?:\d+ x )?\w*DecoderLayer\(", structure)) and whole:
        sizes |= {"num_hidden_layers": 1 + max(int(layer) for layer in layers)}
    return sizes


def model_sizes(model: PreTrainedModel) -> dict[str, int]:
    """The sizes of our model that a server may tell of."""
    config = model.config.get_text_config()
    names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    named = {name: getattr(config, name, None) for name in names}
    vocab_size, hidden_size = model.get_input_embeddings().weight.shape
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        **{name: value for name, value in named.items() if isinstance(value, int)},
    }


def check_facts(
    facts: ServerFacts, url: str, sizes: Mapping[str, int], parameters: frozenset[str], dtype: torch.dtype
) -> None:
    """Raises EngineError for a server whose numbers would not be those of the run's model.

    Args:
        sizes: of the run's model.
        parameters: its names of parameters, with those that are tied to others.
    """
    if facts.log_probs_mode != "processed_logprobs":
        raise EngineError(
            f"{url} returns {facts.log_probs_mode}, which are not those of what it samples from; start it "
            f"with --logprobs-mode processed_logprobs"
        )
    other = [
        f"{name} {facts.sizes[name]}, ours {size}"
        for name, size in sizes.items()
        if facts.sizes.get(name, size) != size
    ]
    # Fused and packed weights have names of vLLM's own; norms have those of the model wherever it runs.
    other += sorted(name for name in facts.parameters - parameters if "norm" in name)[:3]
    if other:
        raise EngineError(f"{url} serves another model: {'; '.join(other)}. Start it with the run's rollout model")
    if facts.dtype != _DTYPE_WORDS[dtype]:
        raise EngineError(
            f"{url} computes in {facts.dtype}, and engine.dtype says {_DTYPE_WORDS[dtype]}; start it with --dtype "
            f"{_DTYPE_WORDS[dtype]} or change engine.dtype"
        )
    if facts.ties_head and facts.device == "cpu":
        raise EngineError(
            f"{url} runs on a CPU with tied embeddings, where vLLM keeps the first output layer forever. "
            f"Start it with an untied copy of the model: tie_word_embeddings false in its config.json, and "
            f"{_HEAD} saved beside the embedding; docs/vllm.md has the lines that make one"
        )
    if facts.splits_prompts and facts.device == "cpu":
        raise EngineError(
            f"{url} runs on a CPU and reads long prompts in several steps. vLLM would rewind a random generator there, "
            f"which it cannot, and die; start it with --no-enable-chunked-prefill"
        )


def check_bits(facts: ServerFacts, url: str, method: str | None, kv_cache_dtype: str | None) -> None:
    """Raises EngineError for a server that does not compute with what the settings say that it was started with.

    Args:
        method: vLLM's word for how it must be quantised; None: no matter how.
        kv_cache_dtype: `engine.kv_cache_dtype`; None: no matter which.
    """
    if method and facts.quantization != method:
        raise EngineError(
            f"{url} runs with quantization {facts.quantization or 'none'}, and engine.quantization needs {method}; "
            f"start it with a copy of the model in that form (docs/vllm.md makes one), or change engine.quantization"
        )
    if method and facts.device == "cpu":
        raise EngineError(
            f"{url} runs on a CPU, where vLLM computes with scales that it freed once quantised weights have been "
            f"replaced. Use engine=vllm, which holds them, or engine.quantization=int8_w8a16"
        )
    if kv_cache_dtype and facts.cache_dtype not in _FP8_WORDS:
        raise EngineError(
            f"{url} keeps keys and values in {facts.cache_dtype}, and engine.kv_cache_dtype says {kv_cache_dtype}; "
            f"start it with --kv-cache-dtype {kv_cache_dtype}, or leave engine.kv_cache_dtype out"
        )
