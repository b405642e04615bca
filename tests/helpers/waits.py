"""Counts on a CPU where a run on a GPU would wait for the device, with the file and line of each wait.

On a CPU nothing waits, and a copy from the device to the host is none. So this takes every tensor for one of the device
but for those that `.cpu()` gave, those that `on_host` names, and what is computed from these alone.
"""

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# operators whose result has a size that depends on values, or that give the host a value
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "bincount", "_unique2", "unique_dim", "equal"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
READING = {Tensor.cpu, Tensor.numpy, Tensor.tolist}  # which no operator shows on a CPU


class Waits(TorchDispatchMode):
    """Lists the waits of the code that runs inside of it."""

    def __init__(self, on_host: Iterable[Tensor]) -> None:
        super().__init__()
        self.found: list[str] = []  # "operator at file:line", in order
        self._host: dict[int, Tensor] = {}  # by the address of their memory, which they keep from being freed
        self._mark(on_host)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_host = bool(inputs) and all(map(self._is_host, inputs))
        name = func.overloadpacket.__name__
        by_mask = name in INDEXING and any(one.dtype == torch.bool for one in args[1] if one is not None)
        by_repeats = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        if not is_host and (name in WAITING or by_mask or by_repeats):
            self.note(name + " by a mask" * by_mask)
        result = func(*args, **(kwargs or {}))
        if is_host:
            self._mark(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result

    def read(self, tensor: Tensor, name: str) -> Tensor:
        """Note that the host reads a tensor, and return a copy of it that is the host's."""
        if not self._is_host(tensor):
            self.note(name)
        copy = tensor.clone()
        self._mark([copy])
        return copy

    def send(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor that is the device's."""
        copy = tensor.clone()
        self._host.pop(copy.untyped_storage().data_ptr(), None)
        return copy

    def note(self, name: str) -> None:
        """Note a wait, with the innermost line of the package or of transformers that is running."""
        frames = [frame for frame in traceback.extract_stack() if {"jackpot", "transformers"} & set(_parts(frame))]
        self.found.append(f"{name} at " + " < ".join(f"{'/'.join(_parts(f)[-2:])}:{f.lineno}" for f in frames[:-4:-1]))

    def _is_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._host

    def _mark(self, tensors: Iterable[Tensor]) -> None:
        self._host |= {one.untyped_storage().data_ptr(): one for one in tensors if one.numel()}


class _Reads(TorchFunctionMode):
    """Shows `waits` the reads of tensors that are no operator on a CPU, and makes a copy of what goes to a device."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in READING:
            args = (self._waits.read(args[0], func.__name__), *args[1:])
        elif func is Tensor.to and any(isinstance(arg, torch.device) for arg in (*args[1:], *(kwargs or {}).values())):
            args = (self._waits.send(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


@contextmanager
def waits(on_host: Iterable[Tensor] = ()) -> Iterator[list[str]]:
    """Yield a list that holds, after the block, where it would have waited for the device.

    Args:
        on_host: tensors that are the host's before.
    """
    counter = Waits(on_host)
    with counter, _Reads(counter):
        yield counter.found


def _parts(frame: traceback.FrameSummary) -> tuple[str, ...]:
    return Path(frame.filename).parts
