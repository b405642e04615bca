"""Makes the site of the repository's own files: the navigation is docs/index.md, and links may leave docs/.

Pages of the top folder are under project/ in the site, and other files that a page links to under source/, as they are.
"""

import logging
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PROJECT = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "ARCHITECTURE.md")
_ANY_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)]*)?\)")
_LINK = re.compile(r"(?<!!)" + _ANY_LINK.pattern)  # a picture is none
_log = logging.getLogger("mkdocs.plugins.jackpot")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the navigation: a section for each heading of the index that links to pages."""
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
    """Add the pages of the top folder, and every file outside of docs/ that a page links to."""
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
