"""Chooses the device of the models. Torch only."""

from typing import Literal

import torch

from jackpot.core.errors import ConfigError


def pick_device(setting: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """Return the device of the models: for `auto` CUDA where there is a GPU, else the CPU.

    Raises:
        ConfigError: `device` is cuda and there is no GPU.
    """
    available = torch.cuda.is_available()
    if setting == "cuda" and not available:
        raise ConfigError("device is cuda, but torch finds no GPU; use device: auto or cpu, or install torch for CUDA")
    return torch.device("cuda" if available and setting != "cpu" else "cpu")
