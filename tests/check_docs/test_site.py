"""The index names every page, the short answers name what exists, and the site builds without a dead link."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

import jackpot
from helpers.paths import ROOT
from jackpot.config.reference import COMMANDS, blocks, settings
from jackpot.ui.cli import app

DOCS = ROOT / "docs"
MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"
METRICS = ("mismatch", "obrs", "correction", "reward", "response", "policy")


def test_every_page_stands_in_the_index_once() -> None:
    linked = re.findall(r"\]\((?:\.\./)?([\w-]+\.md)\)", (DOCS / "index.md").read_text())
    pages = {path.name for path in DOCS.glob("*.md")} - {"index.md"}
    top = {"README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"}
    assert sorted(linked) == sorted(pages | top)


@pytest.mark.parametrize("page", ["faq.md", "glossary.md"])
def test_short_answers_name_what_exists(page: str) -> None:
    text = (DOCS / page).read_text()
    known = {*settings(*COMMANDS), *(key for command in COMMANDS for key in blocks(command))}
    keys = {found for found in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)\b", text) if not found.startswith("jackpot.")}
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


@pytest.mark.slow
@pytest.mark.skipif(not MKDOCS.exists(), reason="there is no .venv-docs here; make test-all makes it")
def test_the_site_builds_with_its_figures_and_every_public_name(tmp_path: Path) -> None:
    """`strict: true` makes every warning an error."""
    done = subprocess.run([MKDOCS, "build", "-d", tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = sum(path.read_text().count("\n```mermaid\n") for path in DOCS.glob("*.md"))
    pages = {path.stem: path.read_text() for path in tmp_path.glob("*.html")}
    assert figures and sum(text.count('<pre class="mermaid">') for text in pages.values()) == figures
    assert [name for name in jackpot.__all__ if f'id="jackpot.{name}"' not in pages["api"]] == []
    assert (tmp_path / "project" / "ARCHITECTURE.html").exists() and not (tmp_path / "site").exists()
