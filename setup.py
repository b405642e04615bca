"""The long description of the package: README.md, with links that work on a package index.

An index shows the page alone. Where `[project.urls]` of pyproject.toml has a `Source`, a link into the repository
becomes one to that site, as of the tag of this version, and a link to a heading of the page becomes one there. Without
a `Source` the text of such a link stays, and a picture goes.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:)([^)\s]+)\)")  # (?!\w+:): what names its host stays


def page(readme: str, source: str | None, version: str) -> str:
    """Return a README whose relative links and pictures are absolute, or gone where there is no `source`."""

    def absolute(link: re.Match[str]) -> str:
        mark, text, target = link.groups()
        if not source:
            return "" if mark else text

        kind = "raw" if mark else "blob"
        where = target if target.startswith("#") else f"/{kind}/v{version}/{target}"
        return f"{mark}[{text}]({source}{where})"

    code = r"(^```.*?^```$)"  # stays as it is
    parts = re.split(code, readme, flags=re.DOTALL | re.MULTILINE)
    parts[::2] = [_LINK.sub(absolute, part) for part in parts[::2]]
    return "".join(parts).replace("URL-OF-THIS-REPOSITORY", source or "URL-OF-THIS-REPOSITORY")


if __name__ == "__main__":
    folder = Path(__file__).parent
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    text = page((folder / "README.md").read_text(), project["urls"].get("Source"), project["version"])
    setup(long_description=text, long_description_content_type="text/markdown")
