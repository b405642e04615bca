"""Activation checkpointing: memory for a second forward pass (Chen et al. 2016, arXiv 1604.06174). Layer 3."""

from functools import partial

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from jackpot.errors import ModelError


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Keep of every layer its input alone, and compute the rest of it again in backward.

    transformers' own switch works in training mode only, which also turns dropout on; here the model stays in eval
    mode, and a second pass is bit-equal to the first. The switch is set as well, for whoever asks
    `is_gradient_checkpointing`.

    Raises:
        ModelError: the model has no layers that transformers would checkpoint.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not model.supports_gradient_checkpointing or not layers:
        raise ModelError(
            f"{type(model).__name__} has no layers whose activations can be checkpointed; set "
            f"activation_checkpointing: false, and lower batch.micro_batch_tokens to save memory"
        )
    model.gradient_checkpointing_enable()
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
