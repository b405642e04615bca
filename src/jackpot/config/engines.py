"""Settings of the engines, one class each, chosen by name. Pydantic only."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from jackpot.config.base import Count, Names, Positive, Strict, by_name

Dtype = Literal["fp32", "bf16"]
Quantization = Literal["int8_w8a16", "int8_w8a8", "fp8"]


def _check_urls(urls: tuple[str, ...]) -> tuple[str, ...]:
    """Addresses of servers, each once, without a path and without a password."""
    for url in urls:
        try:
            parts = urlsplit(url)
            is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # no number from 0 to 65535
            is_address = False
        rest = is_address and (parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc)
        if not is_address or rest or url != url.strip() or " " in url:
            raise ValueError(
                f"{url!r} is not the address of a server; give it as http://HOST:PORT, without a path, user or password"
            )
    plain = [url.rstrip("/") for url in urls]
    if twice := sorted({url for url in plain if plain.count(url) > 1}):
        raise ValueError(f"{', '.join(twice)} is given more than once; name each server once")
    return urls


class TransformersEngineConfig(Strict):
    """The learner's process decodes with Hugging Face transformers. Runs everywhere."""

    name: Literal["transformers"] = "transformers"
    max_num_seqs: Count = 256  # sequences decoded at once
    dtype: Dtype = "fp32"
    attn_implementation: Literal["sdpa", "eager"] = (
        "sdpa"  # torch's fused kernel where the model has it, or plain matmuls
    )
    quantization: Quantization | None = None  # what linear layers compute with (docs/precision.md); null: dtype
    kv_cache_dtype: Literal["fp8"] | None = None  # what keys and values are rounded to; null: dtype


class VLLMEngineConfig(Strict):
    """vLLM in the learner's process, on a thread of its own; needs the extra `vllm`. See docs/vllm.md."""

    name: Literal["vllm"] = "vllm"
    max_num_seqs: Count = 256  # sequences decoded at once
    dtype: Dtype = "fp32"
    quantization: Quantization | None = None  # what linear layers compute with; fp8 on a GPU only
    kv_cache_dtype: Literal["fp8"] | None = None  # what keys and values are kept in; null: dtype
    max_model_len: Count | None = None  # tokens of prompt and response; null: the model's
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.4  # of the GPU, weights and cache together
    kv_cache_memory_bytes: Count | None = (
        None  # for keys and values; null: what gpu_memory_utilization leaves, on a CPU 1 GiB
    )
    device: Annotated[int, Field(ge=0)] | None = None  # number of a GPU; null: the learner's
    enable_sleep_mode: bool = False  # give the GPU's memory back while training; one engine of a process can
    enforce_eager: bool | Literal["auto"] = "auto"  # no torch.compile and no CUDA graphs; auto: so on a CPU


class VLLMServerEngineConfig(Strict):
    """vLLM's OpenAI-compatible servers that somebody started, all with the same model. See docs/vllm.md."""

    name: Literal["vllm_server"] = "vllm_server"
    urls: Annotated[Names, AfterValidator(_check_urls)]  # of the servers, such as http://127.0.0.1:8000
    weights_folder: str  # written here and read by every server under the same path, with room for two models
    max_num_seqs: Count = 256  # responses asked of one server at once
    dtype: Dtype = "fp32"  # that the servers were started with
    quantization: Quantization | None = None  # as well: weights are sent in its form
    kv_cache_dtype: Literal["fp8"] | None = None  # as well
    api_key_var: str = "VLLM_API_KEY"  # of the environment; a key itself would end up in the run folder
    timeout: Positive = 600.0  # seconds for one response, or for one weight update
    max_retries: Count = 5  # of one response, whichever servers failed at it
    connect_timeout: Positive = 600.0  # seconds to wait while no server can be reached


def is_quantised(engine: "EngineConfig") -> bool:
    """Whether the settings say that the engine computes with other numbers than weights in its dtype."""
    return bool(engine.quantization or engine.kv_cache_dtype)


EngineConfig = Annotated[
    TransformersEngineConfig | VLLMEngineConfig | VLLMServerEngineConfig,
    Field(discriminator="name"),
    by_name("transformers"),
]
