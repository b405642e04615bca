"""An engine from its settings, with its own copy of a model."""

import torch

from jackpot.config.engines import EngineConfig, VLLMEngineConfig, VLLMServerEngineConfig
from jackpot.core.errors import ConfigError
from jackpot.core.types import Version
from jackpot.models.load import eos_token_ids, load_model, load_outline, resolve_path
from jackpot.rollout.engines.base import Engine
from jackpot.rollout.engines.transformers.engine import TransformersEngine
from jackpot.rollout.engines.vllm.engine import VLLMEngine, VLLMSettings
from jackpot.rollout.engines.vllm.server_engine import ServerSettings, VLLMServerEngine
from jackpot.rollout.engines.vllm.weight_format import sent_form

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_GIB = 2**30


def make_engine(config: EngineConfig, path: str, device: torch.device, version: Version) -> Engine:
    """An engine that holds the model in `path`.

    Raises:
        ConfigError: a setting that this device cannot serve.
        EngineError, ModelError: the engine cannot be had, or not with this model.
    """
    if isinstance(config, VLLMEngineConfig):
        return _vllm(config, path, device, version)
    if isinstance(config, VLLMServerEngineConfig):
        return _vllm_server(config, path, version)
    model = load_model(path, DTYPES[config.dtype], device)
    return TransformersEngine(
        model,
        eos_token_ids=eos_token_ids(model),
        version=version,
        max_num_seqs=config.max_num_seqs,
        attention=config.attn_implementation,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
    )


def _vllm(config: VLLMEngineConfig, path: str, device: torch.device, version: Version) -> Engine:
    on_cpu = device.type == "cpu"
    if on_cpu and (config.enable_sleep_mode or config.device is not None):
        raise ConfigError(
            "engine.enable_sleep_mode and engine.device are for GPUs, and this run is on a CPU; leave them out"
        )
    if on_cpu and config.quantization == "fp8":
        raise ConfigError(
            "vLLM computes with FP8 blocks on GPUs; its kernels for CPUs need AMX and most leave activations as they "
            "are. Use engine.quantization=int8_w8a8, which it has here, or engine=transformers, which computes what a "
            "GPU would"
        )
    model = load_model(path, DTYPES[config.dtype]) if config.quantization else load_outline(path)
    return VLLMEngine(
        resolve_path(path),
        shapes={name: parameter.shape for name, parameter in model.named_parameters()},
        form=sent_form(model, config.quantization),
        first=[(name, weight.detach()) for name, weight in model.named_parameters() if config.quantization],
        eos_token_ids=eos_token_ids(model),
        version=version,
        settings=VLLMSettings(
            dtype=DTYPES[config.dtype],
            kv_cache_dtype=config.kv_cache_dtype,
            max_num_seqs=config.max_num_seqs,
            context_length=config.max_model_len,
            gpu_memory_utilization=config.gpu_memory_utilization,
            cache_bytes=config.kv_cache_memory_bytes or (_GIB if on_cpu else None),
            device=config.device if config.device is not None else device.index,
            sleeps=config.enable_sleep_mode,
            compiles=not (on_cpu if config.enforce_eager == "auto" else config.enforce_eager),
            on_gpu=not on_cpu,
        ),
    )


def _vllm_server(config: VLLMServerEngineConfig, path: str, version: Version) -> Engine:
    settings = config.model_dump(exclude={"name"}) | {"dtype": DTYPES[config.dtype]}
    model = load_model(path, DTYPES[config.dtype])
    return VLLMServerEngine(
        model, eos_token_ids=eos_token_ids(model), version=version, settings=ServerSettings(**settings)
    )
