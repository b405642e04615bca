"""A stand-in for NCCL: groups whose tensors of the virtual GPU are sent by gloo, as the host's memory that they are.

Importing it replaces `init_process_group` with the backends that the project asks for on GPUs.
Of NCCL's rules it keeps that tensors are contiguous.
"""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.futures import Future

from virtual_gpu.cuda import device

BACKENDS = ("nccl", "cpu:gloo,cuda:nccl")


def _host(tensors: Any) -> Any:
    if isinstance(tensors, list | tuple):
        return [_host(tensor) for tensor in tensors]
    if tensors.is_cuda and not tensors.is_contiguous():
        raise ValueError("Tensors must be contiguous")
    return device.host_alias(tensors)


def _done(result: Any) -> Any:
    future: Future = Future()
    future.set_result(result)
    return c10d._create_work_from_future(future)


class VirtualGroup(dist.ProcessGroup):
    """Ranks on virtual GPUs."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        self._gloo = dist.ProcessGroupGloo(dist.PrefixStore("virtual", store), rank, size, options)
        self._name = "0"

    def getBackendName(self) -> str:
        return "virtual"

    def _set_group_name(self, name: str) -> None:
        self._name = name

    group_name = property(lambda self: self._name)

    def _run(self, name: str, tensors: list, *arguments: Any) -> Any:
        getattr(self._gloo, name)(_host(tensors), *arguments).wait()
        return _done(tensors)

    def allreduce(self, tensors: list, options: Any = None) -> Any:
        return self._run("allreduce", tensors, options or c10d.AllreduceOptions())

    def broadcast(self, tensors: list, options: Any = None) -> Any:
        return self._run("broadcast", tensors, options or c10d.BroadcastOptions())

    def allgather(self, outputs: list, inputs: list, options: Any = None) -> Any:
        return self._run("allgather", outputs, _host(inputs), options or c10d.AllgatherOptions())

    def gather(self, outputs: list, inputs: list, options: Any = None) -> Any:
        return self._run("gather", outputs, _host(inputs), options or c10d.GatherOptions())

    def scatter(self, outputs: list, inputs: list, options: Any = None) -> Any:
        return self._run("scatter", outputs, _host(inputs), options or c10d.ScatterOptions())

    def send(self, tensors: list, rank: int, tag: int) -> Any:
        return self._run("send", tensors, rank, tag)

    def recv(self, tensors: list, rank: int, tag: int) -> Any:
        return self._run("recv", tensors, rank, tag)

    def barrier(self, options: Any = None) -> Any:
        self._gloo.barrier(c10d.BarrierOptions()).wait()
        return _done([])

    def _allgather_base(self, output: Any, input: Any, options: Any = None) -> Any:
        pieces = list(_host(output).view(self.size(), -1).unbind())
        self._gloo.allgather([pieces], [_host(input).reshape(-1)], c10d.AllgatherOptions()).wait()
        return _done([output])

    def _reduce_scatter_base(self, output: Any, input: Any, options: Any = None) -> Any:
        total = _host(input).clone()
        self._gloo.allreduce([total], c10d.AllreduceOptions()).wait()  # a sum, as FSDP's is here
        _host(output).copy_(total.view(self.size(), -1)[self.rank()].view(output.shape))
        return _done([output])

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base


_init = dist.init_process_group


def _init_process_group(backend: str | None = None, *arguments: Any, **options: Any) -> None:
    _init("virtual" if backend in BACKENDS else backend, *arguments, **options)


dist.init_process_group = dist.distributed_c10d.init_process_group = _init_process_group
dist.Backend.register_backend("virtual", VirtualGroup, devices=["cpu", "cuda"])
