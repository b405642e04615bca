"""What a cache of 8 bits makes of keys and values. Layer 3: torch only.

Both give numbers back in the dtype that they came in: every FP8 number is one of bfloat16 and float32 too, so what
attention reads is exactly what an FP8 cache would give it. No memory is saved.
"""

from torch import Tensor

from jackpot.precision.quantiser import E4M3, Grid, dequantise, encode, quantise


def round_to_fp8(states: Tensor) -> Tensor:
    """Keys or values of any shape with the scale 1, beyond 448 cut off: what vLLM's `kv_cache_dtype="fp8"` stores where
    a checkpoint brings no scales of its own."""
    return encode(states.float(), 1.0, E4M3).to(states.dtype)


def round_by_token(states: Tensor) -> Tensor:
    """Keys or values [..., D] with a power of two as the scale of each token and head."""
    rows = states.reshape(-1, states.shape[-1])
    grid = Grid(codes=E4M3, rows=1, scales="power_of_two")
    return dequantise(quantise(rows, grid), states.dtype).reshape(states.shape)
