"""The bytes of the values that processes exchange: JSON and flat tensors, without pickle.

A message begins with a checksum of the rest, and can make no objects but those of the classes in `_CLASSES`.
"""

import json
import math
import zlib
from dataclasses import fields
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

_CLASSES = {
    known.__name__: known
    for known in (AttentionBlock, PackedRow, Prompt, Rollout, Score, ScoredRollout, TokenBatch, TrainingSample)
}
_ALIGNED = 8  # every part of a message begins at a multiple of so many bytes, so that tensors are read without a copy


class MessageError(RankError, ValueError):
    """A message that does not come from `pack` of this version, or was altered on its way."""


def pack(value: Any) -> Tensor:
    """Return a value as bytes, [n] uint8 on the CPU, from which `unpack` makes an equal value.

    The value consists of None, bools, numbers, strings, tensors of any device, lists, tuples, dicts with strings as
    keys, and the classes of `core.types` that hold rollouts and batches of them.

    Raises:
        TypeError: the value holds something else.
    """
    tensors: list[Tensor] = []
    content = _plain(value, tensors)
    layouts = [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in tensors]
    text = json.dumps([content, layouts]).encode()

    # A message is its checksum (at first 0), the length of the JSON, the JSON, and each tensor's bytes, all padded.
    head = bytes(_ALIGNED) + len(text).to_bytes(_ALIGNED, "little") + text
    blobs = [torch.frombuffer(bytearray(head), dtype=torch.uint8)]
    # `as_strided` sets the stride 1, which a view as bytes needs; a tensor of one number may have any other.
    flat = [tensor.detach().cpu().contiguous().as_strided((tensor.numel(),), (1,)) for tensor in tensors]
    blobs += [tensor.view(torch.uint8) for tensor in flat]

    message = torch.cat([torch.nn.functional.pad(blob, (0, -len(blob) % _ALIGNED)) for blob in blobs])
    message[:_ALIGNED] = _checksum(message)
    return message


def unpack(message: Tensor) -> Any:
    """Return the value of a message from `pack`; its tensors are on the CPU and share the memory of the message.

    Raises:
        MessageError: the message does not come from `pack` of this version.
    """
    try:
        if not torch.equal(message[:_ALIGNED], _checksum(message)):
            raise ValueError("it was altered on its way")
        return _unpacked(message[_ALIGNED:])
    except Exception as error:  # bytes that are no message of `pack` may raise any error
        raise MessageError(
            f"a message cannot be read: {type(error).__name__}: {error}; look at the connection, and type the same "
            f"command again, which continues from the newest checkpoint"
        ) from error


def _checksum(message: Tensor) -> Tensor:
    """Return the CRC-32 of a message without its first 8 bytes, the place of the checksum: [8] uint8."""
    checksum = zlib.crc32(message[_ALIGNED:].numpy().data).to_bytes(_ALIGNED, "little")
    return torch.frombuffer(bytearray(checksum), dtype=torch.uint8)


def _unpacked(message: Tensor) -> Any:
    """Return the value of a message, [n] uint8, from which the checksum has been removed."""
    # The JSON is [content, layouts]: the value, in which tensors are indices, and (dtype, shape) of each tensor.
    size = int.from_bytes(message[:_ALIGNED].numpy().tobytes(), "little")  # length of the JSON, bytes
    content, layouts = json.loads(message[_ALIGNED : _ALIGNED + size].numpy().tobytes())

    tensors: list[Tensor] = []
    start = _ALIGNED + size
    for name, shape in layouts:
        start += -start % _ALIGNED  # skip the padding
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"a message between ranks has a tensor of {name!r}, which is no number format of torch")
        if not all(type(length) is int and length >= 0 for length in shape):
            raise ValueError(f"a message between ranks has a tensor of shape {shape}")

        end = start + math.prod(shape) * dtype.itemsize
        tensors.append(message[start:end].view(dtype).view(shape))
        start = end
    return _value(content, tensors)


def _plain(value: Any, tensors: list[Tensor]) -> Any:
    """Convert a value to plain JSON values, and append the tensors that it holds to `tensors`.

    None, bools, numbers and strings stay as they are, and lists stay lists. Any other value becomes an object with one
    entry, whose key is the type: {"tuple": [...]}, {"dict": {...}}, {"Score": [...]} with the values of the fields,
    or {"tensor": 2} with the index in `tensors`.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}

    name = type(value).__name__
    if _CLASSES.get(name) is type(value):
        return {name: [_plain(getattr(value, field.name), tensors) for field in fields(value)]}

    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _plain(entry, tensors) for key, entry in value.items()}}
    if type(value) is tuple:  # no NamedTuple, which would come back as a plain tuple
        return {"tuple": [_plain(item, tensors) for item in value]}
    if type(value) is list:
        return [_plain(item, tensors) for item in value]
    raise TypeError(f"a message between ranks holds a {name}, which is none of {', '.join(_CLASSES)} and plain values")


def _value(plain: Any, tensors: list[Tensor]) -> Any:
    """Convert the JSON value that `_plain` returned back to the value that `_plain` was given."""
    if isinstance(plain, list):
        return [_value(item, tensors) for item in plain]
    if not isinstance(plain, dict):
        return plain

    ((name, content),) = plain.items()  # the single entry: a type and its content
    if name == "tensor":
        return tensors[content]
    if name == "dict":
        return {key: _value(entry, tensors) for key, entry in content.items()}

    values = [_value(item, tensors) for item in content]
    if name == "tuple":
        return tuple(values)

    known = _CLASSES[name]
    return known(**dict(zip((field.name for field in fields(known)), values, strict=True)))
