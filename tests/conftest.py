"""What all tests share."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from helpers.runs import FinishedRuns

pytest.register_assert_rewrite("helpers")  # before a test imports them

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported; the machines of the tests have no GPU

# A shell that starts the tests in its background has SIGINT ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what `-m` does not ask for
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that start processes with `process`, where `-m` asks: to find them takes seconds."""
    if "process" not in config.option.markexpr:
        return
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


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A real Chromium; it ends with its file, since Playwright's event loop is in the way of others in the process."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no chromium on this machine; apt-get install chromium")
    playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
