"""docs/reliability.md names tests that exist and the figures that were measured, which keep the limits."""

import json
import re

from helpers.paths import ROOT, TESTS

PAGE = (ROOT / "docs" / "reliability.md").read_text()
MEASURED = json.loads((ROOT / "docs" / "reliability" / "measured.json").read_text())


def test_every_test_file_of_the_page_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)`", PAGE)
    assert len(named) > 20
    assert [name for name in named if not (TESTS / name).is_file()] == []


def test_the_page_has_the_figures_that_were_measured() -> None:
    memory, equal = MEASURED["memory"], MEASURED["equal_rewards"]
    for figures in (memory, equal):
        assert f"{figures['rss_kb_per_iteration']:.1f} kB" in PAGE and figures["rss_kb_per_iteration"] < 10.0

    first, last = memory["open_files"]
    assert f"the {first} open files stay {last}" in PAGE and first == last
    assert equal["policy_is_unchanged"] and equal["non_finite_steps"] == 0.0 and equal["policy_steps_skipped"] == 500.0

    for name in ("replay", "report"):
        figures = MEASURED[name]
        assert f"| {figures['cpu_seconds']:.1f} | {figures['peak_mib']:.0f} |" in PAGE
    assert f"{MEASURED['replay']['rollouts']:,} rollouts" in PAGE
    assert f"{MEASURED['report']['iterations']:,} iterations of {MEASURED['report']['metrics']} metrics" in PAGE
