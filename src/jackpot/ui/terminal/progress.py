"""Shows how far a command is: bars in a terminal, single lines in a log."""

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jackpot.core.stages import listening
from jackpot.ui.terminal.output import plain, print_line, printable

LINE_SECONDS = 5.0  # shortest time between two lines of a log, seconds


@contextmanager
def progress(console: Console) -> Iterator["Bars | Lines"]:
    """Yield an object whose `update` shows the progress while the work goes on; it shows stages too."""
    if not console.is_terminal:
        lines = Lines(console)
        with listening(lines.stage):
            yield lines
        return
    bars = Bars(console)
    with bars.live, listening(bars.stage):
        yield bars
        bars.stage("")  # the last frame stays on the screen


class Bars:
    """Shows a bar with the time for each counted thing, and below the bars the newest facts and the stage.

    Lines that are due stay above the bars.
    """

    def __init__(self, console: Console) -> None:
        self._bars = Progress(
            TextColumn("{task.description} {task.completed:,}/{task.total:,}{task.fields[noun]}", markup=False),
            BarColumn(bar_width=16),
            TextColumn("{task.percentage:.0f}%"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=console,
        )
        self._console = console
        self._tasks: dict[str, TaskID] = {}
        self._facts: dict[str, str] = {}
        self._stage = ""
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
        lasting: Collection[str] | None = None,
    ) -> None:
        """Show the count of one thing and facts about it; a fact stays until a newer one replaces it.

        Args:
            name: what is counted, for example an iteration or a benchmark.
            facts: name and formatted value.
            noun: what stands behind the count.
            start: count at which this process began; None takes the first `done`.
            is_due: print a line that stays, in a log at once; bars always show the newest count.
            lasting: names of the facts in the line that stays above the bars, and only there; None: all.
        """
        if name not in self._tasks:
            begun = done if start is None else start
            self._tasks[name] = self._bars.add_task(printable(name), total=total, completed=begun, noun=noun)
        self._bars.update(self._tasks[name], completed=done)
        if is_due:
            kept = {fact: value for fact, value in facts.items() if lasting is None or fact in lasting}
            facts = {fact: value for fact, value in facts.items() if fact not in kept}
            print_line(self._console, _line(f"{name} {done:,}/{total:,}{noun}", kept))
        self._facts |= facts
        self.live.update(self._frame())

    def stage(self, text: str) -> None:
        """Show what is done now."""
        self._stage = text
        self.live.update(self._frame())

    def _frame(self) -> Group:
        below = ("  ".join(f"{name} {value}" for name, value in self._facts.items()), self._stage)
        return Group(self._bars, *(plain(text, style="dim") for text in below if text))


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
        lasting: Collection[str] | None = None,
    ) -> None:
        """Print the count, the facts and the time left, if a line is due; arguments as for `Bars.update`."""
        now = time.monotonic()
        begun, first = self._begun.setdefault(name, (now, done))
        if now - self._last < LINE_SECONDS and not is_due:
            return
        self._last = now
        left = [f"{(now - begun) / (done - first) * (total - done):.0f} s left"] if done > first else []
        print_line(self._console, "  ".join([_line(f"{name} {done:,}/{total:,}{noun}", facts), *left]))

    def stage(self, text: str) -> None:
        """Print what is done now, as long as nothing is counted."""
        if not self._begun:
            print_line(self._console, text)


def _line(count: str, facts: Mapping[str, str]) -> str:
    return "  ".join([count, *(f"{fact} {value}" for fact, value in facts.items())])


@contextmanager
def status(console: Console, text: str, every: float = 0.0) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what the command does now: on one changing line in a terminal, else a line each.

    Args:
        text: what is shown first, in a terminal only; stages that begin replace it.
        every: shortest time between two lines of a log, seconds.
    """
    if console.is_terminal:
        with console.status(plain(text)) as shown, listening(lambda newer: shown.update(plain(newer))):
            yield lambda newer: shown.update(plain(newer))
        return
    last = time.monotonic()

    def show(newer: str) -> None:
        nonlocal last
        if time.monotonic() - last >= every:
            last = time.monotonic()
            print_line(console, newer)

    yield show
