"""Imports TRL for all adapters, and makes masks and our learner's batches of the tensors of TRL's trainers."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import version
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from jackpot.core.package import install
from jackpot.core.types import TokenBatch
from jackpot.models.forward import backbone

try:
    import trl.trainer as trl  # where TRL is not installed, a type checker would take the name `trl` for this folder
except ModuleNotFoundError as error:
    raise ImportError(f"jackpot.adapters.trl needs the extra `trl`: {install('trl')}. {error}") from error

Batch = dict[str, Any]  # TRL's tensors of a generation batch or a micro-batch, [B, ...], by name


class TRLTrainer(trl.GRPOTrainer):
    """TRL's trainer of a text model; the class declares the types that attributes have after TRL's set-up."""

    model: PreTrainedModel
    processing_class: PreTrainedTokenizerBase
    args: Any  # a GRPOConfig, in whose types everything is optional that TRL's set-up fills in
    max_completion_length: int
    vllm_generation: Any  # TRL's client of vLLM, of which an adapter wraps `generate`
    _buffered_inputs: list[Batch]


# (prompts, trainer) -> lists with an entry for each completion, by key such as `completion_ids`
RolloutFunc = Callable[[list[Any], TRLTrainer], Mapping[str, Any]]


def asynchronous() -> tuple[ModuleType, ModuleType]:
    """Import TRL's asynchronous trainer and its rollout worker, and return the two modules in this order.

    TRL warns that these modules are experimental, so only the adapter that needs them calls this.

    Raises:
        ImportError: the installed TRL has no such trainer, or one of this name that works otherwise.
    """
    folder = "trl.experimental.async_grpo."
    try:
        import_module(f"{folder}packing")  # only the trainer whose loss is over packed tokens has this module
    except ModuleNotFoundError as error:
        raise ImportError(
            f"TRL {version('trl')} has no AsyncGRPOTrainer with packed rows and a weight_transfer, of which the "
            f"adapter reads the loss; install trl 1.16, or use CorrectedGRPOTrainer. {error}"
        ) from error
    return import_module(f"{folder}async_grpo_trainer"), import_module(f"{folder}async_rollout_worker")


def plain_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the transformers model in a model of peft, still with the adapter's layers; else return `model`."""
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if unwrap else model


@contextmanager
def without_dropout(model: PreTrainedModel) -> Iterator[None]:
    """Turn a model's dropout off for the block, by putting all its modules in eval mode."""
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True


@contextmanager
def caught_states(model: PreTrainedModel) -> Iterator[list[Tensor]]:
    """Yield a list to which each forward pass of the model appends its last hidden states, [B, S, H].

    The passes are those in the body of the `with` statement.
    """
    caught: list[Tensor] = []
    # The last argument of a forward hook is the module's output.
    hook = backbone(plain_model(model)).register_forward_hook(lambda *call: caught.append(call[-1].last_hidden_state))
    try:
        yield caught
    finally:
        hook.remove()


def completion_states(batch: Batch, states: Tensor) -> Tensor:
    """Select the hidden states that predict the completion tokens of a batch: [B, T, H].

    `states`, [B, S, H], are the hidden states of prompts and completions, S tokens together.
    """
    start = batch["prompt_ids"].shape[1] - 1  # the last prompt token's state predicts the first completion token
    return states[:, start : start + batch["completion_ids"].shape[1]]


def loss_mask(batch: Batch) -> Tensor:
    """Return a mask of the completion tokens that the model sampled, which are those of TRL's loss: [B, T] bool."""
    mask = batch["completion_mask"].bool()
    return mask & batch["tool_mask"].bool() if "tool_mask" in batch else mask


def usable_mask(batch: Batch) -> Tensor:
    """Return a mask of the sampled tokens whose log-probs were reported; vLLM can leave some out: [B, T] bool.

    Where the batch has top-k lists, a token whose list lacks a log-prob (NaN) is left out too.
    """
    usable = loss_mask(batch) & batch["sampling_per_token_logps"].isfinite()
    if "jackpot_top_log_probs" in batch:
        usable &= ~batch["jackpot_top_log_probs"].isnan().any(-1)
    return usable


def token_batch(batch: Batch, mask: Tensor, with_lists: bool) -> TokenBatch:
    """Return a batch of our learner, [B, T, ...], from TRL's tensors and the columns that the adapters add to them.

    The batch's advantages are those before the correction.

    Args:
        mask: the tokens that are read, [B, T] bool: `loss_mask` or `usable_mask`.
        with_lists: whether the sampler's top-k lists come along; else K is 0.
    """
    ids = batch["completion_ids"]
    blank = torch.zeros(*ids.shape, 0, device=ids.device)  # lists without entries, [B, T, 0]

    return TokenBatch(
        uids=(),  # a placeholder, as are the versions below: the adapters read neither
        prompt_ids=batch["prompt_ids"],
        prompt_mask=batch["prompt_mask"].bool(),
        prompt_index=torch.arange(len(ids), device=ids.device),
        response_ids=ids,
        attention_mask=batch["completion_mask"].bool(),
        response_mask=mask,
        response_index=mask.flatten().nonzero()[:, 0],
        rollout_log_probs=torch.where(mask, batch["sampling_per_token_logps"].float(), 0.0),
        advantages=batch["jackpot_advantages"][:, None] * mask,
        uniforms=batch["jackpot_uniforms"],
        top_ids=batch["jackpot_top_ids"] if with_lists else blank.long(),
        top_log_probs=batch["jackpot_top_log_probs"] if with_lists else blank,
        versions=torch.zeros(*ids.shape, 2, dtype=torch.int64, device=ids.device),
        by_policy=batch.get("jackpot_by_policy"),
    )
