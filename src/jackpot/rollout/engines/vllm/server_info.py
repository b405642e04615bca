"""Facts that a vLLM server reports about its model and limits, and the checks that they fit the run. Needs no vLLM."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from jackpot.core.errors import EngineError
from jackpot.models.forward import output_layer
from jackpot.rollout.engines.servers.replica import ServerInfo
from jackpot.rollout.engines.servers.weight_sync import unknown_norms, without_rank

_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_FP8_NAMES = ("fp8", "fp8_e4m3")  # vLLM's dtypes of an FP8 cache
_HEAD = "lm_head.weight"  # vLLM's name of the output layer's weight


@dataclass(frozen=True, kw_only=True, slots=True)
class VLLMServerInfo(ServerInfo):
    """The facts that one vLLM server reports about its model and limits."""

    sizes: Mapping[str, int]  # reported sizes of the model, by Hugging Face's config names
    parameters: frozenset[str]  # vLLM's names of the parameters
    dtype: str  # dtype of the weights, such as float32
    head_dtype: str | None  # dtype in which the output layer multiplies; None: the dtype of the weights
    chunked_prefill: bool  # True where a long prompt is read in several steps
    speculative: bool  # True where the server verifies drafts (--speculative-config)
    quantization: str | None  # vLLM's name of the quantization of weights
    cache_dtype: str  # dtype of keys and values; auto: the dtype of the weights
    logprobs_mode: str  # kind of log-probs that the server returns


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpectedModel:
    """The model that every server has to serve, with its precision."""

    sizes: Mapping[str, int]  # sizes of the model by Hugging Face's config names
    parameters: frozenset[str]  # names of the parameters, tied ones under each of their names
    dtype: torch.dtype  # dtype of the weights
    head_dtype: str | None  # as in `VLLMServerInfo`
    quant_method: str | None  # vLLM's name of the quantization; None: any
    kv_cache_dtype: str | None  # `engine.kv_cache_dtype`; None: any


def parse_server_info(vllm_config: Mapping[str, Any], inspection: str, checksums: Mapping[str, str]) -> VLLMServerInfo:
    """Return what a server reports about its model and limits, from three of its answers.

    Args:
        vllm_config, inspection, checksums: results of `VLLMClient.vllm_config`, `.model_inspection`, `.checksums`.

    Raises:
        LookupError, TypeError, ValueError: a report has another form than in vLLM 0.32.
    """
    model = vllm_config["model_config"]
    tensor_parallel, pipeline_parallel = (
        vllm_config["parallel_config"][f"{kind}_parallel_size"] for kind in ("tensor", "pipeline")
    )
    sizes = _inspected_sizes(inspection, tensor_parallel, has_all_layers=pipeline_parallel == 1)
    max_log_probs = int(model["max_logprobs"])  # below 0: as many as the vocabulary has tokens
    cache_dtype = str(vllm_config["cache_config"]["cache_dtype"])

    return VLLMServerInfo(
        sizes=sizes,
        parameters=frozenset(without_rank(key) for key in checksums),
        dtype=str(model["dtype"]).removeprefix("torch."),
        head_dtype=(model.get("hf_overrides") or {}).get("head_dtype"),
        device=str(vllm_config["device_config"]["device"]),
        chunked_prefill=bool(vllm_config["scheduler_config"]["enable_chunked_prefill"]),
        speculative=vllm_config.get("speculative_config") is not None,
        quantization=model["quantization"],
        cache_dtype=cache_dtype,
        # True where the weights, or the keys and values in the cache, are quantized.
        quantized=model["quantization"] is not None or cache_dtype not in ("auto", *_DTYPE_NAMES.values()),
        logprobs_mode=str(model["logprobs_mode"]),
        num_top_log_probs=sizes["vocab_size"] if max_log_probs < 0 else min(max_log_probs, sizes["vocab_size"]),
        max_model_len=int(model["max_model_len"]),
    )


def _inspected_sizes(inspection: str, tensor_parallel: int, has_all_layers: bool) -> dict[str, int]:
    """Read the model's sizes from the text in which PyTorch prints the modules of the first rank.

    A size that the text does not tell is left out.

    Args:
        tensor_parallel: number of ranks among which heads and features are split.
        has_all_layers: False where the layers are split among ranks.
    """
    sizes = {}
    if match := re.search(r"embedding_dim=(\d+), org_vocab_size=(\d+)", inspection):
        sizes |= {"hidden_size": int(match[1]), "vocab_size": int(match[2])}
    if match := re.search(r"Attention\(head_size=(\d+), num_heads=(\d+), num_kv_heads=(\d+)", inspection):
        sizes |= {"head_dim": int(match[1]), "num_attention_heads": int(match[2]) * tensor_parallel}
        # The number of key heads is not known from one of several ranks, since ranks may have copies of one key head.
        sizes |= {"num_key_value_heads": int(match[3])} if tensor_parallel == 1 else {}
    if match := re.search(r"\(down_proj\): RowParallelLinear\(in_features=(\d+)", inspection):
        sizes |= {"intermediate_size": int(match[1]) * tensor_parallel}
    # A line for each run of equal layers, such as `(0-27): 28 x LlamaDecoderLayer(`; group 1 is the last layer's index.
    if (layers := re.findall(r"\((?:\d+-)?(\d+)\): (?:\d+ x )?\w*DecoderLayer\(", inspection)) and has_all_layers:
        sizes |= {"num_hidden_layers": 1 + max(int(layer) for layer in layers)}
    return sizes


def model_sizes(model: PreTrainedModel) -> dict[str, int]:
    """Return the sizes of a local model that a server may report, by Hugging Face's config names."""
    config = model.config.get_text_config()
    names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    named = {name: getattr(config, name, None) for name in names}
    head = output_layer(model)
    # A config may lack a size, or have one for each layer: such a size is left out.
    return {
        "vocab_size": head.out_features,
        "hidden_size": head.in_features,
        **{name: value for name, value in named.items() if isinstance(value, int)},
    }


def check_server(info: VLLMServerInfo, url: str, expected: ExpectedModel) -> None:
    """Raise EngineError for a server with another model, precision or kind of log-probs than the run needs."""
    _check_model(info, url, expected)
    _check_cpu_limits(info, url)
    _check_quantization(info, url, expected)


def _check_model(info: VLLMServerInfo, url: str, expected: ExpectedModel) -> None:
    """Raise EngineError for a server with another model, other dtypes or another kind of log-probs than `expected`."""
    if info.logprobs_mode != "processed_logprobs":
        raise EngineError(
            f"{url} returns {info.logprobs_mode}, which are not those of what it samples from; start it "
            f"with --logprobs-mode processed_logprobs"
        )

    # A size that the server does not report counts as equal.
    differences = [
        f"{name} {info.sizes[name]}, ours {size}"
        for name, size in expected.sizes.items()
        if info.sizes.get(name, size) != size
    ]
    differences += unknown_norms(info.parameters, expected.parameters)
    if differences:
        raise EngineError(
            f"{url} serves another model: {'; '.join(differences)}. Start it with the run's rollout model"
        )

    dtype = _DTYPE_NAMES[expected.dtype]
    if info.dtype != dtype:
        raise EngineError(
            f"{url} computes in {info.dtype}, and engine.dtype says {dtype}; start it with --dtype {dtype} or change "
            f"engine.dtype"
        )

    if info.head_dtype != expected.head_dtype:
        raise EngineError(
            f"{url} multiplies in its output layer in {info.head_dtype or info.dtype}, and engine.head_dtype says "
            f'{expected.head_dtype or dtype}; start it with --hf-overrides \'{{"head_dtype": "float32"}}\' for '
            f"engine.head_dtype=fp32, else without it"
        )


def _check_cpu_limits(info: VLLMServerInfo, url: str) -> None:
    """Raise EngineError for settings with which vLLM 0.32 generates wrong tokens, or crashes, on a CPU."""
    if info.device != "cpu":
        return

    has_output_layer = any(name.endswith(_HEAD) for name in info.parameters)  # False: tied to the embedding
    if not has_output_layer:
        raise EngineError(
            f"{url} runs on a CPU with tied embeddings, where vLLM keeps the first output layer forever. "
            f"Start it with an untied copy of the model: tie_word_embeddings false in its config.json, and "
            f"{_HEAD} saved with the embedding; docs/vllm.md has the lines that make one"
        )
    if info.chunked_prefill:
        raise EngineError(
            f"{url} runs on a CPU and reads long prompts in several steps. vLLM would rewind a random generator there, "
            f"which it cannot, and end; start it with --no-enable-chunked-prefill"
        )
    if info.speculative:
        raise EngineError(
            f"{url} runs on a CPU and verifies drafts of tokens, where vLLM drops their temperatures and generates "
            f"nonsense; start it without --speculative-config, or use engine=vllm with engine.draft"
        )


def _check_quantization(info: VLLMServerInfo, url: str, expected: ExpectedModel) -> None:
    """Raise EngineError for a server that holds weights, keys or values in another form than `expected`."""
    method, kv_cache_dtype = expected.quant_method, expected.kv_cache_dtype

    if method and info.quantization != method:
        raise EngineError(
            f"{url} runs with quantization {info.quantization or 'none'}, and engine.quantization needs {method}; "
            f"start it with a copy of the model in that form (docs/vllm.md makes one), or change engine.quantization"
        )
    if method and info.device == "cpu":
        raise EngineError(
            f"{url} runs on a CPU, where vLLM computes with scales that it freed once quantized weights have been "
            f"replaced. Use engine=vllm, which holds them, or engine.quantization=int8_w8a16"
        )
    if kv_cache_dtype and info.cache_dtype not in _FP8_NAMES:
        raise EngineError(
            f"{url} keeps keys and values in {info.cache_dtype}, and engine.kv_cache_dtype says {kv_cache_dtype}; "
            f"start it with --kv-cache-dtype {kv_cache_dtype}, or leave engine.kv_cache_dtype out"
        )
