"""docs/settings.md is what `jackpot config --markdown` prints."""

from helpers.paths import ROOT
from jackpot.ui.commands.config import settings_page


def test_the_page_of_settings_is_current() -> None:
    assert (ROOT / "docs" / "settings.md").read_text() == settings_page(), (
        "jackpot config --markdown > docs/settings.md"
    )
