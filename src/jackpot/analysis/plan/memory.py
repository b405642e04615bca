"""The memory that a run holds at its peak, planned without loading any weights.

Weights, optimizer and caches are counted from shapes; one training step is run on fake tensors (`dry_step.py`). Only
tensors are planned: not the process with its libraries, the gaps that an allocator leaves between tensors, or the
memory that a kernel allocates for itself.

Status: experimental.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jackpot.analysis.plan.dry_step import MicroBatchShape, dry_step
from jackpot.analysis.plan.sizes import ModelSize, outline
from jackpot.config.config import Config
from jackpot.config.engines import EngineConfig, TransformersEngineConfig, sleeps
from jackpot.core.roles import Role
from jackpot.launch.engines import engines_of
from jackpot.models.cost import cached_numbers
from jackpot.models.forward import keeps_plain_keys
from jackpot.models.load import DTYPES, load_config
from jackpot.models.lora import target_layers
from jackpot.models.quantization.convert import weight_bytes
from jackpot.models.quantization.quantizer import SCHEMES


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """The bytes of a run's tensors by purpose; those of training and those of generation do not exist together."""

    weights: int  # weights of all models in training, float32
    engines: int  # the engines' own copies of the weights
    sleeping: int = 0  # part of `engines` that is released while the learner trains
    optimizer: int  # AdamW's two moments
    copies: int  # copies of old weights in the host's memory, with which rollouts generated ahead are checked
    gradients: int  # gradients of all trained weights, and those that wait for the end of the iteration
    training: int | None  # activations and loss of the largest micro-batch; None where shapes depend on values
    generation: int  # keys and values with the distributions of one step, or weights on their way to an engine

    @property
    def peak(self) -> int:
        """Return the bytes at the run's peak, which is in training or in generation."""
        lasting = self.weights + self.engines + self.optimizer + self.copies
        return lasting + max(self.gradients + (self.training or 0) - self.sleeping, self.generation)


def plan_memory(config: Config, sizes: Mapping[Role, ModelSize], prompt_tokens: int) -> MemoryPlan:
    """Plan the memory of a run whose prompts have `prompt_tokens` tokens and whose responses are as long as allowed.

    Learner and transformers engines are counted; a vLLM engine has memory of its own (docs/vllm.md).

    Args:
        config: settings of the run.
        sizes: numbers of parameters by role.
        prompt_tokens: length of every prompt, tokens.

    Raises:
        ModelError: as `model_sizes`, or a model whose activations cannot be checkpointed.
    """
    # A parameter takes 4 bytes as a weight, 4 as a gradient, and 8 in AdamW's moments.
    trained = sum(size.trained for size in sizes.values())
    rollout_model = config.rollout_model
    reference = sizes["policy"].parameters if config.objective.reference else 0
    # Gradients of a rollout model that is updated once in an iteration are collected until then.
    waiting = sizes["rollout_model"].trained if rollout_model and rollout_model.update == "iteration" else 0

    return MemoryPlan(
        weights=4 * (sum(size.parameters for size in sizes.values()) + reference),
        engines=_engine_weights(config),
        # With `batch.ahead` engines may generate while the learner trains, so none is counted as asleep.
        sleeping=0 if config.batch.ahead else _engine_weights(config, only_sleeping=True),
        optimizer=8 * trained,
        copies=_copied_weights(config, sizes),
        gradients=4 * (trained + waiting),
        training=dry_step(config, micro_batch(config, prompt_tokens)),
        # Weights are sent between generations, so the two do not exist together, and the larger one counts.
        generation=max(_generation(config, prompt_tokens), _merged_weights(config)),
    )


def micro_batch(config: Config, prompt_tokens: int) -> MicroBatchShape:
    """Return the shape of the largest micro-batch, with as many sequences of full length as fit.

    If an optimizer step takes the whole rollout batch, responses to one prompt are together in a micro-batch. Else a
    micro-batch may have as many prompts as sequences.
    """
    batch, response = config.batch, config.sampling.max_new_tokens
    step = batch.mini_batch_size or batch.rollouts

    rows = max(1, min(step, batch.micro_batch_tokens // (prompt_tokens + response)))
    prompts = math.ceil(rows / batch.group_size) if step == batch.rollouts else min(rows, batch.prompts)
    return MicroBatchShape(prompts=prompts, rows=rows, prompt_tokens=prompt_tokens, response_tokens=response)


def _copied_weights(config: Config, sizes: Mapping[Role, ModelSize]) -> int:
    """Return the bytes of copies of older weights, with which training checks rollouts that were generated ahead."""
    if not (config.batch.ahead and config.guard.check_engine):
        return 0
    return 4 * sum(sizes[role].trained for role in config.model_paths())


def _engine_weights(config: Config, only_sleeping: bool = False) -> int:
    """Return the bytes of the weights in transformers engines: the engine of rollouts and, if any, that of evaluations.

    Args:
        config: settings of the run.
        only_sleeping: count only engines that release memory while the learner trains.
    """
    paths = config.model_paths()
    return sum(
        engine_weights(settings, paths[role])
        for role, settings in engines_of(config).values()
        if isinstance(settings, TransformersEngineConfig) and (sleeps(settings) or not only_sleeping)
    )


def engine_weights(settings: EngineConfig, path: str) -> int:
    """Return the bytes of the weights that an engine holds after its start, codes and scales if it is quantized."""
    # For int8_w8a16 vLLM holds plain weights, and no codes.
    is_plain = settings.quantization == "int8_w8a16" and not isinstance(settings, TransformersEngineConfig)
    scheme = SCHEMES[settings.quantization] if settings.quantization and not is_plain else None
    return weight_bytes(outline(path), scheme, DTYPES[settings.dtype])


def cached_number_bytes(settings: EngineConfig) -> int:
    """Return the bytes of one number in an engine's cached keys and values."""
    return 1 if settings.kv_cache_dtype else DTYPES[settings.dtype].itemsize


def _merged_weights(config: Config) -> int:
    """Return the bytes of an adapter's merged weights, which exist while they are sent to a transformers engine.

    Models are sent one after the other, so the larger one counts. 0 without an adapter or such an engine.
    """
    largest = 0
    for role, engine in engines_of(config).values():
        settings = getattr(config, role)
        if settings.lora and isinstance(engine, TransformersEngineConfig):
            layers = target_layers(outline(settings.path), settings.lora.target_modules).values()
            merged = sum(layer.weight.numel() for layer in layers) * DTYPES[engine.dtype].itemsize
            largest = max(largest, merged)
    return largest


def _generation(config: Config, prompt_tokens: int) -> int:
    """Return the most bytes that a transformers engine holds beside weights, in rollouts or in evaluations.

    It is 0 without such an engine.
    """
    evaluation, policy = config.evaluation, config.policy.path
    writer = config.model_paths().get("rollout_model", policy)
    in_rollouts = _decoding(config, config.engine, writer, config.batch.rollouts, prompt_tokens)
    answers = evaluation.problems * evaluation.k
    in_evaluations = _decoding(config, evaluation.engine or config.engine, policy, answers, prompt_tokens)
    return max(in_rollouts, in_evaluations)


def _decoding(config: Config, settings: EngineConfig, path: str, requests: int, prompt_tokens: int) -> int:
    """Return the bytes that a transformers engine holds beside weights in generation; 0 for any other engine.

    These are the cache, the responses with their log-probs, and the distributions of one step. `path` is that of the
    model, and `requests` the number of all responses, of which the engine generates at most `max_num_seqs` at once.
    """
    if not isinstance(settings, TransformersEngineConfig):
        return 0

    model, sampling = load_config(path).get_text_config(), config.sampling
    # For a model whose layers keep something else than keys and values, no cache is counted.
    cached = cached_numbers(outline(path)) if keeps_plain_keys(model) else 0
    cache = cached * (prompt_tokens + sampling.max_new_tokens) * DTYPES[settings.dtype].itemsize
    # Numbers of four bytes: an id and a log-prob of each token and of its top-k list, and three distributions.
    responses = sampling.max_new_tokens * (2 + 2 * sampling.num_top_log_probs) * 4
    distributions = 3 * 4 * model.vocab_size
    return min(requests, settings.max_num_seqs) * (cache + responses + distributions)
