"""What the tests of the adapters of TRL share."""

import importlib
from types import ModuleType

import pytest

from helpers.trl_async import on_the_cpu


@pytest.fixture(scope="session")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The adapters, where TRL is installed."""
    pytest.importorskip("trl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield importlib.import_module("jackpot.adapters.trl")


@pytest.fixture(scope="session")
def asynchronous(adapter: ModuleType) -> ModuleType:
    """Our module, and TRL made to run on a CPU."""
    pytest.importorskip("trl.experimental.async_grpo.packing", reason="this TRL has another asynchronous trainer")
    from trl.experimental.async_grpo import async_grpo_trainer, async_rollout_worker, packing

    from jackpot.adapters.trl import asynchronous

    with pytest.MonkeyPatch.context() as patch:
        on_the_cpu(patch, packing, async_grpo_trainer, async_rollout_worker)
        yield asynchronous
