"""What `jackpot mismatch` shows. Layer 7."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from jackpot.console_tables import show_tables
from jackpot.lab.mismatch.run import Found, Listener
from jackpot.report.charts import Section


@contextmanager
def mismatch_progress(console: Console) -> Iterator[Listener]:
    """A listener that shows what is done now: on one line in a terminal, else a line each."""
    if not console.is_terminal:
        yield lambda text: console.print(Text(text), soft_wrap=True)
        return
    with console.status("starting") as status:
        yield lambda text: status.update(Text(text))


def show_mismatch(console: Console, found: Found, sections: Mapping[str, Section]) -> None:
    """All tables of one pair; of several those that lay them side by side."""
    whole = {"responses", "lengths"} if len(found.pairs) > 1 else sections.keys()
    show_tables(console, [section for name, section in sections.items() if name in whole])
