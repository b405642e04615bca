"""`jackpot config`: what every setting is."""

import typer
from rich.console import Console

from jackpot.ui.terminal.config import settings_page, show_setting, show_settings


def config(key: str | None, markdown: bool) -> None:
    """Print one setting or block, or a table of all, or the page docs/settings.md."""
    if markdown:
        typer.echo(settings_page(), nl=False)
    elif key:
        show_setting(Console(), key)
    else:
        show_settings(Console())
