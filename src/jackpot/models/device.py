"""The device of the models, and copies of tensors to it. Torch only."""

import warnings
from typing import Literal

import torch
from torch import Tensor

from jackpot.core.errors import ConfigError


def pick_device(setting: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """Return the device of the models: for `auto` CUDA where there is a GPU, else the CPU.

    Raises:
        ConfigError: `setting` is cuda and there is no GPU.

    Warns:
        UserWarning: `auto` takes the CPU, although torch is built for CUDA.
    """
    available = torch.cuda.is_available()
    if setting == "cuda" and not available:
        raise ConfigError("device is cuda, but torch finds no GPU; use device: auto or cpu, or install torch for CUDA")
    if setting == "auto" and torch.version.cuda and not available:
        warnings.warn(
            f"torch is built for CUDA {torch.version.cuda} but finds no GPU, so the CPU computes; if there is one, its "
            f"driver may be too old (nvidia-smi shows it). With device: cpu this is not said",
            stacklevel=1,  # always the same line, so Python shows it once
        )
    return torch.device("cuda" if available and setting != "cpu" else "cpu")


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device. From the CPU to a GPU the copy uses pinned memory, so that the CPU need not wait."""
    pinned = tensor.pin_memory() if device.type == "cuda" and not tensor.is_cuda else tensor
    return pinned.to(device, non_blocking=True)
