"""What `jackpot replay` prints. Layer 7."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from jackpot.console_tables import show_tables
from jackpot.lab.replay.replay import Replay
from jackpot.report.charts import Section
from jackpot.report.replay import facts, replay_sections


@contextmanager
def replay_progress(console: Console) -> Iterator[Callable[[int], None]]:
    """A listener that shows how many responses have been read."""
    with console.status("reading") as status:

        def listen(responses: int) -> None:
            status.update(f"read {responses:,} responses")

        yield listen


def show_replay(console: Console, found: Replay) -> None:
    """The run, every correction, what is missing, and at the end the answer."""
    show_tables(console, [Section(title="", intro="", items=(facts(found),)), *replay_sections(found).values()])
    for text in found.left_out:
        console.print(Text(f"Left out: {text}"), highlight=False)
    for text in found.problems:
        console.print(Text(f"Not read: {text}"), highlight=False)
    if found.unreadable > len(found.problems):
        console.print(f"Not read: {found.unreadable:,} in all", highlight=False)
    console.print(Text(found.answer.sentence, style="bold"), highlight=False)
