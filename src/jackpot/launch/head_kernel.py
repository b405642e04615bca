"""Chooses what reads the logits of output layers (the setting `head_kernel`); imports Triton only if it is chosen."""

import os
import warnings
from importlib import import_module
from importlib.util import find_spec

import torch

from jackpot.config.config import Config
from jackpot.core.errors import ConfigError, first_line
from jackpot.models.device import pick_device
from jackpot.objectives.kernels.autograd import HeadOptions
from jackpot.objectives.kernels.reader import EAGER, TileReader
from jackpot.objectives.kernels.tiles import Tile
from jackpot.objectives.kernels.topk import BLOCK


def head_options(config: Config) -> HeadOptions:
    """Return the kernel that computes with the logits of output layers, and how many bytes of logits backward keeps.

    Raises:
        ConfigError: Triton or the device of the settings cannot be used.
    """
    reader = tile_reader(config.head_kernel, pick_device(config.device))
    return HeadOptions(reader, config.head_logits_memory * 2**20)  # MiB to bytes


def tile_reader(kernel: str, device: torch.device) -> TileReader:
    """Return the kernel that computes sums and gradients from an output layer's logits, one tile of them at a time.

    Args:
        kernel: the setting `head_kernel`. `auto` takes Triton's on CUDA if it runs, else the eager one,
            with a warning if Triton is installed and does not run.

    Raises:
        ConfigError: `kernel` is triton, and Triton is missing or runs no kernel, or the device is no GPU.
    """
    if kernel == "triton" or (kernel == "auto" and device.type == "cuda" and find_spec("triton")):
        try:
            return _triton_reader(device)
        except ConfigError as error:
            if kernel == "triton":
                raise
            warnings.warn(f"head_kernel: auto takes torch's operators, which are slower: {error}", stacklevel=2)
    return EAGER


def _triton_reader(device: torch.device) -> TileReader:
    """Return the Triton kernel after a trial run; raise ConfigError where Triton or a GPU is missing, or it fails."""
    if not find_spec("triton"):
        raise ConfigError("head_kernel is triton, but Triton is not installed; install it, or use head_kernel: auto")
    if device.type != "cuda" and not os.environ.get("TRITON_INTERPRET"):
        raise ConfigError(f"head_kernel is triton, but the device is {device}; use head_kernel: auto, or a GPU")

    try:
        reader = import_module("jackpot.objectives.kernels.triton_reader").TRITON  # imports Triton
        logits = torch.zeros(2, BLOCK, device=device)
        tile = Tile(logits, bias=None, soft_cap=None, temperature=1.0, may_mask=False, is_raw=False, is_kept=False)
        reader.read([tile], tops=False, moments=False)  # a trial, as compiling also needs a C compiler
        return reader
    except Exception as error:
        raise ConfigError(
            f"Triton runs no kernel here: {first_line(error)}; it needs a C compiler such as gcc, and Python's "
            f"headers. Install them, or use head_kernel: eager"
        ) from error
