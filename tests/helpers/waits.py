"""Counts on a CPU where a run on a GPU would wait for the device, with the file and line of each wait.

On a CPU nothing waits, and a copy from the device to the host is none. So this takes every tensor for one of the device
but for those that `.cpu()` gave or that were made without naming a device, those that `on_host` names, and what is
computed from these alone. `.to(device)` makes a tensor of the device; it is no wait with `non_blocking`, as of memory
that is pinned (`models.device.upload`).
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
COPYING = {torch.tensor, torch.as_tensor}  # make a tensor of numbers on the host, and a device waits for its copy


class Waits(TorchDispatchMode):
    """Lists the waits of the code that runs inside of it."""

    def __init__(self, on_host: Iterable[Tensor]) -> None:
        super().__init__()
        self.places: list[str] = []  # "operator at file:line", in order
        self._host: dict[int, Tensor] = {}  # by the address of their memory, or their own, which they keep
        self.mark(on_host)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        inputs = _tensors((args, kwargs))
        is_host = bool(inputs) and all(map(self.is_host, inputs))
        name = func.overloadpacket.__name__
        by_mask = name in INDEXING and any(index.dtype == torch.bool for index in args[1] if index is not None)
        by_repeats = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        if not is_host and (name in WAITING or by_mask or by_repeats):
            self.note(name + " by a mask" * by_mask)
        result = func(*args, **(kwargs or {}))
        if is_host:
            self.mark(_tensors(result))
        return result

    def read(self, tensor: Tensor, name: str) -> Tensor:
        """Note that the host reads a tensor, and return a copy of it that is the host's."""
        if not self.is_host(tensor):
            self.note(name)
        copy = tensor.clone()
        self.mark([copy])
        return copy

    def send(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor that is the device's."""
        copy = tensor.clone()
        self._host.pop(copy.untyped_storage().data_ptr(), None)
        return copy

    def note(self, name: str) -> None:
        """Note a wait, with the innermost line of the package or of transformers that is running."""
        frames = [frame for frame in traceback.extract_stack() if {"jackpot", "transformers"} & set(_parts(frame))]
        self.places.append(f"{name} at " + " < ".join(f"{'/'.join(_parts(f)[-2:])}:{f.lineno}" for f in frames[:-4:-1]))

    def is_host(self, tensor: Tensor) -> bool:
        """Return whether a tensor is the host's."""
        return tensor.untyped_storage().data_ptr() in self._host or (not tensor.numel() and id(tensor) in self._host)

    def mark(self, tensors: Iterable[Tensor]) -> None:
        """Take tensors for the host's."""
        for tensor in tensors:
            self._host[tensor.untyped_storage().data_ptr() if tensor.numel() else id(tensor)] = tensor


class _Reads(TorchFunctionMode):
    """Shows `waits` the reads of tensors that are no operator on a CPU, and makes a copy of what goes to a device."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        is_host = all(map(self._waits.is_host, inputs)) and ("device" not in kwargs or bool(inputs))
        if func in READING:
            args, is_host = (self._waits.read(args[0], func.__name__), *args[1:]), True
        elif func is Tensor.to and any(isinstance(arg, torch.device) for arg in (*args[1:], *kwargs.values())):
            if inputs and is_host and not kwargs.get("non_blocking"):
                self._waits.note("to")
            args, is_host = (self._waits.send(args[0]), *args[1:]), False
        elif func is Tensor.new_tensor or (func in COPYING and not inputs and "device" in kwargs):
            self._waits.note(func.__name__)
        result = func(*args, **kwargs)
        if is_host:
            self._waits.mark(_tensors(result))
        return result


@contextmanager
def waits(on_host: Iterable[Tensor] = ()) -> Iterator[list[str]]:
    """Yield a list that holds, after the block, where it would have waited for the device.

    Args:
        on_host: tensors that are the host's before.
    """
    counter = Waits(on_host)
    with counter, _Reads(counter):
        yield counter.places


def _parts(frame: traceback.FrameSummary) -> tuple[str, ...]:
    return Path(frame.filename).parts


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
