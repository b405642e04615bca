"""What the tests of the adapters of TRL share."""

import importlib
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The adapters, where TRL is installed."""
    pytest.importorskip("trl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield importlib.import_module("jackpot.adapters.trl")
