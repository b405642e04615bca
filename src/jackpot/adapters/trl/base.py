"""TRL's trainer, and what every adapter of it reads of its tensors: the only file that imports trl."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from jackpot.core.package import install

try:
    from trl import GRPOConfig, GRPOTrainer
except ModuleNotFoundError as error:
    raise ImportError(f"jackpot.adapters.trl needs the extra `trl`: {install('trl')}. {error}") from error

__all__ = ["Batch", "GRPOConfig", "GRPOTrainer", "RolloutFunc", "columns", "loss_mask", "plain_model"]

RolloutFunc = Callable[[list[Any], GRPOTrainer], Mapping[str, Any]]  # of TRL: (prompts, trainer) -> lists
Batch = dict[str, Any]  # TRL's tensors of a generation batch or of a micro-batch, [B, ...]


def plain_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model of transformers inside an adapter of peft; its layers apply the adapter."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def loss_mask(batch: Batch) -> Tensor:
    """Return where the loss has tokens that were sampled: [B, T] bool."""
    mask = batch["completion_mask"].bool()
    return mask & batch["tool_mask"].bool() if "tool_mask" in batch else mask


def columns(batch: Batch) -> dict[str, Tensor]:
    """Return the tensors that have a row for each sequence."""
    return {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.dim() > 0}
