"""What an iteration does with memory, gone through on tensors that have none (`tally.py`).

The largest micro-batch goes through scoring, forward, the parts of the rollout model's gradient and backward, on the
modules that the learner itself uses.
"""

import logging
import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from jackpot.analysis.plan.sizes import critic_outline
from jackpot.config.run import Config
from jackpot.core.types import Role
from jackpot.launch.local import model_paths, pick_device
from jackpot.models.forward import (
    backbone,
    checkpoint_activations,
    head_logits,
    logit_softcap,
    output_layer,
    predicting_hidden,
)
from jackpot.models.load import DTYPES, load_meta_model
from jackpot.models.lora import add_adapter
from jackpot.models.sampling import sampling_log_probs
from jackpot.models.scoring import MAX_LOGITS
from jackpot.objectives.kernels.autograd import tiled_heads
from jackpot.objectives.kernels.tiles import Head
from jackpot.training.gradients import GradientDecomposition
from jackpot.training.guards import CHECKED_TOKENS
from jackpot.training.optimizer import ModelOptimizer

_PAGE = 4096
_STATM = Path("/proc/self/statm")  # in pages: size, resident, shared, text, library, data, dirty


def resident() -> int:
    """Memory of this process now, bytes. 0 where /proc does not tell."""
    return _statm(1)


def _data() -> int:
    """Address space that this process has for data, used or not; bytes."""
    return _statm(5)


def _statm(column: int) -> int:
    return int(_STATM.read_bytes().split()[column]) * _PAGE if _STATM.exists() else 0


class Tally(TorchDispatchMode):
    """Bytes of all storages that are alive and were made under it, and the most there ever were.

    Args:
        reserves: ask the process's own allocator for as much whenever a tensor is made, never touch it, and give it
            back when the tensor goes. How far the process then grows is how far a run does. That is more than its
            tensors: glibc before 2.38 cannot use the place of a freed tensor for one of the same size, unless its
            neighbours are free too (sourceware bug 14581), and the small objects of Python and autograd settle there.
    """

    def __init__(self, reserves: bool = False) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._known: set[int] = set()
        self._reserves = reserves
        self._before = _data() - resident()
        self._most = 0

    @property
    def wasted(self) -> int:
        """Bytes that the allocator took at most beside the tensors."""
        return max(0, self._most - self.peak) if self._reserves else 0

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
            weakref.finalize(storage, self._forget, key, size, self._reserved(size))

    def _reserved(self, size: int) -> list[torch.UntypedStorage]:
        """The memory that stands for a tensor, in a list that can be emptied."""
        if not self._reserves:
            return []
        try:
            block = torch.UntypedStorage(size)
        except RuntimeError:  # more than the system would ever give: the run would end there, and waste is no matter
            self._reserves = False
            return []
        untouched = _data() - resident()  # without what this process itself took meanwhile, which it does touch
        self._most = max(self._most, untouched - self._before)
        return [block]

    def _forget(self, key: int, size: int, reserved: list[torch.UntypedStorage]) -> None:
        reserved.clear()
        self._known.discard(key)
        self.alive -= size


@contextmanager
def counted(reserves: bool) -> Iterator[Tally]:
    """Nothing is computed in the body."""
    with FakeTensorMode(), Tally(reserves) as tally:
        yield tally


class Shape(NamedTuple):
    """Of the largest micro-batch."""

    prompts: int
    rows: int
    prompt_tokens: int
    response_tokens: int


class Rehearsed(NamedTuple):
    """Bytes."""

    training: int  # of tensors at the worst moment, beyond weights and gradients
    wasted: int  # by the allocator, beside them; 0 on a GPU, whose allocator is another


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rig:
    """The models of a run with weights that have no memory. `reference` and `critic` may be None."""

    config: Config
    shape: Shape
    models: dict[Role, PreTrainedModel]
    reference: PreTrainedModel | None
    critic: PreTrainedModel | None

    @property
    def all(self) -> list[PreTrainedModel]:
        return [model for model in (*self.models.values(), self.reference, self.critic) if model is not None]

    @property
    def trained(self) -> list[nn.Parameter]:
        return [parameter for model in self.all for parameter in model.parameters() if parameter.requires_grad]


def rehearse(config: Config, shape: Shape) -> Rehearsed | None:
    """None for a model whose shapes depend on values, such as which experts a token goes to.

    Raises:
        ModelError: as `load_meta_model`, or a model whose activations cannot be checkpointed.
    """
    rig = _Rig(
        config=config,
        shape=shape,
        models={role: _outline(config, role, path) for role, path in model_paths(config, None).items()},
        reference=_reference(config),
        critic=_critic(config),
    )
    complaints = logging.getLogger(fake_tensor.__name__)
    was_quiet, complaints.disabled = complaints.disabled, True
    try:
        with counted(pick_device(config).type == "cpu") as tally:
            return _iteration(rig, tally)
    except RuntimeError:  # what fake tensors raise, whichever operation it is
        return None
    finally:
        complaints.disabled = was_quiet


def _iteration(rig: _Rig, tally: Tally) -> Rehearsed:
    """One: later ones take no more, and waste hardly more."""
    for model in rig.all:
        _give_memory(model)
    lasting = tally.alive
    _score(rig)
    _train(rig)
    gradients = sum(parameter.nbytes for parameter in rig.trained)
    return Rehearsed(max(0, tally.peak - lasting - gradients), tally.wasted)


def _outline(config: Config, role: Role, path: str) -> PreTrainedModel:
    """The model as training has it, on the meta device."""
    settings, model = getattr(config, role), load_meta_model(path).eval()
    if settings.optimizer is None:
        return model.requires_grad_(False)
    if settings.lora is not None:
        add_adapter(model, settings.lora, 0)
    if config.activation_checkpointing:
        checkpoint_activations(model)
    return model


def _reference(config: Config) -> PreTrainedModel | None:
    settings = config.objective.reference
    return (
        None if settings is None else load_meta_model(settings.path or config.policy.path).eval().requires_grad_(False)
    )


def _critic(config: Config) -> PreTrainedModel | None:
    if config.critic is None:
        return None
    critic = critic_outline(config).eval()
    if config.activation_checkpointing:
        checkpoint_activations(critic)
    return critic


def _give_memory(model: PreTrainedModel) -> None:
    """Put weights and buffers on the CPU, which under a FakeTensorMode takes none. Tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in made:
                weight = torch.empty(parameter.shape, dtype=torch.float32)
                made[id(parameter)] = nn.Parameter(weight, parameter.requires_grad)
            setattr(module, name, made[id(parameter)])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))


def _score(rig: _Rig) -> None:
    """As the guards ask the learner to, on the tokens of a thorough check."""
    config, shape = rig.config, rig.shape
    rows = min(shape.rows, math.ceil(CHECKED_TOKENS / shape.response_tokens))
    part = shape._replace(rows=rows, prompts=min(shape.prompts, rows))
    model, sampling = list(rig.models.values())[-1], config.sampling
    with torch.no_grad(), _precision(config):
        hidden = _read(model, part)
        for states in hidden.split(max(1, MAX_LOGITS // output_layer(model).out_features))[:2]:  # the rest is alike
            sampling_log_probs(head_logits(model, states), sampling.temperature, sampling.top_k, sampling.top_p)


def _train(rig: _Rig) -> None:
    """A micro-batch. Of several it is a later one, before which the gradients are there already."""
    config, shape = rig.config, rig.shape
    writer, settings = rig.models.get("rollout_model"), config.rollout_model
    trains_writer = settings is not None and settings.optimizer is not None
    parts = GradientDecomposition(ModelOptimizer(writer.parameters(), settings.optimizer, 1)) if trains_writer else None
    if shape.rows < (config.batch.mini_batch_size or config.batch.rollouts):
        for parameter in rig.trained:
            parameter.grad = torch.zeros_like(parameter)
    with _precision(config):
        hidden = [_read(model, shape) for model in rig.models.values()]
        kept = _beside(rig)
        values = _head(config, list(rig.models.values()), hidden)
        pulls = _reference_kl(rig, hidden[0])
    if parts:
        parts.add(values[2].sum(), True)  # of the rollout model's log-probs alone, as eq. 6
    sum(value.sum() for value in (*values, *pulls)).backward()
    del hidden, values, pulls, kept
    if rig.critic is not None:
        _critic_backward(rig)


def _critic_backward(rig: _Rig) -> None:
    """It comes after the others, and reads a prompt with each response."""
    shape = rig.shape
    ids = torch.zeros(shape.rows, shape.prompt_tokens + shape.response_tokens, dtype=torch.int64)
    with _precision(rig.config):
        states = backbone(rig.critic)(input_ids=ids, use_cache=False).last_hidden_state
    states.sum().backward()


def _reference_kl(rig: _Rig, policy_hidden: Tensor) -> tuple[Tensor, ...]:
    """What the pull towards a frozen reference adds to the policy's graph; nothing for an estimate from samples."""
    if rig.reference is None:
        return ()
    with torch.no_grad():
        hidden = _read(rig.reference, rig.shape)
    if rig.config.objective.reference.kl_loss_type != "exact":
        with torch.no_grad():
            _head(rig.config, [rig.reference], [hidden])
        return ()
    return _head(rig.config, [rig.reference, rig.models["policy"]], [hidden, policy_hidden])[-1:]


def _beside(rig: _Rig) -> list[Tensor]:
    """What waits for backward beside activations and loss: the attention mask of padded rows, and of each model the top
    log-probs with their ids, those at the engine's, and of two models those at each other's."""
    shape = rig.shape
    count = shape.rows * shape.response_tokens * rig.config.sampling.num_top_log_probs
    tops = [torch.empty(count * size, dtype=torch.uint8) for size in (8, 4, 4, 4) for _ in rig.models]
    columns = shape.prompt_tokens + shape.response_tokens
    return [torch.empty(shape.rows, shape.response_tokens, columns, dtype=torch.bool), *tops]


def _read(model: PreTrainedModel, shape: Shape) -> Tensor:
    """The hidden states that predict all response tokens, [N, H]."""
    prompts, rows, prompt_tokens, response_tokens = shape
    ids = torch.zeros(prompts, prompt_tokens, dtype=torch.int64)
    responses = torch.zeros(rows, response_tokens, dtype=torch.int64)
    index = torch.arange(rows) % prompts
    return predicting_hidden(model, ids, None, index, responses, None).flatten(0, 1).clone()  # those that exist


def _head(config: Config, models: Sequence[PreTrainedModel], hidden: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What carries a gradient out of the loss layer."""
    heads = [
        Head(hidden=states, weight=output_layer(model).weight, soft_cap=logit_softcap(model))
        for model, states in zip(models, hidden, strict=True)
    ]
    ids = torch.zeros(len(hidden[0]), dtype=torch.int64)  # no top-k: it looks at values, see `_beside`
    return tiled_heads(heads, ids, None, config.sampling.temperature, None, 0, None)[0]


def _precision(config: Config) -> torch.autocast:
    dtype = DTYPES[config.precision]
    return torch.autocast("cpu", dtype, enabled=dtype != torch.float32)
