"""The index names every page, the short answers name what exists, and the site builds without a dead link."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import threading
from collections.abc import Callable
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

import jackpot
from helpers.paths import ROOT
from jackpot.config.reference import COMMANDS, blocks, settings
from jackpot.ui.cli import app

if TYPE_CHECKING:
    from playwright.sync_api import Browser

DOCS = ROOT / "docs"
DOCS_PROGRAMS = ROOT / ".venv-docs" / "bin"
FOLDERS = ("benchmarks", "docs", "examples", "research", "src", "tests")
LINKED = (
    "mkdocs.yml",
    *FOLDERS,
    "Dockerfile",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "ARCHITECTURE.md",
    "SECURITY.md",
)
METRICS = ("mismatch", "obrs", "correction", "reward", "response", "policy")
SEARCHED = {  # what a reader types, and where it leads
    "resume": "reliability.html",
    "resume a run": "reliability.html",
    "checkpoint": "reliability.html",
    "hub": "own-problem.html#push-it-to-the-hub",
    "push": "own-problem.html#push-it-to-the-hub",
    "push to hub": "own-problem.html#push-it-to-the-hub",
    "OOM": "faq.html#out-of-memory-oom",
    "out of memory": "faq.html#out-of-memory-oom",
    "NaN": "faq.html#nan-or-an-infinite-loss-or-gradient",
    "multi-node": "distributed.html",
    "LoRA": "own-problem.html#lora-train-an-adapter",
    "vLLM": "vllm.html",
    "install": "project/index.html#install-and-run",
    "reward": "rewards.html",
    "TRL": "trl.html",
    "verl": "frameworks.html#inside-verl",
    "collapse": "my-run-collapses.html",
    "slurm": "distributed.html#slurm",
    "metrics": "metrics.html",
}


class QuietHandler(SimpleHTTPRequestHandler):
    """A server of files that prints nothing."""

    def log_message(self, format: str, *args: object) -> None:
        pass


def needs_site(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test of the built site."""
    is_missing = not (DOCS_PROGRAMS.parent / "ready").exists()
    why = "there is no .venv-docs here; make test-all makes it"
    return pytest.mark.slow(pytest.mark.skipif(is_missing, reason=why)(test))


def test_every_page_stands_in_the_index_once() -> None:
    linked = re.findall(r"\]\((?:\.\./)?([\w-]+\.md)\)", (DOCS / "index.md").read_text())
    pages = {path.name for path in DOCS.glob("*.md")} - {"index.md"}
    top = {"README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"}
    assert sorted(linked) == sorted(pages | top)


def test_short_answers_name_what_exists() -> None:
    text = (DOCS / "faq.md").read_text()
    known = {*settings(*COMMANDS), *(key for command in COMMANDS for key in blocks(command))}
    keys = {name for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)\b", text) if not name.startswith("jackpot.")}
    keys -= {"metrics.jsonl", "events.jsonl", "config.yaml"}

    assert keys and keys - known == set()

    metrics = (DOCS / "metrics.md").read_text()
    assert [name for name in re.findall(rf"`((?:{'|'.join(METRICS)})/\w+)`", text) if f"`{name}`" not in metrics] == []

    commands = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert set(re.findall(r"`jackpot (\w+)", text)) <= commands


def test_the_api_page_has_every_public_name() -> None:
    assert sorted(re.findall(r"^::: jackpot\.(\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)) == jackpot.__all__


def test_the_citation_is_of_the_paper() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["preferred-citation"]["url"].endswith("2602.06107")


def run(*command: str | Path, cwd: Path) -> str:
    """Run a program, and return what it prints."""
    variables = {**os.environ, "PATH": f"{DOCS_PROGRAMS}:{os.environ['PATH']}"}  # mike starts mkdocs
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built. `strict: true` makes every warning an error."""
    folder = tmp_path_factory.mktemp("site")
    run(DOCS_PROGRAMS / "mkdocs", "build", "-d", folder, cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site in two versions, as `make docs-version` makes them, in a repository whose files are links to ours."""
    home = tmp_path_factory.mktemp("versions")
    for name in LINKED:
        (home / name).symlink_to(ROOT / name)
    for command in ("init -q", "config user.name Test", "config user.email test@example.org"):
        run("git", *command.split(), cwd=home)
    run("git", "commit", "-q", "--allow-empty", "-m", "start", cwd=home)

    mike = DOCS_PROGRAMS / "mike"
    run(mike, "deploy", "--update-aliases", "0.1", "latest", cwd=home)
    run(mike, "deploy", "--update-aliases", "0.2", "latest", cwd=home)
    run(mike, "set-default", "latest", cwd=home)
    run("git", "worktree", "add", "-q", "pages", "gh-pages", cwd=home)
    return home / "pages"


@needs_site
def test_the_site_builds_with_its_figures_and_every_public_name(site: Path) -> None:
    figures = sum(path.read_text().count("\n```mermaid\n") for path in DOCS.glob("*.md"))
    pages = {path.stem: path.read_text() for path in site.glob("*.html")}
    assert figures and sum(text.count('<pre class="mermaid">') for text in pages.values()) == figures
    assert [name for name in jackpot.__all__ if f'id="jackpot.{name}"' not in pages["api"]] == []
    assert (site / "project" / "ARCHITECTURE.html").exists() and not (site / "site").exists()


@needs_site
def test_the_search_finds_the_page_for_usual_words(site: Path) -> None:
    """The first hit, by the search of the site itself."""
    driver = pytest.importorskip("playwright._impl._driver", reason="playwright, which brings node, is not installed")
    [worker] = site.glob("assets/javascripts/workers/search.*.js")
    node, _ = driver.compute_driver_executable()
    script, index = DOCS.parent / "tests" / "check_docs" / "ask_search.js", site / "search" / "search_index.json"

    hits_of_words = json.loads(run(node, script, worker, index, *SEARCHED, cwd=site))
    assert {word: (hits or [None])[0] for word, hits in zip(SEARCHED, hits_of_words, strict=True)} == SEARCHED


@needs_site
def test_versions_figures_and_search_need_nothing_else(versions: Path, browser: Browser) -> None:
    """In a browser, which asks no other host for anything."""
    handler = functools.partial(QuietHandler, directory=str(versions))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, browser.new_context() as context:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}/"
        page = context.new_page()
        elsewhere: list[str] = []
        page.on("request", lambda request: elsewhere.append(request.url) if here not in request.url else None)

        page.goto(f"{here}0.1/distributed.html")
        page.wait_for_function("document.querySelectorAll('div.mermaid').length == 2")
        assert page.locator("pre.mermaid").count() == 0
        assert min(page.locator("div.mermaid").nth(index).bounding_box()["height"] for index in range(2)) > 50
        page.wait_for_selector(".md-version__link", state="attached")
        links = page.locator(".md-version__link").evaluate_all("links => links.map(link => link.href)")
        assert links == [f"{here}0.2/", f"{here}0.1/"]

        page.locator("input[name=query]").fill("resume")
        page.wait_for_selector(".md-search-result__link")
        first = page.locator(".md-search-result__link").first.get_attribute("href")
        assert first and first.startswith(f"{here}0.1/reliability.html")

        page.goto(here)
        page.wait_for_url(f"{here}latest/")
        server.shutdown()
    assert elsewhere == []
