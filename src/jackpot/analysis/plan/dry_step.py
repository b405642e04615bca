"""The peak memory of one training step, found by running the step on fake tensors, which have shapes and no storage.

The largest micro-batch goes through the modules that the learner itself uses: scoring, forward, `GradientSplit` (the
rollout model's gradient by loss), backward. Of the output layer only two tiles of the vocabulary are run; for the other
tiles as many bytes are held for as long (`_head`), so that the peak is the same.
"""

import logging
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from jackpot.analysis.plan.sizes import critic_outline
from jackpot.config.config import Config
from jackpot.core.types import PackedRow
from jackpot.launch.build import cut_heads, learner_paths, prepare
from jackpot.launch.engines import run_rows
from jackpot.models.forward import (
    backbone,
    can_pack,
    head_logits,
    logit_softcap,
    output_layer,
    predicting_hidden,
    read_row,
)
from jackpot.models.load import DTYPES, load_meta_model
from jackpot.models.packed_row import pack_row
from jackpot.models.sampling import sampling_log_probs
from jackpot.models.scoring import MAX_LOGITS
from jackpot.objectives.kernels.autograd import HeadOptions, default_tile, keeps_logits, split_range, tiled_heads
from jackpot.objectives.kernels.linear_head import head_of
from jackpot.objectives.kernels.reader import TorchReader
from jackpot.objectives.kernels.topk import BLOCK
from jackpot.training.guards import CHECKED_TOKENS
from jackpot.training.joint_optimizer import GradientSplit

RUN_TILES = 2  # vocabulary tiles of the output layer that are run; each later one needs as much memory as the second


class MemoryTracker(TorchDispatchMode):
    """A counter of the bytes of tensors that are made while the mode is active: alive now, and at the peak so far."""

    def __init__(self) -> None:
        """Begin at 0 bytes; tensors that exist already are not counted until an operation returns them."""
        super().__init__()
        self.alive = self.peak = 0
        self._known: set[int] = set()  # addresses of the storages that are alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Run an operation, and count the storages of its results."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        self.peak = max(self.peak, self.alive)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        """Count the bytes of a new storage as alive until the storage is freed."""
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.alive += size
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        """Stop counting a storage that was freed."""
        self._known.discard(key)
        self.alive -= size


class MicroBatchShape(NamedTuple):
    """The shape of the largest micro-batch of a run."""

    prompts: int  # number of different prompts
    rows: int  # number of sequences
    prompt_tokens: int  # length of every prompt
    response_tokens: int  # length of every response


def dry_step(config: Config, shape: MicroBatchShape) -> int | None:
    """Run one training step on fake tensors.

    Args:
        config: settings of the run.
        shape: shape of the largest micro-batch.

    Returns:
        The peak of activations, loss and temporary tensors, in bytes, beyond weights and gradients; None for a model
        whose shapes depend on values, such as which experts a token goes to.

    Raises:
        ModelError: as `load_meta_model`, or a model whose activations cannot be checkpointed.
    """
    models = _meta_models(config)
    # The logger of fake tensors is silent until the step is done.
    warnings = logging.getLogger(fake_tensor.__name__)
    was_quiet, warnings.disabled = warnings.disabled, True

    try:
        with fake_tensor.FakeTensorMode(), MemoryTracker() as tracker:
            for model in models.values():
                _give_memory(model)
            lasting = tracker.alive  # weights, which are no part of the result
            trained = [weight for model in models.values() for weight in model.parameters() if weight.requires_grad]

            _score(config, models["rollout_model" if config.rollout_model else "policy"], shape)
            _train(config, models, trained, shape)
            return max(0, tracker.peak - lasting - sum(weight.nbytes for weight in trained))
    except RuntimeError:  # fake tensors raise it wherever an operation needs values
        return None
    finally:
        warnings.disabled = was_quiet


def _meta_models(config: Config) -> dict[str, PreTrainedModel]:
    """Make all models of training on the meta device, by role; untrained models are frozen.

    Only with `device: cpu` are norms, gates and rotary embeddings fused. With another setting the run may be on a
    GPU, where models are not fused and keep more for backward.
    """
    # A model without an optimizer in its settings, such as the reference, is frozen.
    models: dict[str, PreTrainedModel] = {}
    for name, path in learner_paths(config).items():
        models[name] = (critic_outline if name == "critic" else load_meta_model)(path).eval()
        prepare(config, name, models[name], on_cpu=config.device == "cpu")
        if getattr(getattr(config, name, None), "optimizer", None) is None:
            models[name].requires_grad_(False)
    cut_heads(models, run_rows(config, config.model_paths()))  # all output layers get as many rows as the shortest has
    return models


def _give_memory(model: PreTrainedModel) -> None:
    """Replace a model's meta tensors by fake tensors of the CPU, so that they are counted; tied weights stay tied.

    It is called inside of a mode in which `torch.empty` makes fake tensors. Parameters become float32, as in training.
    """
    fakes: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in fakes:
                weight = torch.empty(parameter.shape, dtype=torch.float32)
                fakes[id(parameter)] = nn.Parameter(weight, parameter.requires_grad)
            setattr(module, name, fakes[id(parameter)])

        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))


def _score(config: Config, model: PreTrainedModel, shape: MicroBatchShape) -> None:
    """Compute log-probs of CHECKED_TOKENS tokens, as training does when it checks the engine, to count the memory.

    The backbone is not run here, since its activations take more memory in training.
    """
    layer, sampling = output_layer(model), config.sampling
    rows = min(shape.rows, math.ceil(CHECKED_TOKENS / shape.response_tokens))
    with torch.no_grad(), _precision(config):
        hidden = torch.empty(rows * shape.response_tokens, layer.in_features)
        for states in hidden.split(max(1, MAX_LOGITS // layer.out_features))[:2]:  # later parts are like the second
            sampling_log_probs(head_logits(model, states), sampling.temperature, sampling.top_k, sampling.top_p)


def _train(
    config: Config, models: Mapping[str, PreTrainedModel], trained: Sequence[nn.Parameter], shape: MicroBatchShape
) -> None:
    """Run the forward and the backward pass of training on one micro-batch.

    If an optimizer step has several micro-batches, this is a later one: the gradients of earlier ones exist already.
    """
    if shape.rows < (config.batch.mini_batch_size or config.batch.rollouts):
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)

    pair = [models[role] for role in config.model_paths()]  # the policy and, if the run has one, the rollout model
    with _precision(config):
        hidden = [_read(model, shape) for model in pair]
        waiting = _waiting_tensors(config, shape, len(pair))
        values = _head(config, pair, hidden)  # log-probs and entropy of each model, then KLs between the two
        reference_kl = _reference_kl(config, models, shape, hidden[0])

    trains_both = config.rollout_model is not None and config.rollout_model.optimizer is not None
    # In training `GradientSplit` separates the gradients of the rollout model's two losses; it is built here too, for
    # the memory that it takes. `values[2]` are the rollout model's log-probs, all that this model's PPO loss reads.
    split = GradientSplit(values[2].sum(), hidden[1]) if trains_both else None
    # The sum of all outputs stands for the loss: its gradient reaches everything that the loss reads.
    sum((value.sum() for value in (*values, *reference_kl)), start=torch.zeros(())).backward()
    del hidden, values, reference_kl, waiting, split

    if "critic" in models:  # as in training, the critic runs after the other models' tensors are freed
        _critic_backward(config, models["critic"], shape)


def _critic_backward(config: Config, critic: PreTrainedModel, shape: MicroBatchShape) -> None:
    """Run the critic forward and backward: on one packed row of all sequences if it can read that, else on a batch."""
    with _precision(config):
        if can_pack(critic):
            states = read_row(backbone(critic), _row(shape))
        else:
            ids = torch.zeros(shape.rows, shape.prompt_tokens + shape.response_tokens, dtype=torch.int64)
            states = backbone(critic)(input_ids=ids, use_cache=False).last_hidden_state
    states.sum().backward()


def _reference_kl(
    config: Config, models: Mapping[str, PreTrainedModel], shape: MicroBatchShape, policy_hidden: Tensor
) -> tuple[Tensor, ...]:
    """Run the frozen reference model, and return the exact KL of policy and reference, with the policy's gradient: [N].

    The tuple holds this KL alone. It is empty without a reference, and where training estimates the KL from sampled
    tokens.
    """
    settings = config.objective.reference
    if settings is None:
        return ()

    with torch.no_grad():
        hidden = _read(models["reference"], shape)
        if settings.kl_loss_type != "exact":
            _head(config, [models["reference"]], [hidden])  # run to count its memory: training reads the log-probs
            return ()
    # The last output for two models is KL(second || first), here KL(policy || reference).
    return _head(config, [models["reference"], models["policy"]], [hidden, policy_hidden])[-1:]


def _waiting_tensors(config: Config, shape: MicroBatchShape, models: int) -> list[Tensor]:
    """Allocate the tensors that training holds until backward beside activations and loss.

    For each model these are its top-k ids, three lists of its log-probs (at these ids, at the engine's top-k ids and at
    those of the other model) and, where several responses share a prompt, an attention mask. `models` is the number of
    models.
    """
    entries = shape.rows * shape.response_tokens * config.sampling.num_top_log_probs
    sizes = [8, 4, 4, 4] * models  # bytes of an int64 and of three float32
    held = [torch.empty(entries * size, dtype=torch.uint8) for size in sizes]

    if shape.prompts < shape.rows:
        columns = shape.prompt_tokens + shape.response_tokens
        held += [torch.empty(shape.rows, shape.response_tokens, columns) for _ in range(models)]
    return held


def _read(model: PreTrainedModel, shape: MicroBatchShape) -> Tensor:
    """Run a backbone on the micro-batch, and return the hidden states that predict all response tokens, [N, H]."""
    if can_pack(model):
        row = _row(shape)
        return read_row(backbone(model), row).index_select(0, row.predicting.flatten())

    prompts, rows, prompt_tokens, response_tokens = shape
    ids = torch.zeros(prompts, prompt_tokens, dtype=torch.int64)
    responses = torch.zeros(rows, response_tokens, dtype=torch.int64)
    prompt_of_row = torch.arange(rows) % prompts
    hidden = predicting_hidden(model, ids, None, prompt_of_row, responses, None)  # None: no padding masks
    return hidden.flatten(0, 1).clone()  # a copy, since training copies the states of all tokens but padding


def _row(shape: MicroBatchShape) -> PackedRow:
    """Return the micro-batch as one packed row of fake tensors."""
    prompts, rows, prompt_tokens, response_tokens = shape
    with fake_tensor.unset_fake_temporarily():  # packing reads lengths, which fake tensors do not hold
        responses = [torch.zeros(response_tokens, dtype=torch.int64)] * rows
        row = pack_row([[0] * prompt_tokens] * prompts, [index % prompts for index in range(rows)], responses)
    tensors = {field.name: value for field in fields(row) if isinstance(value := getattr(row, field.name), Tensor)}
    return replace(row, **{name: torch.empty(value.shape, dtype=value.dtype) for name, value in tensors.items()})


def _head(config: Config, models: Sequence[PreTrainedModel], hidden: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Run all output layers on the first tiles of the vocabulary; return the outputs that require a gradient, [N] each.

    The outputs are log-probs and entropy of each model, and for two models the forward and the reverse KL. Only the
    first tiles are run, but in backward as much memory is allocated as the gradient of the whole weight takes.

    Args:
        config: settings of the run.
        models: one or two models, whose output layers are read together.
        hidden: [N, H] hidden states of each model.
    """
    positions = len(hidden[0])
    layers = [output_layer(model) for model in models]
    weights = [layer.weight[: layer.out_features] for layer in layers]
    vocabulary = len(weights[0])

    # The tile, (positions, tokens of the vocabulary), that training takes on the device of the run. The vocabulary is
    # split evenly, into ranges of at most `most_tokens` tokens; the first begins at 0.
    device_type = "cpu" if config.device == "cpu" else "cuda"
    options = HeadOptions(reader=TorchReader(device_type), logits_memory=config.head_logits_memory * 2**20)  # MiB
    most_positions, most_tokens = default_tile(positions, vocabulary, device_type)
    tile_tokens = split_range(vocabulary, most=most_tokens, grain=BLOCK)[0].stop

    # All rows of the output layers are run where their logits are kept for backward, else those of RUN_TILES tiles.
    # Biases are left out, since they would not fit the weights, which are cut to `rows_run` rows.
    whole_heads = [
        replace(head_of(layer, states, logit_softcap(model)), bias=None)
        for model, layer, states in zip(models, layers, hidden, strict=True)
    ]
    rows_run = vocabulary
    if not any(keeps_logits(whole_heads, options)):
        rows_run = min(vocabulary, RUN_TILES * tile_tokens)
        options = replace(options, logits_memory=0)  # else the logits of so few rows might be kept

    run_weights = [weight[:rows_run] if rows_run < vocabulary else weight for weight in weights]
    heads = [replace(head, weight=run_weight) for head, run_weight in zip(whole_heads, run_weights, strict=True)]
    ids = torch.zeros(positions, dtype=torch.int64)
    # The head makes no top-k lists here, since `_waiting_tensors` counts the memory of these lists.
    values, _ = tiled_heads(
        heads,
        ids,
        gather_ids=None,
        temperature=config.sampling.temperature,
        lam=None,
        num_top=0,
        tile=(most_positions, tile_tokens),
        moments=True,
        options=options,
    )

    # In backward the gradients of the rows that were not run take memory too. `values` has log-probs and entropy of
    # each head, and then the two KLs of a pair of heads.
    for index, (weight, run_weight) in enumerate(zip(weights, run_weights, strict=True)):
        if rows_run < vocabulary and run_weight.requires_grad:
            of_head, of_pair = values[2 * index : 2 * index + 2], values[2 * len(heads) :]
            _hold_gradient([*of_head, *of_pair], run_weight, (vocabulary - rows_run, weight.shape[1]))
    return values


def _hold_gradient(values: Sequence[Tensor], weight: Tensor, shape: tuple[int, int]) -> None:
    """Make backward hold a tensor of `shape` from the first gradient of any of `values` until `weight` has its own."""
    held: list[Tensor] = []

    def hold(gradient: Tensor | None) -> None:
        """Allocate the held tensor when backward reaches any of `values` for the first time."""
        if gradient is not None and not held:  # None: this pass does not go through the value
            held.append(torch.empty(shape))

    for value in values:
        value.register_hook(hold)
    weight.register_hook(lambda _: held.clear())  # frees the held tensor: the gradient of `weight` is complete


def _precision(config: Config) -> torch.autocast:
    """Return the autocast context of training's forward pass; in float32 it changes nothing."""
    dtype = DTYPES[config.compute_dtype]
    return torch.autocast("cpu", dtype, enabled=dtype != torch.float32)
