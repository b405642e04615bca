"""Chooses what reads tiles of logits: `head_kernel` of the settings. Torch only, and Triton where it is chosen."""

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch

from jackpot.config.config import Config
from jackpot.core.errors import ConfigError
from jackpot.models.device import pick_device
from jackpot.objectives.kernels.autograd import HeadOptions
from jackpot.objectives.kernels.reader import EAGER, Formula, TileReader, TorchReader
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
    """Return the reader that `head_kernel` names: for `auto` Triton's on CUDA where it is installed, else the eager.

    Raises:
        ConfigError: Triton is not installed or the device is no GPU, or torch.compile finds no compiler.
    """
    if kernel == "auto":
        kernel = "triton" if device.type == "cuda" and find_spec("triton") else "eager"
    if kernel == "triton":
        return _triton_reader(device)
    return _compiled_reader(device) if kernel == "compile" else EAGER


def _triton_reader(device: torch.device) -> TileReader:
    if not find_spec("triton"):
        raise ConfigError("head_kernel is triton, but Triton is not installed; install it, or use head_kernel: auto")
    if device.type != "cuda" and not os.environ.get("TRITON_INTERPRET"):
        raise ConfigError(f"head_kernel is triton, but the device is {device}; use head_kernel: auto, or a GPU")
    # imported here: few installs have Triton
    return import_module("jackpot.objectives.kernels.triton_reader").TRITON


@cache
def _compiled_reader(device: torch.device) -> TileReader:
    """Compile the formulas, of any number of positions, and try one."""

    def compiled(formula: Formula, /) -> Formula:
        return torch.compile(formula, dynamic=True)  # pyright: ignore[reportReturnType]  # calls like what it compiles

    reader = TorchReader("compile", compiled)
    tile = Tile(torch.zeros(2, BLOCK, device=device), None, None, 1.0, may_mask=False, is_raw=False, is_kept=False)
    try:
        reader.read([tile], False, False)
    except Exception as error:  # whatever the compiler lacks
        why = str(error).strip().splitlines()[0]
        raise ConfigError(f"head_kernel is compile, but torch.compile fails: {why}; use head_kernel: auto") from error
    return reader
