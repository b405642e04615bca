"""Weights in memory that other processes of this machine read, as a safetensors file that is in no folder.

The file is anonymous (memfd): the kernel frees its memory when the last process that has it open ends, in whatever way,
so nothing is left after a kill. Processes of the same user open it under a path below /proc. Systems without anonymous
files, such as macOS, get a temporary file.
"""

import json
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_ALIGNED = 64  # bytes; the first tensor begins at a multiple of this number
_NAMES = {  # names of dtypes in a safetensors file
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class SharedWeights:
    """Named tensors in shared memory, which is freed with the last reference to this object.

    A reader that has opened `path` before then keeps the memory for as long as it reads.
    """

    def __init__(self, named_tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None) -> None:
        """Copy tensors of any device into shared memory.

        Args:
            dtype: dtype that the tensors are cast to; None: each keeps its dtype.

        Raises:
            OSError: there is no room for the tensors.
        """
        tensors = dict(named_tensors)
        # The head of a safetensors file has the dtype, shape and place of each tensor. Tensors follow one another.
        head: dict[str, dict[str, Any]] = {}
        size = 0  # bytes of the tensors so far
        for name, tensor in tensors.items():
            stored_dtype = dtype or tensor.dtype
            begin, size = size, size + tensor.numel() * stored_dtype.itemsize
            head[name] = {"dtype": _NAMES[stored_dtype], "shape": list(tensor.shape), "data_offsets": [begin, size]}

        # A safetensors file: the length of the head in 8 bytes, the head as JSON, and the tensors.
        text = json.dumps({"__metadata__": {"format": "pt"}} | head).encode()
        # Spaces behind the head make the tensors begin at a multiple of `_ALIGNED`.
        text += b" " * (-(8 + len(text)) % _ALIGNED)
        start = 8 + len(text)  # offset of the first tensor

        descriptor = self._open()
        weakref.finalize(self, _close, descriptor, os.getpid())  # a fork of this process does not close it
        os.ftruncate(descriptor, start + size)
        os.pwrite(descriptor, len(text).to_bytes(8, "little") + text, 0)

        memory = torch.frombuffer(mmap.mmap(descriptor, start + size), dtype=torch.uint8)[start:]
        for name, tensor in tensors.items():
            first, last = head[name]["data_offsets"]
            memory[first:last].view(dtype or tensor.dtype).view(tensor.shape).copy_(tensor.detach())

    def _open(self) -> int:
        """Open a new file, set `path`, and return the file's descriptor.

        Where the system has no memory files (`memfd_create`), it is a temporary file, deleted with this object.
        """
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("jackpot-weights", os.MFD_CLOEXEC)
            self.path = Path(f"/proc/{os.getpid()}/fd/{descriptor}")
            return descriptor
        descriptor, name = tempfile.mkstemp(prefix="jackpot-weights-", suffix=".safetensors")
        self.path = Path(name)
        weakref.finalize(self, self.path.unlink, missing_ok=True)
        return descriptor


def _close(descriptor: int, process: int) -> None:
    """Close a descriptor, unless this is a fork of the process that opened it."""
    if os.getpid() == process:
        os.close(descriptor)


def read_weights(path: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a safetensors file that this program has written, without copying them.

    The library's own reader (safetensors 0.8) leaks two objects for each tensor until the process ends, so it is not
    used.

    Raises:
        OSError: the file does not exist, or exists no more, or is damaged.
    """
    try:
        with open(path, "rb") as file:
            memory = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
        start = 8 + int(memory[:8].view(torch.int64))  # offset of the first tensor
        head = json.loads(memory[8:start].numpy().tobytes())
        head.pop("__metadata__", None)

        for name, layout in head.items():
            first, last = layout["data_offsets"]
            yield name, memory[start:][first:last].view(_DTYPES[layout["dtype"]]).view(layout["shape"])
    except (ValueError, LookupError, RuntimeError) as error:
        raise OSError(f"{path} is no whole file of safetensors: {type(error).__name__}: {error}") from error
