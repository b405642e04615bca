"""Finds the peak memory of one training step by running it on fake tensors, which have shapes and no storage.

The largest micro-batch goes through scoring, forward, the split of the rollout model's gradient and backward, on the
modules that the learner itself uses. Two tiles of the output layer are run; what stands for the others holds as many
bytes for as long (`_head`), and the peak is the same.
"""

import logging
import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from jackpot.analysis.plan.sizes import critic_outline
from jackpot.config.config import Config
from jackpot.core.roles import Role
from jackpot.core.types import PackedRow
from jackpot.launch.build import widen
from jackpot.models.forward import (
    backbone,
    can_pack,
    checkpoint_activations,
    head_logits,
    logit_softcap,
    output_layer,
    predicting_hidden,
    read_row,
)
from jackpot.models.fused import fuse
from jackpot.models.load import DTYPES, load_meta_model
from jackpot.models.lora import add_adapter
from jackpot.models.packed_row import pack_row
from jackpot.models.quantization.quantizer import SCHEMES
from jackpot.models.quantization.training import train_in_codes
from jackpot.models.sampling import sampling_log_probs
from jackpot.models.scoring import MAX_LOGITS
from jackpot.objectives.kernels.autograd import HeadOptions, default_tile, keeps_logits, split_range, tiled_heads
from jackpot.objectives.kernels.linear_head import head_of
from jackpot.objectives.kernels.topk import BLOCK
from jackpot.training.guards import CHECKED_TOKENS
from jackpot.training.joint_optimizer import GradientSplit

RUN_TILES = 2  # of the output layer: the second one has what all later ones have


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of all storages that are made under it: those alive now, and the most at any time."""

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
def tracked_fake_tensors() -> Iterator[MemoryTracker]:
    """Make all tensors of the body fake ones, which compute nothing, and count their bytes."""
    with FakeTensorMode(), MemoryTracker() as tracker:
        yield tracker


class MicroBatchShape(NamedTuple):
    """Holds the shape of the largest micro-batch of a run."""

    prompts: int  # different ones
    rows: int  # sequences
    prompt_tokens: int
    response_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _DryModels:
    """Holds the models of a run, with weights on the meta device, and the micro-batch that they read."""

    config: Config
    shape: MicroBatchShape
    models: dict[Role, PreTrainedModel]
    reference: PreTrainedModel | None
    critic: PreTrainedModel | None

    @property
    def all(self) -> list[PreTrainedModel]:
        return [model for model in (*self.models.values(), self.reference, self.critic) if model is not None]

    @property
    def accumulates(self) -> bool:
        """Return whether an optimizer step has several micro-batches, so that gradients exist before the one run."""
        batch = self.config.batch
        return self.shape.rows < (batch.mini_batch_size or batch.rollouts)

    @property
    def trained(self) -> list[nn.Parameter]:
        return [parameter for model in self.all for parameter in model.parameters() if parameter.requires_grad]


def dry_step(config: Config, shape: MicroBatchShape) -> int | None:
    """Run one training step on fake tensors.

    Returns:
        The peak of activations, loss and temporary tensors, in bytes, beyond weights and gradients; None for a model
        whose shapes depend on values, such as which experts a token goes to.

    Raises:
        ModelError: as `load_meta_model`, or a model whose activations cannot be checkpointed.
    """
    dry = _DryModels(
        config=config,
        shape=shape,
        models={role: _outline(config, role, path) for role, path in config.model_paths().items()},
        reference=_reference(config),
        critic=_critic(config),
    )
    warnings = logging.getLogger(fake_tensor.__name__)
    was_quiet, warnings.disabled = warnings.disabled, True
    try:
        with tracked_fake_tensors() as tracker:
            return _iteration(dry, tracker)
    except RuntimeError:  # what fake tensors raise where an operation needs values, whichever it is
        return None
    finally:
        warnings.disabled = was_quiet


def _iteration(dry: _DryModels, tracker: MemoryTracker) -> int:
    """Score and train once; later iterations need no more memory."""
    for model in dry.all:
        _give_memory(model)

    lasting = tracker.alive
    _score(dry)
    _train(dry)
    gradients = sum(parameter.nbytes for parameter in dry.trained)
    return max(0, tracker.peak - lasting - gradients)


def _outline(config: Config, role: Role, path: str) -> PreTrainedModel:
    """Make one model of the run on the meta device, frozen, with an adapter or checkpointed as in training."""
    settings, model = getattr(config, role), load_meta_model(path).eval()
    widen(config, model)
    _prepare(config, model)
    if settings.optimizer is None:
        return model.requires_grad_(False)
    if settings.lora is not None:
        add_adapter(model, settings.lora, 0)
    if config.activation_checkpointing:
        checkpoint_activations(model)
    return model


def _fuse(config: Config, model: PreTrainedModel) -> None:
    """Let a model keep as little as in training where that is sure to be on a CPU; on a GPU it keeps more."""
    if config.device == "cpu":
        fuse(model)


def _prepare(config: Config, model: PreTrainedModel) -> None:
    """Let a model other than the critic compute as in training; on a GPU FP8 products need less than is counted."""
    if config.trained_quantization:
        scheme, fp8_cache = SCHEMES[config.trained_quantization], config.engine.kv_cache_dtype == "fp8"
        dtype = DTYPES[config.compute_dtype]
        train_in_codes(model, scheme, config.fp8_backward, fp8_cache, config.device == "cpu", dtype)
    else:
        _fuse(config, model)


def _reference(config: Config) -> PreTrainedModel | None:
    settings = config.objective.reference
    if settings is None:
        return None
    model = load_meta_model(settings.path or config.policy.path).eval().requires_grad_(False)
    widen(config, model)
    if config.trained_quantization:
        _prepare(config, model)
    return model


def _critic(config: Config) -> PreTrainedModel | None:
    if config.critic is None:
        return None
    critic = critic_outline(config.critic.path or config.policy.path).eval()
    _fuse(config, critic)
    if config.activation_checkpointing:
        checkpoint_activations(critic)
    return critic


def _give_memory(model: PreTrainedModel) -> None:
    """Replace weights and buffers of the meta device by fake ones of the CPU, so that they are counted; keep ties."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in made:
                weight = torch.empty(parameter.shape, dtype=torch.float32)
                made[id(parameter)] = nn.Parameter(weight, parameter.requires_grad)
            setattr(module, name, made[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))


def _score(dry: _DryModels) -> None:
    """Score as many tokens as a thorough check of the engine does."""
    config, shape = dry.config, dry.shape
    rows = min(shape.rows, math.ceil(CHECKED_TOKENS / shape.response_tokens))
    part = shape._replace(rows=rows, prompts=min(shape.prompts, rows))
    model, sampling = list(dry.models.values())[-1], config.sampling
    with torch.no_grad(), _precision(config):
        hidden = _read(model, part)
        for states in hidden.split(max(1, MAX_LOGITS // output_layer(model).out_features))[:2]:  # the rest is alike
            sampling_log_probs(head_logits(model, states), sampling.temperature, sampling.top_k, sampling.top_p)


def _train(dry: _DryModels) -> None:
    """Train on one micro-batch; where a step has several, on a later one, before which gradients exist."""
    config, shape = dry.config, dry.shape
    settings = config.rollout_model
    trains_both = settings is not None and settings.optimizer is not None
    if dry.accumulates:
        for parameter in dry.trained:
            parameter.grad = torch.zeros_like(parameter)
    with _precision(config):
        hidden = [_read(model, shape) for model in dry.models.values()]
        waiting = _waiting_tensors(dry)
        values = _head(config, list(dry.models.values()), hidden)
        pulls = _reference_kl(dry, hidden[0])
    split = GradientSplit(values[2].sum(), hidden[1]) if trains_both else None  # the log-probs alone, as eq. 6
    sum((value.sum() for value in (*values, *pulls)), start=torch.zeros(())).backward()
    del hidden, values, pulls, waiting, split
    if dry.critic is not None:
        _critic_backward(dry, dry.critic)


def _critic_backward(dry: _DryModels, critic: PreTrainedModel) -> None:
    """Run forward and backward of the critic, which comes after the other models; padded, it repeats shared prompts."""
    shape = dry.shape
    with _precision(dry.config):
        if can_pack(critic):
            output = read_row(backbone(critic), _row(shape))
        else:
            ids = torch.zeros(shape.rows, shape.prompt_tokens + shape.response_tokens, dtype=torch.int64)
            output = backbone(critic)(input_ids=ids, use_cache=False)
    output.last_hidden_state.sum().backward()


def _reference_kl(dry: _DryModels, policy_hidden: Tensor) -> tuple[Tensor, ...]:
    """Read the frozen reference; return what the exact KL to it adds to the policy's graph, nothing for an estimate."""
    settings = dry.config.objective.reference
    if dry.reference is None or settings is None:
        return ()
    with torch.no_grad():
        hidden = _read(dry.reference, dry.shape)
    if settings.kl_loss_type != "exact":
        with torch.no_grad():
            _head(dry.config, [dry.reference], [hidden])
        return ()
    return _head(dry.config, [dry.reference, dry.models["policy"]], [hidden, policy_hidden])[-1:]


def _waiting_tensors(dry: _DryModels) -> list[Tensor]:
    """Allocate what training holds until backward beyond activations and loss.

    That is for each model the mask of responses to prompts of several lengths, its top log-probs with their ids, its
    log-probs at the engine's top ids, and, of two models, those at the other's top ids.
    """
    shape = dry.shape
    count = shape.rows * shape.response_tokens * dry.config.sampling.num_top_log_probs
    tops = [torch.empty(count * size, dtype=torch.uint8) for size in (8, 4, 4, 4) for _ in dry.models]
    columns = shape.prompt_tokens + shape.response_tokens
    masks = [torch.empty(shape.rows, shape.response_tokens, columns) for _ in dry.models]
    return [*(masks if shape.prompts < shape.rows else []), *tops]


def _read(model: PreTrainedModel, shape: MicroBatchShape) -> Tensor:
    """Return the hidden states that predict all response tokens, [N, H]."""
    if can_pack(model):
        row = _row(shape)
        return read_row(backbone(model), row).last_hidden_state[0].index_select(0, row.predicting.flatten())
    prompts, rows, prompt_tokens, response_tokens = shape
    ids = torch.zeros(prompts, prompt_tokens, dtype=torch.int64)
    responses = torch.zeros(rows, response_tokens, dtype=torch.int64)
    index = torch.arange(rows) % prompts
    return predicting_hidden(model, ids, None, index, responses, None).flatten(0, 1).clone()  # those that exist


def _row(shape: MicroBatchShape) -> PackedRow:
    """Lay a micro-batch out as one row of fake tensors."""
    prompts, rows, prompt_tokens, response_tokens = shape
    with unset_fake_temporarily():  # the plan depends on lengths
        responses = [torch.zeros(response_tokens, dtype=torch.int64)] * rows
        row = pack_row([[0] * prompt_tokens] * prompts, [number % prompts for number in range(rows)], responses)
    tensors = {field.name: value for field in fields(row) if isinstance(value := getattr(row, field.name), Tensor)}
    return replace(row, **{name: torch.empty(value.shape, dtype=value.dtype) for name, value in tensors.items()})


def _head(config: Config, models: Sequence[PreTrainedModel], hidden: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run the joint head on the first tiles of the vocabulary and return its outputs that carry a gradient, [N] each.

    While its backward pass goes over them, the gradients of the other rows of the output layers are held.
    """
    layers = [output_layer(model) for model in models]
    weights = [layer.weight for layer in layers]
    options = HeadOptions(logits_memory=config.head_logits_memory * 2**20)
    positions, tokens = default_tile(len(hidden[0]), len(weights[0]))
    tile = positions, split_range(len(weights[0]), tokens, BLOCK)[0].stop
    run, soft_caps = RUN_TILES * tile[1], [logit_softcap(model) for model in models]
    whole = [
        replace(head_of(layer, states, cap), bias=None)
        for layer, states, cap in zip(layers, hidden, soft_caps, strict=True)
    ]
    if any(keeps_logits(whole, options)):
        run = len(weights[0])  # then the logits are few
    else:
        options = replace(options, logits_memory=0)
    parts = [weight[:run] if run < len(weight) else weight for weight in weights]
    heads = [replace(head, weight=part) for head, part in zip(whole, parts, strict=True)]
    ids = torch.zeros(len(hidden[0]), dtype=torch.int64)  # no top-k: `_waiting_tensors` counts it
    outputs, _ = tiled_heads(heads, ids, None, config.sampling.temperature, None, 0, tile, True, options)
    values = tuple(value for value in outputs if value is not None)  # with the moments none is missing
    for number, (weight, part) in enumerate(zip(weights, parts, strict=True)):
        if part is not weight and part.requires_grad:
            own = values[2 * number : 2 * number + 2]
            _hold_gradient([*own, *values[2 * len(heads) :]], part, (len(weight) - run, weight.shape[1]))
    return values


def _hold_gradient(values: Sequence[Tensor], part: Tensor, shape: tuple[int, int]) -> None:
    """Hold a tensor of `shape` from when backward reaches one of `values` to when it has the gradient of `part`."""
    held: list[Tensor] = []

    def hold(gradient: Tensor | None) -> None:
        if gradient is not None and not held:  # None: this pass does not go through the value
            held.append(torch.empty(shape))

    def release(_: Tensor) -> None:
        held.clear()

    for value in values:
        value.register_hook(hold)
    part.register_hook(release)


def _precision(config: Config) -> torch.autocast:
    dtype = DTYPES[config.compute_dtype]
    return torch.autocast("cpu", dtype, enabled=dtype != torch.float32)
