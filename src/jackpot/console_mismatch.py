"""What `jackpot mismatch` shows while it goes on. Layer 7."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from jackpot.lab.mismatch.run import Listener


@contextmanager
def mismatch_progress(console: Console) -> Iterator[Listener]:
    """A listener that shows what is done now: on one line in a terminal, else a line each."""
    if not console.is_terminal:
        yield lambda text: console.print(Text(text), soft_wrap=True)
        return
    with console.status("starting") as status:
        yield lambda text: status.update(Text(text))
