"""What all tests share."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from helpers.runs import FinishedRuns

pytest.register_assert_rewrite("helpers")  # before a test imports them

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported; the machines of the tests have no GPU

# A shell that starts the tests in its background has SIGINT ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what `-m` does not ask for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that start processes with `process`."""
    from helpers.processes import starts_processes  # after the line above that has its asserts rewritten

    for item in items:
        if isinstance(item, pytest.Function):
            name = item.originalname or item.name
            if starts_processes(item.path, Path(__file__).parent, name, item.fixturenames):
                item.add_marker("process")


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRuns:
    """Finished small runs, trained once for the whole session."""
    from helpers.runs import FinishedRuns  # torch: seconds that tests without a run need not wait

    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # that of all processes
    return FinishedRuns(base / "finished-runs")
