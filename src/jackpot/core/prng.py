"""Counter-based random numbers: uniforms that are a pure function of (key, position). Torch and the standard library.

Make every key with `fold_in` from the seed and the purpose of the numbers: two purposes with one key would get the same
numbers.
"""

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor


def _signed(value: int) -> int:
    """Return the int64 with the same 64 bits as an unsigned `value`."""
    return value - 2**64 if value >= 2**63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)


def fold_in(*purpose: int | str) -> int:
    """Hash the purpose of random numbers, such as (seed, uid, "obrs", epoch), to their key, an unsigned 64-bit int.

    As `jax.random.fold_in`, for any number of entries. Different purposes give different keys, up to a chance of
    2**-64: type and length of every entry are hashed too, so ("a", "bc"), ("ab", "c") and (1,), ("1",) do not collide.

    Raises:
        TypeError: an entry is neither an int nor a str.
    """
    digest = blake2b(digest_size=8)
    for entry in purpose:
        if type(entry) not in (int, str):
            raise TypeError(f"fold_in takes ints and strings, got {entry!r} ({type(entry).__name__})")
        data = str(entry).encode()
        digest.update(f"{type(entry).__name__}:{len(data)}:".encode() + data)
    return int.from_bytes(digest.digest(), "big")


def uniforms(keys: Sequence[int] | Tensor, positions: Sequence[int] | Tensor) -> Tensor:
    """Return a random number for each pair of a key and a position, broadcast against each other: float64 in [0, 1).

    There is no generator state: the number `u` of `key` at position `t` comes from splitmix64's output number `t` from
    the state `key` (Steele, Lea and Flood, OOPSLA 2014),

        z = key + (t + 1) * 0x9E3779B97F4A7C15            mod 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9          mod 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB          mod 2**64
        u = ((z ^ (z >> 31)) >> 11) / 2**53               in [0, 1)

    so batching, ranks and resuming cannot change it. Keys [B] with positions [B] give one number a row; keys [B, 1]
    with positions [T] give [B, T].

    Args:
        keys: unsigned 64-bit integers, or an int64 tensor with the same bits (`key_tensor`).
        positions: integers >= 0.

    Returns:
        The numbers, on the device of `keys` where that is a tensor, else on the CPU.
    """
    keys = keys if isinstance(keys, Tensor) else key_tensor(keys)
    return _shift_right(bits(keys, positions), 11).double() * 2.0**-53


def bits(keys: Tensor, positions: Sequence[int] | Tensor | int) -> Tensor:
    """Return 64 random bits, as int64, for each pair of a key and a position, broadcast against each other."""
    positions = torch.as_tensor(positions, dtype=torch.int64, device=keys.device)
    mixed = keys + (positions + 1) * _GAMMA
    mixed = (mixed ^ _shift_right(mixed, 30)) * _FIRST
    mixed = (mixed ^ _shift_right(mixed, 27)) * _SECOND
    return mixed ^ _shift_right(mixed, 31)


def key_tensor(keys: Sequence[int]) -> Tensor:
    """Convert unsigned 64-bit keys to an int64 tensor with the same bits, [B].

    Raises:
        ValueError: a key is not in [0, 2**64).
    """
    for key in keys:
        if not 0 <= key < 2**64:
            raise ValueError(f"a key must be in [0, 2**64), got {key}; make keys with fold_in")
    return torch.tensor([_signed(key) for key in keys], dtype=torch.int64)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Shift int64 bits right logically: zeros come in from the left, where `>>` alone would copy the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
