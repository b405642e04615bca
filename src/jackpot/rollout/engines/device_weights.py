"""Weights in the memory of the device that rank 0 computes on, and how they get to engines in other processes.

A process on the same GPU opens that memory itself (CUDA IPC). To any other they are broadcast in a group of two, with
NCCL between GPUs and gloo between CPUs. Each process has such a group of its own, so that one that is lost holds up no
other. The group is apart from the one in which ranks train, and from those that an engine makes for itself.

Status: never run on its target (several GPUs or machines). It ran
with gloo, and with CUDA IPC between processes on one H200; NCCL was not run.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from jackpot.rollout.engines.shared_weights import copy_in, lay_out

_PIECE = 2**30  # most bytes of one broadcast
_POLL = 1e-3  # seconds between two looks whether a broadcast is done
_NEVER = timedelta(days=1)  # until NCCL's own watchdog ends a process: a channel gives up before
_WATCHED = "TORCH_NCCL_ASYNC_ERROR_HANDLING"  # 0: a lost process is no reason to end the one that leads
_HERE = "here"  # key of the store that the receiver sets
_making = threading.Lock()  # of groups, whose settings are in the environment


class DeviceWeights:
    """Holds named tensors in one piece of a device's memory, until the last reference to it is gone."""

    def __init__(
        self, named_tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None, device: torch.device
    ) -> None:
        """Copy tensors of any device.

        Args:
            dtype: that they are cast to; None: each keeps its own.
        """
        tensors = dict(named_tensors)
        self.head, size = lay_out(tensors, dtype)
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)
        copy_in(self.memory, self.head, tensors)

    def handle(self) -> list[Any]:
        """Return what a process on the same GPU opens the memory with (`open_handle`).

        One that is killed while it has the memory open leaves it taken until this process ends: torch counts readers.
        """
        torch.cuda.synchronize(self.memory.device)  # the copies are done
        _, *parts = self.memory.untyped_storage()._share_cuda_()
        return [part.hex() if isinstance(part, bytes) else part for part in parts]


def open_handle(handle: list[Any], device: torch.device) -> Tensor:
    """Return the memory of another process on the same GPU, [bytes] uint8."""
    parts = [bytes.fromhex(part) if isinstance(part, str) else part for part in handle]
    storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *parts)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def gpu_name(device: torch.device) -> str | None:
    """Return what names a GPU in all processes; None for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


class Channel:
    """Joins the process that leads, which sends, and one other, which receives.

    Args:
        address: of the interface that the sender listens on.
        port: that the sender listens on; None in the sender, which finds a free one.
        device: whose memory is sent or written.
        timeout: seconds that each side waits for the other.
    """

    def __init__(self, address: str, port: int | None, device: torch.device, timeout: float) -> None:
        self._is_sender, self._address, self._device, self._timeout = port is None, address, device, timeout
        self._group: Any = None
        self._is_closed = False

        limit = timedelta(seconds=timeout)
        if port is not None:
            self._store = dist.TCPStore(address, port, is_master=False, timeout=limit)
            self._store.set(_HERE, "")
            return

        family = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
        with socket.create_server((address, 0), family=family) as server:  # torch would listen on every interface
            free = server.getsockname()[1]
            options = {"is_master": True, "wait_for_workers": False, "master_listen_fd": server.detach()}
            self._store = dist.TCPStore(address, free, timeout=limit, **options)
        self.ticket = {"address": address, "port": free}
        """What the receiver is made with."""

    def broadcast(self, memory: Tensor) -> None:
        """Send memory, [bytes] uint8 on the device, or overwrite it with what the other side sends at the same time.

        Raises:
            RuntimeError: the other side is lost.
            TimeoutError: it does not answer in time.
        """
        if self._group is None:
            self._wait_until(lambda: self._store.check([_HERE]))
            self._group = self._join()
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        for piece in memory.split(_PIECE):
            work = self._group.broadcast([piece], options)
            self._wait_until(work.is_completed)
            work.wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def close(self) -> None:
        """Give up what is being sent, and leave the group."""
        self._is_closed = True
        if self._group is not None:
            self._group.abort()

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._timeout
        while not is_done():
            if self._is_closed or time.monotonic() > deadline:
                self.close()
                raise TimeoutError(f"the other side did not take part in {self._timeout:g} seconds")
            time.sleep(_POLL)

    def _join(self) -> Any:
        rank = 0 if self._is_sender else 1

        if self._device.type == "cpu":
            options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]  missing in torch's stubs
            options._timeout = timedelta(seconds=self._timeout)
            host = self._address if self._is_sender else _own_address(self._address)
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            return dist.ProcessGroupGloo(self._store, rank, 2, options)

        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _NEVER
        with _making:
            before = os.environ.get(_WATCHED)
            os.environ[_WATCHED] = "0"
            try:
                return dist.ProcessGroupNCCL(self._store, rank, 2, options)
            finally:
                os.environ.pop(_WATCHED) if before is None else os.environ.update({_WATCHED: before})


def _own_address(other: str) -> str:
    """Return the address of this machine's interface from which another one is reached."""
    family, kind, protocol, _, to = socket.getaddrinfo(other, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as route:
        route.connect(to)  # sends nothing
        return route.getsockname()[0]
