"""The memory that a run takes at its peak, found out without its weights. Layer 6.

One micro-batch at full length goes forward and backward through the models on fake tensors (torch's FakeTensorMode:
shapes alone), and every tensor that comes and goes is counted. What a kernel takes for itself is not seen.
"""

import logging
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from jackpot.config import Config
from jackpot.config_engines import TransformersEngineConfig
from jackpot.launch.engines import DTYPES
from jackpot.launch.local import model_paths, pick_device
from jackpot.launch.plan import Size, critic_outline
from jackpot.models.checkpointing import checkpoint_activations
from jackpot.models.forward import backbone, keeps_plain_keys, logit_softcap, output_layer, predicting_hidden
from jackpot.models.load import load_config, load_outline
from jackpot.models.lora import add_adapter
from jackpot.ops.head_tiles import Head
from jackpot.ops.tiled_heads import read_heads
from jackpot.precision.convert import weight_bytes
from jackpot.precision.schemes import SCHEMES
from jackpot.tasks import make_task
from jackpot.tasks.base import PromptStream
from jackpot.types import Role

PROMPTS_LOOKED_AT = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes. What training and what writing take are not there at the same time."""

    process: int  # this one with everything imported; 0 where a GPU holds the rest
    weights: int  # in training, float32, of all models
    engines: int  # their own copies of the weights
    optimizer: int  # AdamW's two moments
    gradients: int
    training: int | None  # activations and the loss of the largest micro-batch; None where shapes alone do not tell
    writing: int  # keys and values, and the distributions of one step

    @property
    def peak(self) -> int:
        lasting = self.process + self.weights + self.engines + self.optimizer
        return lasting + max(self.gradients + (self.training or 0), self.writing)


class Shape(NamedTuple):
    """Of the largest micro-batch."""

    prompts: int
    rows: int
    prompt_tokens: int
    response_tokens: int


def longest_prompt(config: Config, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens, among the first prompts of the task."""
    with closing(make_task(config.task, tokenizer)) as task:
        prompts = PromptStream(task, "train", config.seed).next(PROMPTS_LOOKED_AT)
    return max(len(prompt.token_ids) for prompt in prompts)


def plan_memory(config: Config, sizes: Mapping[Role, Size], prompt_tokens: int) -> Memory:
    """What a run takes if prompts have `prompt_tokens` tokens and every response has the most that it may.

    Counted are the learner and transformers engines; a vLLM engine has memory of its own (docs/vllm.md).

    Raises:
        ModelError: as `model_sizes`, or a model whose activations cannot be checkpointed.
    """
    trained = sum(size.trained for size in sizes.values())
    reference = [sizes["policy"].parameters] if config.objective.reference else []
    parameters = sum(size.parameters for size in sizes.values()) + sum(reference)
    return Memory(
        process=_resident() if pick_device(config).type == "cpu" else 0,
        weights=4 * parameters,
        engines=_engine_weights(config, sizes),
        optimizer=8 * trained,
        gradients=4 * trained,
        training=_training(config, micro_batch(config, prompt_tokens)),
        writing=_writing(config, prompt_tokens),
    )


def micro_batch(config: Config, prompt_tokens: int) -> Shape:
    """The largest one: as many full sequences as fit, those of a group together where one step takes whole groups."""
    batch, response = config.batch, config.sampling.max_new_tokens
    step = batch.step_size or batch.rollouts
    rows = max(1, min(step, batch.micro_batch_tokens // (prompt_tokens + response)))
    prompts = math.ceil(rows / batch.group_size) if step == batch.rollouts else min(rows, batch.prompts)
    return Shape(prompts, rows, prompt_tokens, response)


def _resident() -> int:
    """Memory of this process now, bytes. 0 where /proc does not tell."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * 4096 if status.exists() else 0


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
    """Bytes of the weights while an engine writes; while it starts, those to quantise are there in its dtype."""
    dtype = DTYPES[settings.dtype]
    if settings.quantization is None:
        return parameters * dtype.itemsize
    return weight_bytes(load_outline(path), SCHEMES[settings.quantization], dtype)


class _Tally(TorchDispatchMode):
    """Bytes of all storages that are alive and were made under it, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        self.peak = max(self.peak, self.alive)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.alive += size
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


@contextmanager
def _counted() -> Iterator[_Tally]:
    with FakeTensorMode(), _Tally() as tally:
        yield tally


def _training(config: Config, shape: Shape) -> int | None:
    """Beyond weights and gradients, at the worst moment of one micro-batch. None for a model whose shapes depend on
    values, such as which experts a token goes to."""
    complaints = logging.getLogger(fake_tensor.__name__)
    was_quiet, complaints.disabled = complaints.disabled, True
    try:
        return _counted_training(config, shape)
    except RuntimeError:  # what fake tensors raise, whichever operation it is
        return None
    finally:
        complaints.disabled = was_quiet


def _counted_training(config: Config, shape: Shape) -> int:
    dtype = DTYPES[config.precision]
    models = [_outline(config, role, path) for role, path in model_paths(config, None).items()]
    critic = critic_outline(config).eval() if config.critic else None
    if critic is not None and config.activation_checkpointing:
        checkpoint_activations(critic)
    with _counted() as tally:
        for model in models:
            _give_memory(model)
        lasting = tally.peak = tally.alive
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            hidden = [_read(model, shape) for model in models]
            kept = _beside(config, shape, len(models))
            values = _head(config, models, hidden)
        sum(value.sum() for value in values).backward()
        training = tally.peak - lasting
        del hidden, values, kept
        return training if critic is None else max(training, _counted_critic(tally, critic, shape))


def _counted_critic(tally: _Tally, critic: PreTrainedModel, shape: Shape) -> int:
    """It comes after the others, and reads a prompt with each response."""
    _give_memory(critic)
    lasting = tally.peak = tally.alive
    ids = torch.zeros(shape.rows, shape.prompt_tokens + shape.response_tokens, dtype=torch.int64)
    backbone(critic)(input_ids=ids, use_cache=False).last_hidden_state.sum().backward()
    return tally.peak - lasting


def _beside(config: Config, shape: Shape, num_models: int) -> list[Tensor]:
    """What waits for backward beside activations and loss: the attention mask of padded rows, and of each model the top
    log-probs with their ids, those at the engine's, and of two models those at each other's."""
    count = shape.rows * shape.response_tokens * config.sampling.num_top_log_probs
    tops = [torch.empty(count * size, dtype=torch.uint8) for size in (8, 4, 4, 4) for _ in range(num_models)]
    columns = shape.prompt_tokens + shape.response_tokens
    return [torch.empty(shape.rows, shape.response_tokens, columns, dtype=torch.bool), *tops]


def _outline(config: Config, role: Role, path: str) -> PreTrainedModel:
    """The model as training has it, on the meta device."""
    settings, model = getattr(config, role), load_outline(path).eval()
    if settings.optimizer is None:
        return model.requires_grad_(False)
    if settings.lora is not None:
        add_adapter(model, settings.lora, 0)
    if config.activation_checkpointing:
        checkpoint_activations(model)
    return model


def _give_memory(model: PreTrainedModel) -> None:
    """Put weights, buffers and gradients on the CPU, which under a FakeTensorMode takes none. Tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in made:
                weight = torch.empty(parameter.shape, dtype=torch.float32)
                made[id(parameter)] = new = nn.Parameter(weight, parameter.requires_grad)
                new.grad = torch.empty_like(weight) if parameter.requires_grad else None
            setattr(module, name, made[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))


def _read(model: PreTrainedModel, shape: Shape) -> Tensor:
    """The hidden states that predict all response tokens, [N, H]."""
    prompts, rows, prompt_tokens, response_tokens = shape
    ids = torch.zeros(prompts, prompt_tokens, dtype=torch.int64)
    responses = torch.zeros(rows, response_tokens, dtype=torch.int64)
    index = torch.arange(rows) % prompts
    return predicting_hidden(model, ids, None, index, responses, None).flatten(0, 1)


def _head(config: Config, models: Sequence[PreTrainedModel], hidden: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What carries a gradient out of the loss layer."""
    heads = [
        Head(hidden=states, weight=output_layer(model).weight, soft_cap=logit_softcap(model))
        for model, states in zip(models, hidden, strict=True)
    ]
    ids = torch.zeros(len(hidden[0]), dtype=torch.int64)  # no top-k: it looks at values, see `_beside`
    return read_heads(heads, ids, None, config.sampling.temperature, None, 0, None)[0]


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
    rows, sampling = min(requests, settings.max_batch_size), config.sampling
    query_heads = getattr(model, "num_attention_heads", 1)
    head_dim = getattr(model, "head_dim", None) or model.hidden_size // query_heads
    heads = getattr(model, "num_key_value_heads", None) or query_heads
    length = prompt_tokens + sampling.max_new_tokens
    numbers = 2 * model.num_hidden_layers * heads * head_dim * length if keeps_plain_keys(model) else 0
    cache = numbers * DTYPES[settings.dtype].itemsize
    written = sampling.max_new_tokens * (2 + 2 * sampling.num_top_log_probs) * 4
    return rows * (cache + written + 3 * 4 * model.vocab_size)
