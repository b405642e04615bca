"""The virtual GPU of this process: with it `cuda` is a device. sitecustomize imports it as soon as torch is there.

VIRTUAL_GPUS is the number of GPUs, one if it is not set; in the file VIRTUAL_GPU_HAZARDS processes note hazards.
`waits` counts what makes the host wait, with the lines of the project that ask for it.
"""

import os
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import virtual_device as device

CAPABILITY, MEMORY = (9, 0), 80 * 2**30
STAND_INS = ("/triton/runtime/interpreter", "/_higher_order_ops/flex_attention")  # for kernels, which would not wait


class Waits:
    """Counts what stops the host until the device is done, by what it is and where it is asked for."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def note(self, kind: str, what: str) -> None:
        """Note a wait, or as a "hazard" that pinned memory was written before its copy was done."""
        frame, lines = sys._getframe(), []
        while frame:
            path = frame.f_code.co_filename
            if any(name in path for name in STAND_INS):
                return
            if "/jackpot/" in path and len(lines) < 3:
                lines.append(f"{path.rpartition('/jackpot/')[2]}:{frame.f_lineno}")
            frame = frame.f_back
        text = f"{what} at {' < '.join(lines)}"
        if kind == "wait":
            self._counts[text] += 1
        else:
            with Path(os.environ["VIRTUAL_GPU_HAZARDS"]).open("a") as file:
                file.write(text + "\n")

    def take(self) -> Counter[str]:
        """Return what has been seen, and forget it."""
        counts, self._counts = self._counts, Counter()
        return counts


waits = Waits()
device.set_reporter(waits.note)


class Stream(torch.Stream):
    """A stream in name: all work is done when it is asked for."""

    def __new__(cls, device: Any = None, priority: int = 0, stream_id: int | None = None, **_: Any) -> "Stream":
        if stream_id is None:
            return super().__new__(cls, device=torch.device("cuda", _index(device)), priority=priority)
        return super().__new__(cls, stream_id=stream_id, device_index=_index(device), device_type=1)


class Event(torch.Event):
    """An event in name."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> "Event":
        return super().__new__(cls, device=torch.device("cuda"), enable_timing=enable_timing, blocking=blocking)


class StreamContext:
    """Makes a stream the current one in the body."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._last_stream = device.current_stream()
        if self._stream is not None:
            device.set_stream(self._stream.stream_id)

    def __exit__(self, *_: object) -> None:
        device.set_stream(self._last_stream)


class CUDAGraph:
    """Operators that were recorded, to be run again on the same memory."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._graph = device.Graph()

    def capture_begin(self, *_: Any, **__: Any) -> None:
        device.begin_capture(self._graph)

    def capture_end(self) -> None:
        device.end_capture()

    def replay(self) -> None:
        device.replay(self._graph)


def _index(name: Any) -> int:
    if isinstance(name, int):
        return name
    index = None if name is None else torch.device(name).index
    return device.current_device() if index is None else index


def _visible() -> list[str]:
    """Return the GPUs of the machine that this process sees."""
    gpus = [str(index) for index in range(int(os.environ.get("VIRTUAL_GPUS", "1")))]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return gpus if visible is None else [gpu for gpu in visible.split(",") if gpu in gpus]


def _properties(name: Any = None) -> types.SimpleNamespace:
    uuid = f"GPU-virtual-{_visible()[_index(name)]}"
    return types.SimpleNamespace(
        name="Virtual H100", major=9, minor=0, total_memory=MEMORY, multi_processor_count=132, uuid=uuid
    )


def _exchange(index: int) -> int:
    last_device = device.current_device()
    if index >= 0:
        device.set_device(index)
    return last_device


FUNCTIONS = {
    "is_available": lambda: bool(_visible()),
    "device_count": lambda: len(_visible()),
    "is_initialized": lambda: True,
    "init": lambda: None,
    "_lazy_init": lambda: None,
    "current_device": device.current_device,
    "set_device": lambda name: device.set_device(_index(name)),
    "_exchange_device": _exchange,
    "_maybe_exchange_device": lambda index: _exchange(index),  # torch.compile asks for two functions
    "synchronize": lambda name=None: device.wait("torch.cuda.synchronize"),
    "empty_cache": lambda: None,
    "stream": StreamContext,
    "set_stream": lambda stream: device.set_stream(stream.stream_id),
    "current_stream": lambda name=None: Stream(stream_id=device.current_stream()),
    "default_stream": lambda name=None: Stream(stream_id=0),
    "graph_pool_handle": lambda: (0, 1),
    "is_current_stream_capturing": device.is_capturing,
    "get_device_capability": lambda name=None: CAPABILITY,
    "get_device_properties": _properties,
    "get_device_name": lambda name=None: _properties(name).name,
    "mem_get_info": lambda name=None: (MEMORY - device.allocated(), MEMORY),
    "memory_allocated": lambda name=None: device.allocated(),
    "memory_reserved": lambda name=None: device.allocated(),
    "max_memory_allocated": lambda name=None: device.peak(),
    "reset_peak_memory_stats": lambda name=None: device.reset_peak(),
    "manual_seed_all": lambda seed: None,
    "get_rng_state": lambda name=None: torch.zeros(16, dtype=torch.uint8),
    "set_rng_state": lambda state, name=None: None,
    "is_bf16_supported": lambda including_emulation=True: True,
    "Stream": Stream,
    "Event": Event,
    "CUDAGraph": CUDAGraph,
}


def _give_torch_its_gpu() -> None:
    for name, function in FUNCTIONS.items():
        setattr(torch.cuda, name, function)
    torch.cuda._initialized = True
    torch._C._cuda_getDeviceCount = FUNCTIONS["device_count"]
    torch._C._cuda_getDevice = device.current_device
    torch._C._cuda_setDevice = device.set_device
    torch._C._cuda_isCurrentStreamCapturing = device.is_capturing
    torch._C._cuda_getCurrentRawStream = lambda index: device.current_stream()
    torch._C._host_emptyCache = lambda: None
    torch._C._cuda_isInBadFork = lambda: False
    torch.backends.cuda.is_built = lambda: True
    torch.version.cuda = "13.0"
    device.set_device_count(len(_visible()))


# Storages, for FSDP and for processes that open each other's memory

_resize, _clone = torch.UntypedStorage.resize_, torch.UntypedStorage.clone


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _resize_storage(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    if storage.device.type != "cuda":
        return _resize(storage, size)
    device.resize_storage(_bytes_of(storage), size)
    return storage


def _clone_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return _bytes_of(storage).clone().untyped_storage() if storage.device.type == "cuda" else _clone(storage)


_give_torch_its_gpu()
torch.UntypedStorage.resize_, torch.UntypedStorage.clone = _resize_storage, _clone_storage

_compile, traces = torch.compile, False


def _compile_without_inductor(function: Any, **options: Any) -> Any:
    """Compile by tracing alone where `traces` says so: inductor's kernels need a real GPU."""
    return _compile(function, **(options | {"backend": "eager"})) if traces else _cannot_compile


def _cannot_compile(*_: Any, **__: Any) -> None:
    raise RuntimeError("the virtual GPU has no inductor")


torch.compile = _compile_without_inductor
