"""Shows how far a command is: bars in a terminal, single lines in a log."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jackpot.ui.terminal.text import plain, printable

LINE_SECONDS = 5.0  # shortest time between two lines of a log, seconds


@contextmanager
def progress(console: Console) -> Iterator["Bars | Lines"]:
    """Yield an object whose `update` shows the progress while the work goes on."""
    if not console.is_terminal:
        yield Lines(console)
        return
    bars = Bars(console)
    with bars.live:
        yield bars


class Bars:
    """Shows a bar with elapsed and remaining time for each counted thing, and below the bars the newest facts."""

    def __init__(self, console: Console) -> None:
        self._bars = Progress(
            TextColumn("{task.description} {task.completed:,}/{task.total:,}{task.fields[noun]}", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}
        self._facts: dict[str, str] = {}
        self.live = Live(self._frame(), console=console, refresh_per_second=4)

    def update(
        self,
        name: str,
        done: int,
        total: int,
        facts: Mapping[str, str],
        *,
        noun: str = "",
        start: int | None = None,
        is_due: bool = False,
    ) -> None:
        """Show the count of one thing and facts about it; a fact stays until a newer one replaces it.

        Args:
            name: what is counted, for example an iteration or a benchmark.
            facts: name and formatted value.
            noun: what stands behind the count.
            start: count at which this process began; None takes the first `done`.
            is_due: print a line of a log at once; bars always show the newest count.
        """
        if name not in self._tasks:
            begun = done if start is None else start
            self._tasks[name] = self._bars.add_task(printable(name), total=total, completed=begun, noun=noun)
        self._bars.update(self._tasks[name], completed=done)
        self._facts |= facts
        self.live.update(self._frame())

    def _frame(self) -> Group:
        facts = plain("  ".join(f"{name} {value}" for name, value in self._facts.items()), style="dim")
        return Group(self._bars, facts)


class Lines:
    """Prints at most one line every few seconds, unless a line is due at once."""

    def __init__(self, console: Console) -> None:
        self._console, self._last = console, -LINE_SECONDS
        self._begun: dict[str, tuple[float, int]] = {}  # of each name: time of the first call and the count at it

    def update(
        self,
        name: str,
        done: int,
        total: int,
        facts: Mapping[str, str],
        *,
        noun: str = "",
        start: int | None = None,
        is_due: bool = False,
    ) -> None:
        """Print the count, the facts and the time left, if a line is due; arguments as for `Bars.update`."""
        now = time.monotonic()
        begun, first = self._begun.setdefault(name, (now, done))
        if now - self._last < LINE_SECONDS and not is_due:
            return
        self._last = now
        left = [f"{(now - begun) / (done - first) * (total - done):.0f} s left"] if done > first else []
        parts = [f"{name} {done:,}/{total:,}{noun}", *(f"{fact} {value}" for fact, value in facts.items()), *left]
        print_line(self._console, "  ".join(parts))


@contextmanager
def status(console: Console, text: str, every: float = 0.0) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what the command does now: on one changing line in a terminal, else a line each.

    Args:
        text: what is shown first, in a terminal only.
        every: shortest time between two lines of a log, seconds.
    """
    if console.is_terminal:
        with console.status(plain(text)) as shown:
            yield lambda newer: shown.update(plain(newer))
        return
    last = time.monotonic()

    def show(newer: str) -> None:
        nonlocal last
        if time.monotonic() - last >= every:
            last = time.monotonic()
            print_line(console, newer)

    yield show


def print_line(console: Console, text: str) -> None:
    """Print text as it is: no markup, no control characters, no colors for numbers, no line breaks of our own."""
    console.print(plain(text), highlight=False, soft_wrap=True)
