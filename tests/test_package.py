"""What the package ships is complete, and its page on an index has no link into the repository's folders."""

import re
import shutil
import subprocess
import sys
import tomllib
from email.parser import Parser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

import jackpot
from helpers.paths import ROOT

PACKAGE = Path(jackpot.__file__).parent


def test_every_data_file_of_the_package_is_shipped():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["jackpot"]
    shipped_files = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    data_files = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}

    assert data_files
    assert data_files <= shipped_files
    assert {"policy", "rollout_model"} <= {path.parent.name for path in shipped_files}


def test_the_package_has_every_public_name_and_a_version():
    assert set(jackpot.__all__) <= set(dir(jackpot))
    assert jackpot.__version__
    assert {*jackpot._MODULES, "obrs"} == set(jackpot.__all__)
    assert (PACKAGE / "py.typed").is_file()


def links(markdown: str) -> list[str]:
    """Return the targets of all links and pictures."""
    inline = [token.children or [] for token in MarkdownIt("commonmark").parse(markdown) if token.type == "inline"]
    leaves = [leaf for children in inline for leaf in children]
    return [str(leaf.attrs[name]) for leaf in leaves for name in ("href", "src") if name in leaf.attrs]


@pytest.mark.parametrize("source", [None, "https://example.org/us/jackpot"])
def test_the_page_on_an_index_has_no_relative_link(source: str | None, tmp_path: Path) -> None:
    """The build backend makes the metadata from the top files: without a repository's address, and with one."""
    for name in ("setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    settings = re.sub(r"\nSource = .*", "", (ROOT / "pyproject.toml").read_text())
    head, urls = settings.split("\nPaper = ")
    source_line = f'\nSource = "{source}"' if source else ""
    (tmp_path / "pyproject.toml").write_text(f"{head}{source_line}\nPaper = {urls}")

    (tmp_path / "src" / "jackpot").mkdir(parents=True)
    backend = "from setuptools import build_meta; print(build_meta.prepare_metadata_for_build_wheel('.'))"

    build = subprocess.run([sys.executable, "-c", backend], cwd=tmp_path, capture_output=True, text=True, check=True)
    metadata = tmp_path / build.stdout.splitlines()[-1] / "METADATA"

    message = Parser().parsestr(metadata.read_text())
    assert message["Description-Content-Type"] == "text/markdown"

    page, readme = str(message.get_payload()), (ROOT / "README.md").read_text()
    absolute_links = [target for target in links(readme) if "://" in target]
    relative_links = [target for target in links(readme) if "://" not in target]
    assert len(absolute_links) == 1
    assert len(relative_links) > 30
    if source is None:
        assert links(page) == absolute_links
        return

    new_links = {target for target in links(page) if target not in absolute_links}
    assert len(links(page)) == len(links(readme))
    assert all(target.startswith(source) for target in new_links)

    tag = f"v{tomllib.loads(settings)['project']['version']}"
    for target in relative_links:
        path, _, anchor = target.partition("#")
        assert (ROOT / path).exists(), target
        kind = "raw" if path.endswith(".png") else "blob"
        expected_link = f"{source}/{kind}/{tag}/{target}" if path else f"{source}#{anchor}"
        assert expected_link in new_links

    assert f"git clone {source} jackpot" in page
    assert "URL-OF-THIS" not in page
