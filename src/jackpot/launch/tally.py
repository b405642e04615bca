"""Counts the memory of tensors that are never computed. Layer 6.

Under torch's FakeTensorMode tensors have shapes and no memory, and every operation still makes and frees them in its
turn. That order is what memory is made of: how much is alive at once, and how much the allocator wastes between.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PAGE = 4096
_STATM = Path("/proc/self/statm")  # in pages: size, resident, shared, text, library, data, dirty


def resident() -> int:
    """Memory of this process now, bytes. 0 where /proc does not tell."""
    return _statm(1)


def _data() -> int:
    """Address space that this process has for data, used or not; bytes."""
    return _statm(5)


def _statm(column: int) -> int:
    return int(_STATM.read_bytes().split()[column]) * _PAGE if _STATM.exists() else 0


class Tally(TorchDispatchMode):
    """Bytes of all storages that are alive and were made under it, and the most there ever were.

    Args:
        reserves: ask the process's own allocator for as much whenever a tensor is made, never touch it, and give it
            back when the tensor goes. How far the process then grows is how far a run does. That is more than its
            tensors: glibc before 2.38 cannot use the place of a freed tensor for one of the same size, unless its
            neighbours are free too (sourceware bug 14581), and the small objects of Python and autograd settle there.
    """

    def __init__(self, reserves: bool = False) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._known: set[int] = set()
        self._reserves = reserves
        self._before = _data() - resident()
        self._most = 0

    @property
    def wasted(self) -> int:
        """Bytes that the allocator took at most beside the tensors."""
        return max(0, self._most - self.peak) if self._reserves else 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        self.peak = max(self.peak, self.alive)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.alive += size
            weakref.finalize(storage, self._forget, key, size, self._reserved(size))

    def _reserved(self, size: int) -> list[torch.UntypedStorage]:
        """The memory that stands for a tensor, in a list that can be emptied."""
        if not self._reserves:
            return []
        try:
            block = torch.UntypedStorage(size)
        except RuntimeError:  # more than the system would ever give: the run would end there, and waste is no matter
            self._reserves = False
            return []
        untouched = _data() - resident()  # without what this process itself took meanwhile, which it does touch
        self._most = max(self._most, untouched - self._before)
        return [block]

    def _forget(self, key: int, size: int, reserved: list[torch.UntypedStorage]) -> None:
        reserved.clear()
        self._known.discard(key)
        self.alive -= size


@contextmanager
def counted(reserves: bool) -> Iterator[Tally]:
    """Nothing is computed in the body."""
    with FakeTensorMode(), Tally(reserves) as tally:
        yield tally
