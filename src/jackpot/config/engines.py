"""Settings of the inference engines, one class each, chosen by name."""

import re
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from jackpot.config.base import MAY_CHANGE, Bound, Conflicts, Count, Names, Strict, by_name

Dtype = Literal["fp32", "bf16"]
Quantization = Literal["int8_w8a16", "int8_w8a8", "fp8"]
# By the precision of training: the quantization of the engine with whose quantized numbers training computes too.
TRAINED_QUANTIZATION: dict[str, Quantization] = {"fp8": "fp8", "int8": "int8_w8a8"}


_ADDRESS = re.compile(r"https?://([^][\s/?#@:]+|\[[^][\s/@]+\])(:(?P<port>\d*))?/*", re.IGNORECASE)


def _check_urls(urls: tuple[str, ...]) -> tuple[str, ...]:
    """Return the servers' addresses; refuse an address that is given twice, has a path, or holds a password."""
    for url in urls:
        match = _ADDRESS.fullmatch(url)
        if match is None or not 0 < int(match["port"] or 80) <= 65_535:
            raise ValueError(
                f"{url!r} is not the address of a server; give it as http://HOST:PORT, without a path, user or password"
            )

    if len({url.rstrip("/") for url in urls}) < len(urls):
        raise ValueError(f"{', '.join(urls)} has a server more than once; name each server once")
    return urls


def is_loopback(url: str) -> bool:
    """Return whether an address leads to this machine itself, by the loopback interface."""
    host = urlsplit(url).hostname or ""
    return host == "localhost" or re.fullmatch(r"127(\.\d+){3}|::1", host) is not None


class _Engine(Strict):
    """The settings that every engine has."""

    name: str
    max_num_seqs: Annotated[Count, MAY_CHANGE] = 256
    """Sequences that the engine decodes at once; of servers, requests in flight to each server."""
    dtype: Dtype = "fp32"
    """Number format of the engine's weights and activations. Servers must have been started with the same one."""
    head_dtype: Literal["fp32"] | None = None
    """Number format in which the output layer multiplies; its weight and what it multiplies are in `dtype`. null:
    `dtype`. Servers must have been started with the same one."""
    quantization: Quantization | None = None
    """Number format that the linear layers compute with (docs/precision.md); null: `dtype`. vLLM has `fp8` on a GPU
    only. Servers must have been started with the same one. Status: experimental."""
    kv_cache_dtype: Literal["fp8"] | None = None
    """Number format of cached keys and values; null: `dtype`. Servers must have been started with the same one. Models
    that cache other things than attention reads, such as DeepSeek's latents, are refused by the transformers engine and
    by `precision` fp8 and int8."""


class DraftConfig(Strict):
    """Settings of drafts: the rollout model proposes tokens, and the policy accepts or replaces them, several in one
    forward pass (arXiv 2211.17192, 2302.01318). The responses are the policy's."""

    tokens: Annotated[int, Field(ge=1, le=32)] | Literal["auto"] = 4
    """Tokens that are proposed before each forward pass of the policy; auto: from 4 on, two more after a pass that
    accepted all and one less after one that did not, for each response on its own, 1 to 16. vLLM has no auto."""
    lam: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """A draft x of the rollout model's distribution q is accepted with probability min(1, p(x) / (lam q(x))). With 1
    the tokens have the policy's distribution p; a smaller number accepts more, and the log-probs that are reported are
    those of the distribution that drew the token, between p and q. Evaluations take 1. vLLM has 1 only."""


class TransformersEngineConfig(_Engine):
    """Hugging Face transformers decodes in the learner's process, on any device. Status: supported. It has run on
    CPUs only."""

    name: Literal["transformers"] = "transformers"
    attn_implementation: Literal["sdpa", "eager"] = "sdpa"
    """Attention kernel: torch's fused one where the model supports it, or plain matrix products."""
    draft: DraftConfig | None = None
    """Have the rollout model draft what the policy generates: its share of the rollouts (`rollout_model.share`, 0 for
    all of them) and evaluations; null: the policy generates alone. Only runs have a model that drafts. Status:
    experimental. It has run on CPUs only."""
    enforce_eager: Annotated[bool | Literal["auto"], MAY_CHANGE] = "auto"
    """Run without torch.compile and CUDA graphs; auto: true on a CPU, false on a GPU. Status of false:
    experimental. It has run on one H200."""
    enable_sleep_mode: Annotated[bool | Literal["auto"], MAY_CHANGE] = "auto"
    """Release the memory of the weights while the learner trains, until new ones are sent. An engine process that does
    so shares the GPU of a rank (docs/distributed.md); auto: those of `placement.engines: auto` do. Status:
    experimental. It has run on one H200."""


class VLLMEngineConfig(_Engine):
    """vLLM decodes in the learner's process, on a thread of its own (docs/vllm.md). It needs the extra `vllm`. Status:
    experimental. It has run on CPUs only."""

    name: Literal["vllm"] = "vllm"
    max_model_len: Count | None = None
    """Limit of prompt and response together, tokens; null: the model's own limit."""
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, lt=1.0), MAY_CHANGE] = 0.4
    """Share of the GPU's memory that vLLM takes for weights and cache together."""
    kv_cache_memory_bytes: Annotated[Count | None, MAY_CHANGE] = None
    """Size of the cache of keys and values, bytes; null: what `gpu_memory_utilization` leaves, 1 GiB on a CPU."""
    device: Annotated[Annotated[int, Field(ge=0)] | None, MAY_CHANGE] = None
    """Number of the GPU that vLLM runs on; null: the learner's."""
    enable_sleep_mode: Annotated[bool | Literal["auto"], MAY_CHANGE] = "auto"
    """Release the GPU's memory while the learner trains. Only one engine of a process can. An engine process that does
    so shares the GPU of a rank (docs/distributed.md); auto: those of `placement.engines: auto` do. Status: never run on
    its target (a GPU)."""
    draft: DraftConfig | None = None
    """Have the rollout model draft what the policy generates: its share of the rollouts (`rollout_model.share`, 0 for
    all of them) and evaluations; null: the policy generates alone. Only runs have a model that drafts. Status:
    experimental. It has run on CPUs only."""
    enforce_eager: Annotated[bool | Literal["auto"], MAY_CHANGE] = "auto"
    """Run without torch.compile and CUDA graphs; auto: true on a CPU, false on a GPU."""

    def conflicts(self) -> Conflicts:
        """Refuse drafts that vLLM cannot make: of a changing number of tokens, with lam below 1, or quantized."""
        draft = self.draft or DraftConfig()  # the defaults conflict with nothing

        return [
            (
                draft.tokens == "auto",
                "draft.tokens is 'auto', but vLLM drafts the same number for all responses; give a number, 4 is "
                "usual, or take transformers for every engine",
            ),
            (
                draft.lam < 1.0,
                f"draft.lam is {draft.lam:g}, but vLLM accepts drafts as an exact sample needs it; use draft.lam=1, "
                "or take transformers for every engine",
            ),
            (
                self.draft and is_quantized(self),
                "vLLM's draft model gets plain weights; leave quantization and kv_cache_dtype out, or draft",
            ),
        ]


class ServerEngineConfig(_Engine):
    """The settings of every engine that consists of servers, which the user starts."""

    urls: Annotated[Names, AfterValidator(_check_urls), MAY_CHANGE]
    """Addresses of the servers, such as http://127.0.0.1:8000."""
    weights_folder: Annotated[str | None, MAY_CHANGE] = None
    """Folder through which the servers get new weights, under the same path on every machine. It needs room for two
    copies of the model. null: shared memory, for servers of the same user on this machine."""
    timeout: Annotated[Bound, MAY_CHANGE] = 600.0
    """Time limit of one response and of one weight update, seconds."""
    max_retries: Annotated[Count, MAY_CHANGE] = 5
    """Failed attempts at one response, over all servers, after which the run stops."""
    connect_timeout: Annotated[Bound, MAY_CHANGE] = 600.0
    """Time to wait while no server can be reached, seconds; after that the run stops."""

    def conflicts(self) -> Conflicts:
        """Refuse servers on other machines without a folder through which they get weights."""
        far = [url for url in self.urls if not is_loopback(url)]
        return [
            (
                self.weights_folder is None and far,
                f"weights_folder is null, but {', '.join(far)} may be another machine, which cannot read this one's "
                "memory; set weights_folder to a folder that all of them share, or give addresses such as "
                "http://127.0.0.1:8000",
            ),
        ]

    @model_validator(mode="before")
    @classmethod
    def _check_draft(cls, block: Any) -> Any:
        """Refuse the setting `draft`, which servers lack and other engines have, with the reason."""
        if isinstance(block, dict) and "draft" in block:
            raise ValueError(
                "draft is not for servers, whose draft model would keep the weights that it started with; take "
                "name: vllm or name: transformers, or leave draft out"
            )
        return block


class VLLMServerEngineConfig(ServerEngineConfig):
    """The user's own vLLM servers decode, reached by vLLM's OpenAI-compatible HTTP interface (docs/vllm.md). Status:
    experimental. They have run on CPUs only.

    All of them serve the same model. Where they ask for an API key, it is read from the environment variable
    VLLM_API_KEY.
    """

    name: Literal["vllm_server"] = "vllm_server"


class SGLangServerEngineConfig(ServerEngineConfig):
    """The user's own SGLang servers decode (docs/vllm.md). Status: experimental.

    All of them serve the same model. Where they ask for an API key, it is read from the environment variable
    SGLANG_API_KEY. They have no top_p, top_k, quantization or kv_cache_dtype.
    """

    name: Literal["sglang_server"] = "sglang_server"

    def conflicts(self) -> Conflicts:
        """Refuse what the base class refuses, and quantization, which sglang_server does not have."""
        return [
            *super().conflicts(),
            (
                is_quantized(self),
                "quantization and kv_cache_dtype are not for sglang_server, which sends plain weights; leave "
                "quantization and kv_cache_dtype out, or take vllm_server or transformers in its place",
            ),
        ]


def is_remote(engine: "EngineConfig") -> bool:
    """Return whether the engine consists of servers that the user starts."""
    return isinstance(engine, ServerEngineConfig)


def sleeps(engine: "EngineConfig") -> bool:
    """Return whether the engine releases memory while the learner trains."""
    return getattr(engine, "enable_sleep_mode", False) is True


def is_quantized(engine: _Engine) -> bool:
    """Return whether the engine has quantized linear layers or a quantized cache of keys and values."""
    return bool(engine.quantization or engine.kv_cache_dtype)


def number_formats(engine: "EngineConfig") -> str:
    """Name the number formats of an engine's linear layers and of its cached keys and values."""
    return f"{engine.quantization or engine.dtype}, cache {engine.kv_cache_dtype or engine.dtype}"


def cache_format(engine: "EngineConfig", device: str) -> str | None:
    """Name the number format of an engine's cached keys and values; None: the engine's `dtype`.

    On a CPU vLLM truncates to FP8. All other engines, and vLLM on a GPU, round to the nearest (docs/precision.md).

    Args:
        engine: settings of the engine.
        device: kind of device that the engine runs on, such as cpu.
    """
    truncates = isinstance(engine, VLLMEngineConfig) and device == "cpu" and engine.kv_cache_dtype == "fp8"
    return "fp8, truncated by vLLM on a CPU" if truncates else engine.kv_cache_dtype


def unified_formats(engine: "EngineConfig") -> tuple[str, Dtype] | None:
    """Return (`number_formats`, `dtype`) of an engine whose log-probs training can compute bit for bit; else None.

    Two engines with equal formats, or an engine and training, compute alike. The result is None for an engine that
    drafts, one whose activations are not quantized, and one whose kernels are not those of training.
    """
    # The quantizations that training has are those in which activations are quantized too.
    if not isinstance(engine, TransformersEngineConfig) or engine.quantization not in TRAINED_QUANTIZATION.values():
        return None
    attends_alike = engine.attn_implementation == "sdpa" and not engine.draft
    return (number_formats(engine), engine.dtype) if attends_alike else None


EngineConfig = Annotated[
    TransformersEngineConfig | VLLMEngineConfig | VLLMServerEngineConfig | SGLangServerEngineConfig,
    Field(discriminator="name"),
    by_name("transformers"),
]


def server_urls(engine: EngineConfig | None) -> set[str]:
    """Return the addresses of an engine's servers, without slashes at the end; empty for an engine without servers."""
    return {url.rstrip("/") for url in engine.urls} if isinstance(engine, ServerEngineConfig) else set()


def trained_conflicts(key: str, engine: EngineConfig, precision: str, quantization: Quantization | None) -> Conflicts:
    """Return what keeps an engine from computing with the same quantized numbers as training at precision fp8 or int8.

    Args:
        key: the setting that describes the engine, `engine` or `evaluation.engine`.
        engine: settings of the engine.
        precision: precision of training, a key of `TRAINED_QUANTIZATION`.
        quantization: the quantization that the engine must have; None: the one that fits `precision`.
    """
    wanted = quantization or TRAINED_QUANTIZATION[precision]
    advice = f"{key}=transformers " if engine.name == "sglang_server" else ""  # SGLang cannot be quantized

    return [
        (
            engine.quantization != wanted,
            f"precision {precision} trains through the codes that the engine computes with, but {key}.quantization "
            f"is {engine.quantization}; set {advice}{key}.quantization={wanted}, or precision to fp32 or bf16",
        ),
        (
            getattr(engine, "draft", None) or getattr(engine, "attn_implementation", "sdpa") != "sdpa",
            f"precision {precision} attends as the engine does with attn_implementation sdpa and without draft; "
            f"leave {key}.attn_implementation and {key}.draft out, or take precision fp32 or bf16",
        ),
    ]
