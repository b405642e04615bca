"""Where models compute on a machine without a GPU: on the CPU, told where a GPU may be meant, refused where it is."""

import warnings

import pytest
import torch

from jackpot.core.errors import ConfigError
from jackpot.models.device import pick_device


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """Let torch find no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_a_torch_for_cuda_that_finds_no_gpu_is_told(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.warns(UserWarning, match=r"built for CUDA 13\.0 but finds no GPU.* driver may be too old"):
        assert pick_device("auto").type == "cpu"


@pytest.mark.parametrize(("setting", "cuda"), [("auto", None), ("cpu", "13.0")])
def test_a_cpu_that_is_meant_is_taken_in_silence(setting, cuda, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with warnings.catch_warnings(action="error"):
        assert pick_device(setting).type == "cpu"


def test_cuda_without_a_gpu_is_refused():
    with pytest.raises(ConfigError, match="device is cuda, but torch finds no GPU"):
        pick_device("cuda")
