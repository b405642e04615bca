"""Gives every process of Python the virtual GPU that VIRTUAL_GPU names, the path of the built device."""

import os

if os.environ.get("VIRTUAL_GPU"):
    from virtual_gpu import cuda, kernels, nccl  # noqa: F401
