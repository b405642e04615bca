"""docs/commands.md is what `jackpot --markdown` prints."""

from pathlib import Path

from helpers.commands import jackpot
from helpers.paths import ROOT


def test_the_page_of_commands_is_current(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "commands.md").read_text()
    assert jackpot("--markdown", cwd=tmp_path).stdout == page, "jackpot --markdown > docs/commands.md"
    assert "```\njackpot train RECIPE [KEY=VALUE...] [OPTIONS]\n```" in page
    assert "```\njackpot report RUNS... [OPTIONS]\n```" in page and "| `--all` |" in page
    assert "| `--seeds N` | Number of seeds for each arm. Default 3. |" in page
