"""Inductor on the virtual GPU: it makes the kernels that runs ask for, and Triton compiles them; none is launched.

What they would compute is not known here, so only that they can be built is told. It takes a process of its own, with
no TRITON_INTERPRET.
"""

import os

# Read when inductor is imported, for all threads: backward has one of its own. The launcher in C++ needs a driver.
os.environ |= {"TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER": "0", "TORCHINDUCTOR_COMPILE_THREADS": "1"}

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpu_parts.models import TINY_VOCABULARY, random_samples
from torch._inductor.runtime import benchmarking
from torch._inductor.runtime import triton_helpers as helpers
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from jackpot.models.packed_flex import block_mask, flex_kernel
from jackpot.models.quantization.quantizer import FP8_TOKEN_BLOCKS, quantize
from jackpot.training.batching import batch_to, collate
from virtual_gpu import cuda

CUDA = torch.device("cuda")
ROWS = {  # heads, key heads, size of a head, longest response, window, dtype
    "a row of less than 128 tokens": (4, 2, 16, 24, None, torch.float32),
    "a row of several blocks with a window": (4, 2, 64, 200, 50, torch.float32),
    "a row in bf16": (2, 2, 64, 24, None, torch.bfloat16),
}


class Driver:
    """Triton's driver of an H100 that is not there: kernels are compiled and loaded, and launches do nothing."""

    class utils:
        @staticmethod
        def load_binary(*_: Any) -> tuple[int, ...]:
            return 0, 0, 64, 0, 1024  # module, function, registers, spills, most threads

        @staticmethod
        def get_device_properties(_: int) -> dict[str, int]:
            return {"max_shared_mem": 232_448, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65_536}

    @staticmethod
    def launcher_cls(*_: Any) -> Callable[..., None]:
        return lambda *_, **__: None

    @staticmethod
    def is_active() -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda


def _let_torch_compile() -> None:
    torch.compile = cuda._compile
    helpers.set_driver_to_gpu = lambda: None
    benchmarking.benchmarker.benchmark = lambda *_, **__: 1.0
    empty = partial(torch.empty_strided, device=CUDA)
    torch._C._dynamo.guards._empty_strided_cuda = lambda size, stride, dtype: empty(size, stride, dtype=dtype)
    driver.set_active(Driver())


def not_built() -> dict[str, str]:
    """Return what cannot be built, with the error."""
    cases: dict[str, Callable[[], object]] = {name: partial(_attend, *row) for name, row in ROWS.items()}
    cases["codes and scales"] = _quantize
    _let_torch_compile()
    errors = {}
    for name, build in cases.items():
        try:
            build()
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


def _attend(heads: int, key_heads: int, size: int, longest: int, window: int | None, dtype: torch.dtype) -> None:
    samples = random_samples(TINY_VOCABULARY, prompts=2, group=4, prompt_length=9, longest=longest, shortest=5)
    row = batch_to(collate(samples, seed=0, epoch=0), CUDA).packed
    shapes = [(1, count, len(row.positions), size) for count in (heads, key_heads, key_heads)]
    states = [torch.zeros(shape, device=CUDA, dtype=dtype, requires_grad=True) for shape in shapes]
    kernel = flex_kernel(dtype, size, size, heads // key_heads)
    kernel(*states, block_mask=block_mask(row, window), scale=0.25, enable_gqa=heads > key_heads).sum().backward()


def _quantize() -> None:
    """Raise what keeps the formula from being compiled; its codes are not those of torch, for nothing is launched."""
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        quantize(torch.ones(300, 400, device=CUDA), FP8_TOKEN_BLOCKS)
    [message] = [str(caught.message) for caught in caught_warnings if "dozen kernels" in str(caught.message)]
    if "are not those of torch's operators" not in message:
        raise RuntimeError(message)
