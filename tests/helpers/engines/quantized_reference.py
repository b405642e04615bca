"""Expected log-probs of a quantized engine, from numpy and the definition of FP8, without `models/quantization`.

Weights and, where a scheme rounds them, the inputs of every linear layer are rounded and multiplied out; the model's
own layers then compute with these in float32.
"""

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from helpers.engines.reference import Reference
from jackpot.config.sampling import Sampling
from jackpot.core.types import Prompt


def e4m3_grid() -> np.ndarray:
    """Return all finite FP8 numbers from 0 up, [127]: 4 exponent bits with bias 7, 3 mantissa bits."""
    subnormals = [mantissa / 8 * 2.0**-6 for mantissa in range(8)]
    normals = [(1 + mantissa / 8) * 2.0 ** (exponent - 7) for exponent in range(1, 16) for mantissa in range(8)]
    return np.array([*subnormals, *normals][:127])  # the 128th is NaN


GRID = e4m3_grid()


def to_e4m3(values: np.ndarray) -> np.ndarray:
    """Round to the nearest number of the grid, ties to the even index, which has the even mantissa."""
    size = np.minimum(np.abs(values.astype(np.float64)), GRID[-1])
    above = np.searchsorted(GRID, size).clip(1, len(GRID) - 1)
    below = above - 1
    to_above, to_below = GRID[above] - size, size - GRID[below]
    upward = (to_above < to_below) | ((to_above == to_below) & (above % 2 == 0))
    return np.sign(values) * np.where(upward, GRID[above], GRID[below])


def cut_to_e4m3(values: np.ndarray) -> np.ndarray:
    """Truncate to the next number of the grid towards zero."""
    size = np.minimum(np.abs(values.astype(np.float64)), GRID[-1])
    return np.sign(values) * GRID[np.searchsorted(GRID, size, side="right") - 1]


def round_blocks(values: np.ndarray, rows: int, columns: int, kind: str) -> np.ndarray:
    """Round each block of a float32 matrix: int8 with float32 scales, fp8 with powers of two."""
    rounded = np.empty(values.shape, dtype=np.float64)
    for row in range(0, values.shape[0], rows):
        for column in range(0, values.shape[1], columns):
            block_slices = (slice(row, row + rows), slice(column, column + columns))
            block = values[block_slices].astype(np.float32)
            largest = max(np.abs(block).max(), np.float32(1e-10))
            if kind == "int8":
                scale = np.float32(largest / np.float32(127))
                rounded[block_slices] = np.rint(block / scale).clip(-127, 127) * np.float64(scale)
            else:
                scale = 2.0 ** np.ceil(np.log2(np.float64(largest) / 448.0))
                rounded[block_slices] = to_e4m3(block / scale) * scale
    return rounded


ROUND_WEIGHT = {
    "int8_w8a16": lambda weight: round_blocks(weight, 1, weight.shape[1], "int8"),
    "int8_w8a8": lambda weight: round_blocks(weight, 1, weight.shape[1], "int8"),
    "fp8": lambda weight: round_blocks(weight, 128, 128, "fp8"),
}
ROUND_INPUT = {
    "int8_w8a8": lambda inputs: round_blocks(inputs, 1, inputs.shape[1], "int8"),
    "fp8": lambda inputs: round_blocks(inputs, 1, 128, "fp8"),
}
ROUND_KEYS = {"fp8": to_e4m3, "fp8 cut": cut_to_e4m3}


def _rounded_keys(kind: str) -> Any:
    """Return eager attention on keys and values that are rounded before."""

    def attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any) -> Any:
        rounded = [torch.from_numpy(ROUND_KEYS[kind](states.numpy())).to(states.dtype) for states in (key, value)]
        attend = sys.modules[type(module).__module__].eager_attention_forward
        return attend(module, query, *rounded, mask, **options)

    return attention


for kind in ROUND_KEYS:
    AttentionInterface.register(f"reference {kind}", _rounded_keys(kind))
    AttentionMaskInterface.register(f"reference {kind}", eager_mask)


class QuantizedReference(Reference):
    """Computes `log_probs` with a rounded twin of the model; `model` keeps the weights that are sent."""

    def __init__(self, folder: Path, quantization: str | None, kv_cache_dtype: str | None) -> None:
        super().__init__(folder, torch.float32)
        self._sent, twin = self.model, copy.deepcopy(self.model)
        for name, layer in twin.named_modules():
            if isinstance(layer, nn.Linear) and name != "lm_head" and quantization:
                weight = ROUND_WEIGHT[quantization](layer.weight.detach().numpy())
                layer.weight = nn.Parameter(torch.from_numpy(weight).float())
                if quantization in ROUND_INPUT:
                    layer.register_forward_pre_hook(_rounded_input(quantization))
        if kv_cache_dtype:
            twin.set_attn_implementation(f"reference {kv_cache_dtype}")
        self._twin = twin

    def log_probs(self, prompt: Prompt, token_ids: Sequence[int], sampling: Sampling) -> np.ndarray:
        self.model = self._twin
        try:
            return super().log_probs(prompt, token_ids, sampling)
        finally:
            self.model = self._sent


def _rounded_input(quantization: str) -> Any:
    """Return a hook that rounds the input of a linear layer."""

    def hook(layer: nn.Linear, inputs: tuple[Tensor]) -> Tensor:
        rows = inputs[0].reshape(-1, inputs[0].shape[-1])
        return torch.from_numpy(ROUND_INPUT[quantization](rows.numpy())).float().reshape(inputs[0].shape)

    return hook
