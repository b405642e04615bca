"""docs/settings.md is what its generator writes."""

from helpers.paths import ROOT
from tools.reference_pages import settings_page


def test_the_page_of_settings_is_current() -> None:
    assert (ROOT / "docs" / "settings.md").read_text() == settings_page(), "python -m tools.reference_pages"
