"""A real Chromium that may not load anything, and pages to open in it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from helpers.folders import run_folder, save_tokens, write_lines
from helpers.paths import ROOT
from helpers.runs import FinishedRuns, read_lines
from jackpot.analysis.compare.comparison import compare
from jackpot.analysis.compare.summary import summarize
from jackpot.ui.report.report import write_report
from jackpot.ui.results import write_results
from jackpot.ui.views.comparison import comparison_sections

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Request

Open = Callable[..., Any]  # gives a Page


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Open a file; at the end there must have been no script error and no request but for files."""
    errors: list[str] = []
    requests: list[str] = []
    contexts = []

    def note(request: Request) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            requests.append(request.url)

    def open_page(
        path: Path,
        *,
        dark: bool = False,
        touch: bool = False,
        width: int = 1400,
        height: int = 1000,
        state: str = "",
    ) -> Page:
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if dark else "light",
            has_touch=touch,
            is_mobile=touch,
            offline=True,
        )
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("request", note)
        page.goto(f"{path.as_uri()}{state}")
        page.wait_for_function("NUMBERS.length > 0")
        if page.locator("#tokens").count():
            page.wait_for_function("view.rows !== null")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert errors == []
    assert requests == []


@pytest.fixture(scope="session")
def trained(finished_run: FinishedRuns, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two arms that have trained, one of them with two seeds, of which the second is made up."""
    folder = tmp_path_factory.mktemp("runs")
    finished_run.copy(folder / "none-seed0", "iterations=2", arm="none")
    first_run = finished_run.copy(folder / "obrs-seed0")

    second_run = shutil.copytree(first_run, folder / "obrs-seed1", symlinks=True)
    settings = (first_run / "config.yaml").read_text()
    (second_run / "config.yaml").write_text(re.sub(r"^seed: 0$", "seed: 1", settings, flags=re.MULTILINE))
    other_lines = [
        {name: value * 0.75 if isinstance(value, float) else value for name, value in line.items()}
        for line in read_lines(first_run)
    ]
    write_lines(second_run, other_lines)
    return folder


@pytest.fixture(scope="session")
def report(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of these three runs."""
    return write_report([trained], tmp_path_factory.mktemp("page") / "report.html").path


ODD = ["</script>", "<img src=x onerror=hacked=1>", "\n", "  ", "Ġthe", "Ã©", "\u202e", "&amp;", "中文", "", "\x07"]


@pytest.fixture(scope="session")
def odd_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens and a prompt that try to be markup, and a tool's token at position 3."""
    folder = run_folder(tmp_path_factory.mktemp("odd"), [{"obrs/acceptance": 0.9}])
    prompts = ["<script>hacked = 1</script>", "<b>bold</b>\nsecond line"]
    save_tokens(folder, 1, [ODD, ODD[::-1]], prompts=prompts, tool=3)
    return write_report([folder]).path


@pytest.fixture(scope="session")
def huge_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100,000 tokens at one iteration, in 40 responses."""
    folder = run_folder(tmp_path_factory.mktemp("huge"), [{"obrs/acceptance": 0.9}])
    words = ["a", "longer", "word", "and", "\n", "x", "=", "12", "therefore", "."]
    responses = [
        [words[(7 * position + position // 11 + index) % 10] for position in range(2500)] for index in range(40)
    ]
    save_tokens(folder, 1, responses)
    return write_report([folder]).path


@pytest.fixture(scope="session")
def long_report(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 5,000 iterations: the lines of a short one again and again, each time a little different."""
    folder = tmp_path_factory.mktemp("long") / "run"
    shutil.copytree(trained / "obrs-seed0", folder, symlinks=True)
    first_line, *other_lines = read_lines(folder)
    lines = [first_line]
    for iteration in range(1, 5001):
        scale = 1.0 + 0.2 * (iteration * 0.618034 % 1.0)
        line = other_lines[iteration % len(other_lines)]
        values = {name: value * scale if isinstance(value, float) else value for name, value in line.items()}
        lines.append(values | {"iteration": iteration})

    write_lines(folder, lines)
    settings = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(re.sub(r"^iterations: \d+$", "iterations: 5000", settings, flags=re.MULTILINE))
    return write_report([folder]).path


@pytest.fixture(scope="session")
def sick_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with findings and without saved tokens."""
    lines = [
        {"eval/policy_accuracy": 0.5 - 0.05 * iteration, "obrs/acceptance": 0.2, "policy/entropy": 1.0}
        for iteration in range(9)
    ]
    return write_report([run_folder(tmp_path_factory.mktemp("sick"), lines)]).path


@pytest.fixture(scope="session")
def comparison_page(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of `jackpot compare`."""
    runs = [summarize(folder, folder.name.split("-")[0]) for folder in sorted(trained.glob("*-seed*"))]
    sections = comparison_sections(compare(runs), runs)
    return write_results(tmp_path_factory.mktemp("comparison"), "comparison", "jackpot compare", sections, {})[0]


@pytest.fixture(scope="session")
def axe() -> str:
    """The script of axe-core."""
    path = ROOT / ".venv-axe" / "node_modules" / "axe-core" / "axe.min.js"
    if not path.is_file():
        pytest.skip("axe-core is not installed; make .venv-axe/ready")
    return path.read_text()
