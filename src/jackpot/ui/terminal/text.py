"""Makes text of models, servers, files and paths safe to print: no control characters, no markup."""

import logging

from rich.text import Text

_KEPT = "\n\t"
_CONTROLS = {  # C0, DEL and C1, with which text moves the cursor, clears the screen or renames the window
    code: f"⟨{code:02X}⟩" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in _KEPT
}


def printable(text: str) -> str:
    r"""Replace control characters but line breaks and tabs by their codes.

    >>> printable("\x1b[2J")
    '⟨1B⟩[2J'
    """
    return text.translate(_CONTROLS)


def plain(text: str, style: str = "") -> Text:
    """Return text to print as it is: `printable`, and `[bold]` in it is not read as markup."""
    return Text(printable(text), style=style)


class PrintableFormatter(logging.Formatter):
    """Formats log messages, which quote servers and paths, without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the message as `printable` text."""
        return printable(super().format(record))
