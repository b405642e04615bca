"""Makes the site of the repository's own files: the navigation is docs/index.md, and links may leave docs/.

Pages of the top folder are under project/ in the site, and other files that a page links to under source/, as they are.
Nothing is loaded from elsewhere: Mermaid, which draws the figures, is part of the site.
"""

import logging
import os
import re
import sys
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).parents[2]
PROJECT = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "SECURITY.md")
MERMAID = Path(sys.prefix) / "mermaid.min.js"  # the Makefile takes it from the npm package
HISTORY = ("project/CHANGELOG.md",)  # it has every word, and is what nobody searches for
_SCRIPT = "assets/javascripts/mermaid.min.js"
_ANY_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")
_LINK = re.compile(r"(?<!!)" + _ANY_LINK.pattern)  # a picture is none
_log = logging.getLogger("mkdocs.plugins.jackpot")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the navigation: a section for each heading of the index that links to pages.

    Raises:
        PluginError: the environment has no Mermaid.
    """
    if not MERMAID.exists():
        raise PluginError(f"{MERMAID} is missing: `make docs` makes the environment with it, which takes npm")
    if "MIKE_DOCS_VERSION" in os.environ:  # mike builds one version beside others: the page offers them
        config.extra["version"] = {"provider": "mike", "default": "latest"}

    sections = re.split(r"^## ", (ROOT / "docs" / "index.md").read_text(), flags=re.MULTILINE)[1:]
    nav: list[dict] = [{"Index": "index.md"}]
    for section in sections:
        title, _, body = section.partition("\n")
        links = [(text, _page(target)) for text, target, _ in _LINK.findall(body)]
        if links:
            nav.append({title: [{text.strip("`"): page} for text, page in links]})
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the top folder, every file outside of docs/ that a page links to, and Mermaid."""
    files.append(File.generated(config, _SCRIPT, abs_src_path=str(MERMAID)))
    for name in PROJECT:
        files.append(File.generated(config, f"project/{name}", content=_project_page(name)))
    texts = [file.content_string for file in files.documentation_pages()]
    for path in {_outside(target) for text in texts for _, target, _ in _LINK.findall(text)} - {None}:
        if (ROOT / path).is_file() and str(path) not in PROJECT:
            source = str(ROOT / path)
            level = InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, f"source/{path}", abs_src_path=source, inclusion=level))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links that leave docs/ to where their files are in the site; folders stay plain text."""
    if page.file.src_uri in HISTORY:
        page.meta["search"] = {"boost": 0.1}
    up = "../" * (len(PurePosixPath(page.file.src_uri).parts) - 1)

    def moved(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = _outside(target)
        if path is None:
            return match[0]
        if (ROOT / path).is_dir():
            return text
        return f"[{text}]({up}{'project' if str(path) in PROJECT else 'source'}/{path}{anchor})"

    return _LINK.sub(moved, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Load Mermaid on pages with a figure, before the theme would fetch it from elsewhere."""
    if '<pre class="mermaid">' not in html:
        return html
    return f'{html}<script src="{get_relative_url(_SCRIPT, page.url)}"></script>'


def _project_page(name: str) -> str:
    """Return a page of the top folder with its links and pictures as those of a page in docs/ are."""

    def moved(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target:
            return match[0]
        target = f"../{target.removeprefix('docs/')}" if target.startswith("docs/") else f"../../{target}"
        return f"[{text}]({target}{anchor})"

    return _ANY_LINK.sub(moved, (ROOT / name).read_text())


def _outside(target: str) -> PurePosixPath | None:
    """Return the path in the repository of a link that leaves docs/; None for any other link."""
    if target.startswith("../../"):
        return PurePosixPath(target.removeprefix("../../"))
    if target.startswith("../") and not (ROOT / "docs" / target.removeprefix("../")).exists():
        return PurePosixPath(target.removeprefix("../"))
    return None


def _page(target: str) -> str:
    """Return where a Markdown file that docs/index.md links to is in the site."""
    name = target.removeprefix("../")
    return f"project/{name}" if target.startswith("../") else name
