"""The planned memory of a run on each of several GPUs.

Weights, gradients and moments are sharded fully (FSDP), every layer is gathered in float32 when it is computed, and
each GPU has an engine or a part of one. docs/distributed.md says what of this has run.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from jackpot.analysis.plan.cost_model import Gpu
from jackpot.analysis.plan.memory import MemoryPlan, cached_number_bytes, engine_weights
from jackpot.analysis.plan.sizes import outline, parameter_count
from jackpot.config.config import Config
from jackpot.config.engines import EngineConfig, TransformersEngineConfig, VLLMEngineConfig, sleeps
from jackpot.core.roles import Role
from jackpot.launch.engines import engines_of
from jackpot.models.cost import cached_numbers
from jackpot.models.forward import backbone, output_layer

COUNTS = (1, 2, 4, 8, 16, 32, 64)  # numbers of GPUs that are tried
TENSOR_PARALLEL = (1, 2, 4, 8)  # numbers of GPUs of one engine, within a machine
ENGINE_BYTES = 2e9
"""Memory of a vLLM engine for activations and CUDA graphs, within its share of the GPU. Assumed."""


class Blocks(NamedTuple):
    """Numbers of parameters that each GPU gathers whole from all shards during training."""

    layer: int  # parameters of the largest layer of all models
    heads: int  # parameters of the output layers of policy and rollout model, which the joint head needs together
    reference: int  # parameters of the reference's output layer, gathered with the others, without a gradient
    copied: int  # parameters of trained models that autocast copies on a single GPU, where nothing is sharded

    @property
    def gathered(self) -> int:
        """Return the most bytes that a GPU gathers at a time.

        Gathered are two layers, all output layers, and the gradient of a layer or of the output layers.
        """
        return 4 * (2 * self.layer + self.heads + self.reference) + 4 * max(self.layer, self.heads)


class EngineNeeds(NamedTuple):
    """The memory that one copy of a model needs in an engine."""

    role: Role
    settings: EngineConfig
    weights: int  # size of all weights, bytes
    token: int  # size of the keys and values of one token, bytes
    longest: int  # greatest length of a sequence, tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """The memory of a run on each of its GPUs by purpose, bytes."""

    gpus: int  # number of GPUs
    limit: float  # whole memory of a GPU
    weights: float  # weights of all models in training, float32
    optimizer: float
    gradients: float
    gathered: float  # whole layers that are gathered at once, and their gradients
    training: float | None  # activations and loss of a micro-batch; None where shapes alone do not decide them
    resting: float  # memory of engines while the learner trains
    generation: float  # memory of engines while they generate
    tensor_parallel: dict[str, int]  # GPUs of one engine, by its key in the settings; 0 if it does not fit

    @property
    def peak(self) -> float:
        """Return the bytes at the peak, which is in training or in generation."""
        train = self.gradients + self.gathered + (self.training or 0) + self.resting
        return self.weights + self.optimizer + max(train, self.generation)

    @property
    def fits(self) -> bool:
        """Return whether the run fits: each GPU holds the peak, and every engine has room for the longest sequence."""
        return self.training is not None and self.peak <= self.limit and all(self.tensor_parallel.values())


@contextmanager
def sharded() -> Iterator[None]:
    """Turn off autocast's cache of weight copies in the block, as FSDP frees each copy together with its layer."""
    was_enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(was_enabled)


def blocks(config: Config) -> Blocks:
    """Count the parameters that each GPU gathers whole from all shards, and those that autocast copies.

    Raises:
        ModelError: a model cannot be read, as `load_meta_model` says.
    """
    models: dict[Role, PreTrainedModel] = {role: outline(path) for role, path in config.model_paths().items()}
    reference = config.objective.reference
    copied = 0 if config.precision == "fp32" else sum(_copied(config, role, model) for role, model in models.items())

    return Blocks(
        layer=max(_largest_layer(model) for model in models.values()),
        heads=sum(output_layer(model).weight.numel() for model in models.values()),
        reference=output_layer(outline(reference.path or config.policy.path)).weight.numel() if reference else 0,
        copied=copied,
    )


def _copied(config: Config, role: Role, model: PreTrainedModel) -> int:
    """Count the parameters that autocast copies: those of a model's linear layers; 0 unless all weights are trained."""
    settings = getattr(config, role)
    if settings.optimizer is None or settings.lora is not None:
        return 0
    return sum(module.weight.numel() for module in backbone(model).modules() if isinstance(module, nn.Linear))


def _largest_layer(model: PreTrainedModel) -> int:
    """Count the parameters of the largest layer that FSDP gathers; a model of no known layers is gathered whole."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)] or [model]
    return max(map(parameter_count, layers))


def engine_needs(config: Config, prompt_tokens: int) -> dict[str, EngineNeeds]:
    """Return the memory needs of the engine of rollouts and, if there is one, that of evaluations.

    The keys are those of the engines in the settings: `engine` and `evaluation.engine`.

    Args:
        config: settings of the run.
        prompt_tokens: length of the longest prompt.
    """
    needs = {
        key: needs_of(config, role, settings, prompt_tokens) for key, (role, settings) in engines_of(config).items()
    }
    policy = needs.get("evaluation.engine")
    if policy and config.draft and isinstance(policy.settings, VLLMEngineConfig):  # one vLLM holds both models
        draft = needs_of(config, "rollout_model", policy.settings, prompt_tokens)
        needs["evaluation.engine"] = policy._replace(
            weights=policy.weights + draft.weights, token=policy.token + draft.token
        )
    return needs


def needs_of(config: Config, role: Role, settings: EngineConfig, prompt_tokens: int) -> EngineNeeds:
    """Return the memory needs of an engine with `settings` that holds the model of `role`.

    Args:
        config: settings of the run.
        role: policy or rollout_model.
        settings: settings of the engine.
        prompt_tokens: length of the longest prompt.
    """
    path = config.model_paths()[role]
    return EngineNeeds(
        role=role,
        settings=settings,
        weights=engine_weights(settings, path),
        token=cached_numbers(outline(path)) * cached_number_bytes(settings),
        longest=prompt_tokens + config.sampling.max_new_tokens,
    )


def shard(
    memory: MemoryPlan, gathered: Blocks, needs: Mapping[str, EngineNeeds], gpu: Gpu, gpus: int, offloads: bool = False
) -> Shard:
    """Return the memory of a run on each of `gpus` GPUs.

    Args:
        memory: memory of training in one process, planned within the context `sharded`.
        gathered: numbers of parameters that each GPU gathers.
        needs: memory needs of the engines, by the keys `engine` and `evaluation.engine`.
        gpu: data sheet of the GPUs.
        gpus: number of GPUs.
        offloads: whether several GPUs keep weights, gradients and moments in the memory of their machines.
    """
    # The share of weights, gradients and moments that is in the memory of each GPU.
    share = 0.0 if offloads and gpus > 1 else 1.0 / gpus
    # An engine that fits on no number of GPUs (degree 0) is counted as if it were spread over all of them.
    degrees = {name: degree(engine, gpu, gpus) for name, engine in needs.items()}
    engine_bytes = {name: _engine_bytes(engine, degrees[name] or gpus, gpu) for name, engine in needs.items()}

    return Shard(
        gpus=gpus,
        limit=gpu.memory,
        weights=share * memory.weights,
        optimizer=share * memory.optimizer,
        gradients=share * memory.gradients,
        # Bytes. A single GPU gathers nothing, and holds autocast's copies of two bytes for each parameter.
        gathered=2 * gathered.copied if gpus == 1 else gathered.gathered,
        training=memory.training,
        resting=sum(size for name, size in engine_bytes.items() if not sleeps(needs[name].settings)),
        generation=sum(engine_bytes.values()) + memory.generation,
        tensor_parallel=degrees,
    )


def cache_bytes(engine: EngineNeeds, spread: int, gpu: Gpu) -> float:
    """Return the bytes that one engine on `spread` GPUs has for cached keys and values; infinite unless that is vLLM.

    If `kv_cache_memory_bytes` is not set, they are what weights and activations leave of the memory for the engine.
    """
    settings = engine.settings
    if not isinstance(settings, VLLMEngineConfig):
        return float("inf")
    if settings.kv_cache_memory_bytes is None:
        return spread * (settings.gpu_memory_utilization * gpu.memory - ENGINE_BYTES) - engine.weights
    return spread * settings.kv_cache_memory_bytes


def degree(engine: EngineNeeds, gpu: Gpu, gpus: int) -> int:
    """Return the fewest GPUs on which one engine holds its weights and the longest sequence; 0: no number suffices.

    Only vLLM spreads an engine over several GPUs; for any other engine the result is 1, whether it fits or not.

    Args:
        engine: memory needs of the engine.
        gpu: data sheet of the GPUs.
        gpus: number of GPUs that there are; an engine is on a divisor of this number.
    """
    if not isinstance(engine.settings, VLLMEngineConfig):
        return 1
    longest = engine.token * engine.longest  # bytes of keys and values of the longest sequence
    divisors = (spread for spread in TENSOR_PARALLEL if gpus % spread == 0)
    return next((spread for spread in divisors if cache_bytes(engine, spread, gpu) >= longest), 0)


def _engine_bytes(engine: EngineNeeds, spread: int, gpu: Gpu) -> float:
    """Return the bytes that an engine on `spread` GPUs always holds on each of them; 0 if it is remote.

    For vLLM, which divides its weights among its GPUs, they are weights, cache and overhead, or the share of the GPU
    that it reserves for all of them. An engine of transformers stands whole on each GPU, and holds weights alone.
    """
    settings = engine.settings
    if not isinstance(settings, VLLMEngineConfig):
        return engine.weights if isinstance(settings, TransformersEngineConfig) else 0.0
    if settings.kv_cache_memory_bytes is None:
        return settings.gpu_memory_utilization * gpu.memory
    return engine.weights / spread + settings.kv_cache_memory_bytes + ENGINE_BYTES
