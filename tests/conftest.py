"""What all tests share."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from helpers.runs import FinishedRuns

pytest.register_assert_rewrite("helpers")  # before a test imports them

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported; the machines of the tests have no GPU

# A shell that starts the tests in its background has SIGINT ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> FinishedRuns:
    """Finished small runs, trained once for the whole session."""
    from helpers.runs import FinishedRuns  # torch: seconds that tests without a run need not wait

    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # that of all processes
    return FinishedRuns(base / "finished-runs")
