"""Measures time, memory and rates on the machine of the GPU benchmark, and what the profiler sees of a run."""

import gc
import platform
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version

import torch
from gpu_parts.results import Result
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from jackpot.analysis.plan.cost_model import GPUS, Gpu

WAITS = {"cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy"}
WAITS_ON_CPU = {"aten::_local_scalar_dense", "aten::nonzero"}  # operators that would wait on a GPU
LAUNCHES = {"cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch"}
GAPS = 3  # longest ones that are named
Run = Callable[[], object]


class Machine:
    """A GPU, or for tiny shapes the CPU too."""

    def __init__(self, tiny: bool) -> None:
        self.tiny, self.has_gpu = tiny, torch.cuda.is_available()
        self.device = torch.device("cuda" if self.has_gpu else "cpu")
        torch.backends.cuda.enable_cudnn_sdp(False)  # as in runs, whose models `load_model` loads

    def about(self) -> dict[str, str]:
        """Return the device and the versions that results depend on."""
        device = torch.cuda.get_device_name() if self.has_gpu else platform.machine()
        named = {name: _version(name) for name in ("torch", "transformers", "triton", "trl", "liger-kernel", "vllm")}
        return {"device": device, "python": platform.python_version()} | {key: one for key, one in named.items() if one}

    def wait(self) -> None:
        if self.has_gpu:
            torch.cuda.synchronize()

    def forget(self) -> None:
        """Free the memory of what is no longer used."""
        gc.collect()
        if self.has_gpu:
            torch.cuda.empty_cache()

    def seconds(self, run: Run, repetitions: int = 3) -> float:
        """Return the median wall time of a run after one that is not counted; with tiny shapes that of a single run."""
        if self.tiny:
            return self._once(run)
        run()
        return statistics.median(self._once(run) for _ in range(repetitions))

    def _once(self, run: Run) -> float:
        self.wait()
        began = time.perf_counter()
        run()
        self.wait()
        return time.perf_counter() - began

    def extra_gb(self, run: Run) -> float:
        """Return the most memory of the GPU that a run takes above what is held before it, GB; 0 on a CPU."""
        if not self.has_gpu:
            return 0.0
        self.wait()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        self.wait()
        return (torch.cuda.max_memory_allocated() - before) / 1e9

    def profile(self, run: Run, steps: int = 1) -> Result:
        """Count waits of the host for the GPU, copies to it and launches of kernels, in one of `steps`; and return the
        share of the run in which a kernel runs, and the longest gaps, with the kernel behind each.

        On a CPU it counts operators that would wait on a GPU, and nothing else.
        """
        activity = ProfilerActivity.CUDA if self.has_gpu else ProfilerActivity.CPU
        with profile(activities=[activity]) as recorded:
            run()
            self.wait()
        events = recorded.profiler.kineto_results.events()  # `key_averages` takes seconds for ten thousand of them
        counts = Counter(event.name() for event in events)
        of = lambda names: round(sum(counts[name] for name in names) / steps, 2)  # noqa: E731
        if not self.has_gpu:
            return {"waits": of(WAITS_ON_CPU)}
        kernels = sorted(
            (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
            for event in events
            if event.device_type() == DeviceType.CUDA and not event.name().startswith("Optimizer.")  # no annotations
        )
        to_host = sum(name.startswith("Memcpy DtoH") for _, _, name in kernels)
        counted = {"waits": of(WAITS), "copies to the host": round(to_host / steps, 2), "launches": of(LAUNCHES)}
        return counted | timeline(kernels)

    @property
    def data_sheet(self) -> Gpu | None:
        """Return the rates that NVIDIA gives for this GPU; None for one that the plans do not know."""
        return next((gpu for kind, gpu in GPUS.items() if kind in self.about()["device"]), None)

    def shares(self, flops: float, seconds: float, precision: str = "bf16") -> Result:
        """Return which part of a large product's rate this is, and of the data sheet's where that is known."""
        result = {"of a product": flops / seconds / self.product_rate(precision)}
        if sheet := self.data_sheet:
            result["of peak"] = (
                flops / seconds / {"bf16": sheet.bf16, "TF32": sheet.bf16 / 2, "fp32": sheet.fp32}[precision]
            )
        return result

    @cache  # noqa: B019
    def product_rate(self, precision: str) -> float:
        """Measure the FLOP/s of a large product of random numbers."""
        size, dtype = 128 if self.tiny else 8192, torch.bfloat16 if precision == "bf16" else torch.float32
        left, right = (torch.randn(size, size, device=self.device, dtype=dtype) for _ in range(2))
        with tf32(precision == "TF32"):
            return 2.0 * size**3 / self.seconds(lambda: left @ right, 10)

    @cache  # noqa: B019
    def copy_rate(self) -> float:
        """Measure the bytes that a large copy reads and writes in a second."""
        block = torch.empty(2**20 if self.tiny else 2**32, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(block)
        return 2.0 * block.numel() / self.seconds(lambda: target.copy_(block), 10)


@contextmanager
def tf32(enabled: bool) -> Iterator[None]:
    """Let products of float32 matrices be rounded to TF32 in the body, or not."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if enabled else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def timeline(kernels: Sequence[tuple[int, int, str]]) -> Result:
    """Return how busy the GPU is and its longest gaps, from begin, end (both ns) and name of the kernels, sorted."""
    end, busy, gaps = kernels[0][0], 0, []
    for began, ended, name in kernels:
        gaps.append((max(0, began - end), name))
        busy += max(0, ended - max(began, end))
        end = max(end, ended)
    longest = ", ".join(f"{gap / 1e6:.2f} before {name[:30]}" for gap, name in sorted(gaps, reverse=True)[:GAPS])
    return {"busy": busy / (end - kernels[0][0]), "longest gaps, ms": longest.replace("|", "/")}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
