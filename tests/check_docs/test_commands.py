"""docs/commands.md is what `python -m tools.reference_pages` writes."""

from helpers.paths import ROOT
from tools.reference_pages import commands_page


def test_the_page_of_commands_is_current() -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    assert page == commands_page(), "python -m tools.reference_pages"
    assert "```\njackpot train RECIPE [KEY=VALUE...] [OPTIONS]\n```" in page
    assert "```\njackpot report RUNS... [OPTIONS]\n```" in page and "| `--all` |" in page
    assert "| `--seeds N` | Number of seeds for each arm. Default 3. |" in page
