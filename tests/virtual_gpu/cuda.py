"""The virtual GPU of this process: `cuda` is a device once this is imported, which must be before torch.

VIRTUAL_GPU is the path of the built device, VIRTUAL_GPUS the number of GPUs, one if it is not set. `waits` counts what
makes the host wait, with the lines of the project that ask for it.
"""

import importlib.util
import os
import sys
import tempfile
import types
from collections import Counter
from pathlib import Path
from typing import Any

if "torch" in sys.modules:
    raise ImportError("the virtual GPU is imported after torch, which has looked for a GPU by then")

_spec = importlib.util.spec_from_file_location("virtual_device", os.environ["VIRTUAL_GPU"])
assert _spec and _spec.loader
device: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(device)

import torch  # noqa: E402

CAPABILITY, MEMORY = (9, 0), 80 * 2**30


class Waits:
    """Counts what stops the host until the device is done ("wait"), and pinned memory that is written too early
    ("hazard"), each by what it is and where it is asked for."""

    def __init__(self) -> None:
        self.seen: Counter[tuple[str, str]] = Counter()

    def note(self, kind: str, what: str) -> None:
        frame, lines = sys._getframe(), []
        while frame and len(lines) < 3:
            path = frame.f_code.co_filename
            if "/jackpot/" in path:
                lines.append(f"{path.rpartition('/jackpot/')[2]}:{frame.f_lineno}")
            frame = frame.f_back
        self.seen[kind, f"{what} at {' < '.join(lines)}"] += 1

    def take(self, kind: str = "wait") -> list[str]:
        """Return what of this kind has been seen, and forget it."""
        lines = [f"{count} x {what}" for (key, what), count in self.seen.items() if key == kind]
        self.seen = Counter({key: count for key, count in self.seen.items() if key[0] != kind})
        return lines

    def count(self, kind: str = "wait") -> int:
        return sum(count for key, count in self.seen.items() if key[0] == kind)


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
        self._before = device.current_stream()
        if self._stream is not None:
            device.set_stream(self._stream.stream_id)

    def __exit__(self, *_: object) -> None:
        device.set_stream(self._before)


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
    before = device.current_device()
    if index >= 0:
        device.set_device(index)
    return before


FUNCTIONS = {
    "is_available": lambda: bool(_visible()),
    "device_count": lambda: len(_visible()),
    "is_initialized": lambda: True,
    "init": lambda: None,
    "_lazy_init": lambda: None,
    "current_device": device.current_device,
    "set_device": lambda name: device.set_device(_index(name)),
    "_exchange_device": _exchange,
    "_maybe_exchange_device": _exchange,
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

_resize = torch.UntypedStorage.resize_


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _resize_storage(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    if storage.device.type != "cuda":
        return _resize(storage, size)
    device.resize_storage(_bytes_of(storage), size)
    return storage


def _share(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    """Copy the memory into a file, for a process that opens it: like CUDA IPC, but that later writes are not seen."""
    with tempfile.NamedTemporaryFile(prefix="virtual-gpu-", delete=False) as file:
        file.write(device.host_alias(_bytes_of(storage)).numpy().tobytes())
    return storage.device.index, file.name.encode(), storage.nbytes(), 0, b"counter", 0, b"event", True


def _open_shared(index: int, handle: bytes, size: int, *_: Any) -> torch.UntypedStorage:
    memory = torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", index))
    path = Path(handle.decode())
    device.host_alias(memory).numpy()[:] = list(path.read_bytes())
    path.unlink()
    return memory.untyped_storage()


_give_torch_its_gpu()
torch.UntypedStorage.resize_ = _resize_storage
torch.UntypedStorage._share_cuda_, torch.UntypedStorage._new_shared_cuda = _share, staticmethod(_open_shared)

_compile = torch.compile


def _compile_without_inductor(*arguments: Any, **options: Any) -> Any:
    """Compile by tracing alone: inductor's kernels need a real GPU. With it flex attention runs."""
    return _compile(*arguments, **(options | {"backend": "eager"}))


torch.compile = _compile_without_inductor
