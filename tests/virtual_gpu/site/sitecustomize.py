"""Gives a process of Python that imports torch the virtual GPU, if this folder and that of the built device are on its
PYTHONPATH."""

import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

DEVICE = PathFinder.find_spec("virtual_device")  # now: multiprocessing gives its children another path
assert DEVICE
assert DEVICE.loader


class Finder:
    """Loads the device before torch, which looks for a GPU when it is imported, and `virtual_gpu` behind it."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name != "torch":
            return None
        spec = PathFinder.find_spec(name)
        assert spec
        assert spec.loader
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            sys.modules["virtual_device"] = device = module_from_spec(DEVICE)
            DEVICE.loader.exec_module(device)
            load(module)
            from virtual_gpu import cuda, kernels, nccl  # noqa: F401

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
