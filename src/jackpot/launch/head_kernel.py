"""Chooses what reads tiles of logits: `head_kernel` of the settings. Torch only, and Triton where it is chosen."""

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
    """Return how the joint head is computed.

    Raises:
        ConfigError: as `tile_reader` and `pick_device`.
    """
    reader = tile_reader(config.head_kernel, pick_device(config.device))
    return HeadOptions(reader, config.head_logits_memory * 2**20)


def tile_reader(kernel: str, device: torch.device) -> TileReader:
    """Return the reader that `head_kernel` names: for `auto` Triton's on CUDA where it runs, else the eager.

    Raises:
        ConfigError: Triton is missing or runs no kernel, or the device is no GPU.
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
    if not find_spec("triton"):
        raise ConfigError("head_kernel is triton, but Triton is not installed; install it, or use head_kernel: auto")
    if device.type != "cuda" and not os.environ.get("TRITON_INTERPRET"):
        raise ConfigError(f"head_kernel is triton, but the device is {device}; use head_kernel: auto, or a GPU")
    try:  # imported here: few installs have Triton
        return _tried(import_module("jackpot.objectives.kernels.triton_reader").TRITON, device)
    except Exception as error:
        raise ConfigError(
            f"Triton runs no kernel here: {first_line(error)}; it needs a C compiler such as gcc, and Python's "
            f"headers. Install them, or use head_kernel: eager"
        ) from error


def _tried(reader: TileReader, device: torch.device) -> TileReader:
    """Return the reader once it has read a tile."""
    tile = Tile(torch.zeros(2, BLOCK, device=device), None, None, 1.0, may_mask=False, is_raw=False, is_kept=False)
    reader.read([tile], False, False)
    return reader
