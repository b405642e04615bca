"""Turns the values that processes exchange into bytes and back: JSON and flat tensors, without pickle.

Only the classes in `_CLASSES` are ever made from a message, which begins with a checksum of the rest.
"""

import json
import math
import zlib
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from jackpot.core.errors import RankError
from jackpot.core.types import (
    AttentionBlock,
    PackedRow,
    Prompt,
    Rollout,
    Score,
    ScoredRollout,
    TokenBatch,
    TrainingSample,
)

_KNOWN = (AttentionBlock, PackedRow, Prompt, Rollout, Score, ScoredRollout, TokenBatch, TrainingSample)
_CLASSES = {kind.__name__: kind for kind in _KNOWN}
_ALIGNED = 8  # bytes; every tensor begins at a multiple of them, so that no copy is needed to read it


class MessageError(RankError, ValueError):
    """A message that does not come from `pack` of this version, or was altered on its way."""


def pack(value: Any) -> Tensor:
    """Return a value as bytes, [n] uint8 on the CPU, from which `unpack` makes an equal one.

    The value consists of None, bools, numbers, strings, tensors of any device, lists, tuples, dicts with strings as
    keys, and the classes of `core.types` that hold rollouts and batches of them.

    Raises:
        TypeError: it holds something else.
    """
    tensors: list[Tensor] = []
    plain = _plain(value, tensors)
    kinds = [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in tensors]
    text = json.dumps([plain, kinds]).encode()

    head = bytes(_ALIGNED) + len(text).to_bytes(_ALIGNED, "little") + text
    parts = [torch.frombuffer(bytearray(head), dtype=torch.uint8)]
    flat = [tensor.detach().cpu().contiguous().as_strided((tensor.numel(),), (1,)) for tensor in tensors]
    parts += [tensor.view(torch.uint8) for tensor in flat]
    message = torch.cat([torch.nn.functional.pad(part, (0, -len(part) % _ALIGNED)) for part in parts])
    message[:_ALIGNED] = _checksum(message)
    return message


def unpack(message: Tensor) -> Any:
    """Return the value that `pack` was given; its tensors are on the CPU and share the memory of the message.

    Raises:
        MessageError: the message does not come from `pack` of this version.
    """
    try:
        if not torch.equal(message[:_ALIGNED], _checksum(message)):
            raise ValueError("it was altered on its way")
        return _unpacked(message[_ALIGNED:])
    except Exception as error:  # whatever a message of other bytes leads to
        raise MessageError(f"a message cannot be read: {type(error).__name__}: {error}") from error


def _checksum(message: Tensor) -> Tensor:
    """Return the CRC-32 of what follows the place of the checksum, [8] uint8."""
    checksum = zlib.crc32(message[_ALIGNED:].numpy().data).to_bytes(_ALIGNED, "little")
    return torch.frombuffer(bytearray(checksum), dtype=torch.uint8)


def _unpacked(message: Tensor) -> Any:
    size = int.from_bytes(message[:_ALIGNED].numpy().tobytes(), "little")
    plain, kinds = json.loads(message[_ALIGNED : _ALIGNED + size].numpy().tobytes())

    tensors: list[Tensor] = []
    start = _ALIGNED + size
    for name, shape in kinds:
        start += -start % _ALIGNED
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"a message between ranks has a tensor of {name!r}, which is no number format of torch")
        if not all(type(length) is int and length >= 0 for length in shape):
            raise ValueError(f"a message between ranks has a tensor of shape {shape}")
        end = start + math.prod(shape) * dtype.itemsize
        tensors.append(message[start:end].view(dtype).view(shape))
        start = end
    return _value(plain, tensors)


def _plain(value: Any, tensors: list[Tensor]) -> Any:
    """Return what JSON can hold, with the number of each tensor in its place; a list or object names its type."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}

    name = type(value).__name__
    if _CLASSES.get(name) is type(value):
        parts = [getattr(value, field.name) for field in fields(value)] if is_dataclass(value) else list(value)
        return {name: [_plain(part, tensors) for part in parts]}

    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _plain(part, tensors) for key, part in value.items()}}
    if type(value) is tuple:
        return {"tuple": [_plain(part, tensors) for part in value]}
    if type(value) is list:
        return [_plain(part, tensors) for part in value]
    raise TypeError(f"a message between ranks holds a {name}, which is none of {', '.join(_CLASSES)} and plain values")


def _value(plain: Any, tensors: list[Tensor]) -> Any:
    if isinstance(plain, list):
        return [_value(part, tensors) for part in plain]
    if not isinstance(plain, dict):
        return plain

    ((name, held),) = plain.items()
    if name == "tensor":
        return tensors[held]
    if name == "dict":
        return {key: _value(part, tensors) for key, part in held.items()}

    values = [_value(part, tensors) for part in held]
    if name == "tuple":
        return tuple(values)
    kind = _CLASSES[name]
    if not is_dataclass(kind):
        return kind(*values)
    return kind(**dict(zip((field.name for field in fields(kind)), values, strict=True)))
