"""docs/settings.md is what its generator writes, and docs/renamed.md counts settings and names files that exist."""

import re
import runpy

from helpers.paths import ROOT
from tools.reference_pages import settings_page


def test_the_page_of_settings_is_current() -> None:
    assert (ROOT / "docs" / "settings.md").read_text() == settings_page(), "python -m tools.reference_pages"


def test_the_page_of_old_names_counts_the_settings() -> None:
    count = runpy.run_path(str(ROOT / "benchmarks" / "count_settings.py"))["count_settings"]
    keys, settings = count()
    stated = re.search(r"counts (\d+) keys", (ROOT / "docs" / "renamed.md").read_text())
    assert stated and int(stated[1]) == keys and settings < keys


def test_the_page_of_old_names_leads_to_files_that_exist() -> None:
    table = (ROOT / "docs" / "renamed.md").read_text().partition("\n## Files\n")[2]
    rows = [re.findall(r"`([^`]+)`", line) for line in table.splitlines() if line.startswith("| `")]
    outside = ("benchmarks/", "research/", "tools/")
    files = {name if name.startswith(outside) else f"src/jackpot/{name}" for _, *now in rows for name in now}

    assert len(rows) > 100 and sorted(name for name in files if not (ROOT / name).is_file()) == []
