"""What the tests of the module for verl share: the module, and a step of a patched verl."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from helpers.paths import ROOT

PATCH = ROOT / "docs" / "verl.patch"
NEEDED = ("verl", "hydra", "torchdata", "transfer_queue")


@pytest.fixture(scope="session")
def plugin() -> ModuleType:
    """Our module for verl, where verl is installed."""
    pytest.importorskip("verl", reason="verl is not installed here; `make test-adapters` has it")
    return importlib.import_module("jackpot.adapters.verl")


@pytest.fixture(scope="session")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed verl with the patch, which the page has applied."""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        pytest.skip(f"{', '.join(missing)} not installed here; `make test-adapters` has it")

    folder = tmp_path_factory.mktemp("verl")
    [installed] = find_spec("verl").submodule_search_locations
    shutil.copytree(installed, folder / "verl", ignore=shutil.ignore_patterns("__pycache__"))

    command = ["patch", "-p1", "--fuzz=0", "--force", "-i", PATCH]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)

    if not (folder / "verl" / "trainer" / "ppo" / "v1").exists():  # verl 0.8, as the page says
        failed = re.findall(r"saving rejects to file (\S+)", done.stdout)
        assert failed == ["verl/workers/rollout/llm_server.py.rej"] and "4 out of 4 hunks ignored" in done.stdout
        pytest.skip("the data of verl 0.8 passes through flash-attn, which needs a GPU")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="session")
def run(patched: Path) -> Callable[..., dict[str, Any] | str]:
    """Run the steps of step_of_verl.py; return what they left, or the last line of their error."""

    def steps(rollout_is: str, *settings: str, fails: bool = False) -> dict[str, Any] | str:
        script, out = Path(__file__).with_name("step_of_verl.py"), patched / "out.pt"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(patched), *filter(None, sys.path)])}
        command = [sys.executable, script, out, rollout_is, *settings]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
        assert bool(done.returncode) == fails, done.stderr[-4000:]
        return done.stderr.strip().splitlines()[-1] if fails else torch.load(out, weights_only=False)

    return steps


@pytest.fixture(scope="session")
def steps(run: Callable[..., Any]) -> dict[str, Any]:
    """What the steps with OBRS left: of padded and of packed rows, and of the trainer with TransferQueue."""
    return run("jackpot:obrs:lam=1.2:c1=2")
