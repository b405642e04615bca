"""What CUDA refuses, and what it takes with how many waits of the host. The virtual GPU is held to these lists."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from virtual_gpu.cuda import waits

CUDA = torch.device("cuda")


def gpu_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(CUDA, dtype)


a, b = gpu_tensor(4, 5), torch.randn(4, 5)  # `a` is on the GPU, `b` on the CPU
pinned = b.pin_memory()
half = gpu_tensor(4, 5, dtype=torch.bfloat16)
scalar, base = gpu_tensor(), gpu_tensor(4)
weight = gpu_tensor(3, 5)
parameter = torch.nn.Parameter(gpu_tensor(3))

ids = torch.tensor([0, 2])
gpu_ids = ids.to(CUDA)
integers = torch.ones(4, dtype=torch.int64).to(CUDA)
square = integers[:, None] * integers
column = torch.zeros(4, 1, dtype=torch.int64)


def capture(work: Callable[[], object]) -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        work()


REFUSED: dict[str, Callable[[], object]] = {
    "add of both devices": lambda: a + b,
    "where with a mask of the CPU": lambda: torch.where(b > 0, a, 0.0),
    "where with values of the CPU": lambda: torch.where(a > 0, a, b),
    "cat": lambda: torch.cat([a, b]),
    "stack": lambda: torch.stack([a, b]),
    "gather with an index of the CPU": lambda: a.gather(1, column),
    "scatter with an index of the CPU": lambda: a.clone().scatter_(1, column, 0.0),
    "index_select with an index of the CPU": lambda: a.index_select(0, ids),
    "index of the GPU into the CPU": lambda: b[gpu_ids],
    "index_put of values of the CPU": lambda: a.clone().__setitem__(ids, b[:2]),
    "index_add of the CPU": lambda: a.clone().index_add_(0, gpu_ids, b[:2]),
    "embedding with ids of the CPU": lambda: F.embedding(ids, a),
    "linear with a weight of the CPU": lambda: F.linear(a, torch.randn(3, 5)),
    "mm with out of the CPU": lambda: torch.mm(a, a.t(), out=torch.empty(4, 4)),
    "masked_fill with a mask of the CPU": lambda: a.masked_fill(b > 0, 0.0),
    "foreach_mul by a tensor of the CPU": lambda: torch._foreach_mul_([a.clone()], [b]),
    "in-place add to the CPU": lambda: b.clone().add_(a),
    "clamp by a number of the CPU": lambda: a.clamp(min=torch.tensor(0.0)),
    "searchsorted in the CPU": lambda: torch.searchsorted(torch.arange(4.0), base),
    "cross entropy with targets of the CPU": lambda: F.cross_entropy(a, torch.zeros(4, dtype=torch.int64)),
    "product of integers": lambda: square @ square,
    "numpy": lambda: a.numpy(),
    "gradient of the CPU": lambda: setattr(parameter, "grad", torch.zeros(3)),
    "addmm of fp16 and bf16": lambda: torch.addmm(a[:, :4].half(), half, half.t(), out_dtype=torch.float32),
    "item during capture": lambda: capture(lambda: a.sum().item()),
    "nonzero during capture": lambda: capture(lambda: a.nonzero()),
}


def autocast() -> None:
    with torch.autocast("cuda", torch.bfloat16):
        assert F.linear(a, weight).dtype == torch.bfloat16


def backward_of_a_view() -> None:
    leaf = base.clone().requires_grad_()
    double = leaf * 1.0
    double[1:].mul_(2.0)
    double.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.is_cuda


layer = torch.nn.Linear(5, 2).to(CUDA)
adamw = torch.optim.AdamW(layer.parameters(), fused=True)
layer(a).sum().backward()

LEGAL: dict[str, tuple[Callable[[], object], int]] = {  # with the number of waits
    "a number": (lambda: a + 1.0, 0),
    "a tensor of one number of the CPU": (lambda: a * torch.tensor(2.0), 0),
    "where with a number": (lambda: torch.where(a > 0, a, 0.0), 0),
    "comparison with a number of the CPU": (lambda: a > torch.tensor(0.0), 0),
    "index of the CPU": (lambda: a[ids], 1),
    "index of a list": (lambda: a[[0, 2]], 1),
    "index of the GPU": (lambda: a[gpu_ids], 0),
    "slice set to a number": (lambda: a.clone().__setitem__(slice(0, 2), 0.0), 0),
    "mask set to a number": (lambda: a.clone().__setitem__(a > 0, 0.0), 0),
    "masked_fill by a number of the GPU": (lambda: a.masked_fill(a > 0, scalar), 1),
    "boolean index": (lambda: a[a > 0], 1),
    "nonzero": (lambda: a.nonzero(), 1),
    "item": (lambda: a.sum().item(), 1),
    "bool": (lambda: bool((a > 0).any()), 1),
    "tolist": (lambda: a.tolist(), 1),
    "copy to the host": (lambda: a.cpu(), 1),
    "copy of nothing": (lambda: a[:0].cpu(), 0),
    "copy from pageable memory": (lambda: b.to(CUDA), 1),
    "copy from pinned memory": (lambda: pinned.to(CUDA, non_blocking=True), 0),
    "copy_ between devices": (lambda: a.clone().copy_(b), 1),
    "foreach_copy between devices": (lambda: torch._foreach_copy_([a.clone()], [b]), 1),
    "repeat_interleave with a known size": (lambda: a.repeat_interleave(integers, 0, output_size=4), 0),
    "repeat_interleave with an unknown size": (lambda: a.repeat_interleave(integers, 0), 1),
    "fused AdamW": (adamw.step, 0),
    "autocast": (autocast, 0),
    "zeros and arange": (lambda: torch.zeros(3, device=CUDA) + torch.arange(3, device=CUDA), 0),
    "torch.tensor on the GPU": (lambda: torch.tensor([1.0], device=CUDA), 1),
    "a view set to zero": (lambda: a.clone()[1:3].zero_(), 0),
    "backward of a view": (backward_of_a_view, 0),
}


def not_refused() -> list[str]:
    """Return the mixes that did not raise."""
    names = []
    for name, work in REFUSED.items():
        try:
            work()
        except (RuntimeError, TypeError):
            continue
        names.append(name)
    return names


def other_waits() -> dict[str, int]:
    """Return the legal calls that waited another number of times than on CUDA, with that number.

    Raises:
        RuntimeError: one of them is refused.
    """
    counts = {}
    for name, (work, _) in LEGAL.items():
        waits.take()
        work()
        counts[name] = waits.take().total()
    return {name: count for name, count in counts.items() if count != LEGAL[name][1]}


def graph_values() -> list[list[float]]:
    """Return a tensor to which a step adds 1, and its double: behind a capture of the step, and behind two replays."""
    x, double = torch.zeros(2, device=CUDA), torch.zeros(2, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        double.copy_(x.add_(1) * 2)
    captured_values = [x.tolist(), double.tolist()]
    graph.replay()
    graph.replay()
    return [*captured_values, x.tolist(), double.tolist()]


def pinned_values() -> tuple[list[float], list[float]]:
    """Write memory before its copy is done, and return what a copy to the host reads before and after a wait."""
    source = torch.ones(2).pin_memory()
    copy = source.to(CUDA, non_blocking=True)
    source.zero_()
    torch.cuda.synchronize()
    host_copy = torch.empty(2, pin_memory=True)
    host_copy.copy_(copy, non_blocking=True)
    early_values = host_copy.tolist()
    torch.cuda.synchronize()
    return early_values, host_copy.tolist()
