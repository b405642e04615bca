"""The memory that a run takes at its peak, found out without its weights.

Weights, optimizer and cache are counted from shapes; the largest micro-batch is rehearsed on tensors without memory
(`rehearsal.py`). What a kernel takes for itself is not seen.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from jackpot.analysis.plan.dry_step import Shape, rehearse, resident
from jackpot.analysis.plan.sizes import Size
from jackpot.config.engines import TransformersEngineConfig
from jackpot.config.run import Config
from jackpot.core.types import Role
from jackpot.launch.local import model_paths, pick_device
from jackpot.models.forward import keeps_plain_keys
from jackpot.models.load import DTYPES, load_config, load_meta_model
from jackpot.models.lora import target_layers
from jackpot.models.quantization.convert import weight_bytes
from jackpot.models.quantization.quantizer import SCHEMES

FIRST_USE = 70 * 2**20
"""What the process grows by after its imports and beside its tensors, bytes: 35 MiB of libraries, for code is read when
it first runs (torch's kernels 20, arrow and parquet 10, tokenizers), and as much of what arrow and Python keep once
rollouts have been saved. Measured with torch 2.13 and pyarrow 26 on Linux, as the growth of every mapping in
/proc/self/smaps over three iterations of benchmarks/memory.py's first case, with MALLOC_MMAP_THRESHOLD_=1000000 so that
the allocator wastes nothing; the same for all models."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes. What training and what writing take are not there at the same time."""

    process: int  # this one with everything imported, and `FIRST_USE`; 0 where a GPU holds the rest
    weights: int  # in training, float32, of all models
    engines: int  # their own copies of the weights
    optimizer: int  # AdamW's two moments
    gradients: int  # and those that wait for the end of the iteration
    training: int | None  # activations and the loss of the largest micro-batch; None where shapes alone do not tell
    wasted: int  # while training, by the CPU's allocator, in gaps between tensors that nothing fits into
    writing: int  # keys and values with the distributions of one step, or weights on their way to an engine

    @property
    def peak(self) -> int:
        lasting = self.process + self.weights + self.engines + self.optimizer
        return lasting + max(self.gradients + (self.training or 0) + self.wasted, self.writing)


def plan_memory(config: Config, sizes: Mapping[Role, Size], prompt_tokens: int) -> Memory:
    """What a run takes if prompts have `prompt_tokens` tokens and every response has the most that it may.

    Counted are the learner and transformers engines; a vLLM engine has memory of its own (docs/vllm.md).

    Raises:
        ModelError: as `model_sizes`, or a model whose activations cannot be checkpointed.
    """
    process = resident() + FIRST_USE if pick_device(config).type == "cpu" else 0  # before what the plan itself takes
    trained, writer = sum(size.trained for size in sizes.values()), config.rollout_model
    reference = sizes["policy"].parameters if config.objective.reference else 0
    waiting = sizes["rollout_model"].trained if writer and writer.update == "iteration" else 0
    rehearsed = rehearse(config, micro_batch(config, prompt_tokens))
    training, wasted = rehearsed or (None, 0)
    return Memory(
        process=process,
        weights=4 * (sum(size.parameters for size in sizes.values()) + reference),
        engines=_engine_weights(config, sizes),
        optimizer=8 * trained,
        gradients=4 * (trained + waiting),
        training=training,
        wasted=wasted,
        writing=max(_writing(config, prompt_tokens), _merged_weights(config)),
    )


def micro_batch(config: Config, prompt_tokens: int) -> Shape:
    """The largest one: as many full sequences as fit, those of a group together where one step takes whole groups."""
    batch, response = config.batch, config.sampling.max_new_tokens
    step = batch.mini_batch_size or batch.rollouts
    rows = max(1, min(step, batch.micro_batch_tokens // (prompt_tokens + response)))
    prompts = math.ceil(rows / batch.group_size) if step == batch.rollouts else min(rows, batch.prompts)
    return Shape(prompts, rows, prompt_tokens, response)


def _engine_weights(config: Config, sizes: Mapping[Role, Size]) -> int:
    """The writer's engine, and the policy's for evaluations where another model writes."""
    writer: Role = "rollout_model" if "rollout_model" in sizes else "policy"
    engines: list[tuple[Role, Any]] = [(writer, config.engine)]
    if writer != "policy" or config.evaluation.engine:
        engines.append(("policy", config.evaluation.engine or config.engine))
    paths = model_paths(config, None)
    return sum(
        _held(settings, paths[role], sizes[role].parameters)
        for role, settings in engines
        if isinstance(settings, TransformersEngineConfig)
    )


def _held(settings: TransformersEngineConfig, path: str, parameters: int) -> int:
    """Bytes of the weights while an engine writes; while it starts, those to quantize are there in its dtype."""
    dtype = DTYPES[settings.dtype]
    if settings.quantization is None:
        return parameters * dtype.itemsize
    return weight_bytes(load_meta_model(path), SCHEMES[settings.quantization], dtype)


def _merged_weights(config: Config) -> int:
    """The weights that an adapter changes, which are made to be sent: an engine of transformers takes them when it has
    all, one model after another."""
    engines = {"policy": config.evaluation.engine or config.engine, "rollout_model": config.engine}
    if config.rollout_model is None:
        engines["policy"] = config.engine
    return max(
        4 * sum(layer.weight.numel() for layer in target_layers(load_meta_model(path), lora.target_modules).values())
        if (lora := getattr(config, role).lora) and isinstance(engines[role], TransformersEngineConfig)
        else 0
        for role, path in model_paths(config, None).items()
    )


def _writing(config: Config, prompt_tokens: int) -> int:
    """The most that a transformers engine takes: its cache, a step's distributions, what was written."""
    paths = model_paths(config, None)
    writer = paths.get("rollout_model", paths["policy"])
    engines = [(config.engine, writer, config.batch.rollouts)]
    engines.append((config.evaluation.engine or config.engine, paths["policy"], config.evaluation.problems))
    return max(
        _decoding(config, settings, load_config(path).get_text_config(), rows, prompt_tokens)
        for settings, path, rows in engines
    )


def _decoding(config: Config, settings: Any, model: PreTrainedConfig, requests: int, prompt_tokens: int) -> int:
    if not isinstance(settings, TransformersEngineConfig):
        return 0
    rows, sampling = min(requests, settings.max_num_seqs), config.sampling
    query_heads = getattr(model, "num_attention_heads", 1)
    head_dim = getattr(model, "head_dim", None) or model.hidden_size // query_heads
    heads = getattr(model, "num_key_value_heads", None) or query_heads
    length = prompt_tokens + sampling.max_new_tokens
    numbers = 2 * model.num_hidden_layers * heads * head_dim * length if keeps_plain_keys(model) else 0
    cache = numbers * DTYPES[settings.dtype].itemsize
    written = sampling.max_new_tokens * (2 + 2 * sampling.num_top_log_probs) * 4
    return rows * (cache + written + 3 * 4 * model.vocab_size)
