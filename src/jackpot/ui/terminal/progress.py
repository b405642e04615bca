"""Shows how far a command is: bars in a terminal, single lines in a log."""

import errno
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jackpot.core.stages import listening
from jackpot.ui.terminal.output import plain, print_line, printable

LINE_SECONDS = 5.0  # shortest time between two lines of a log, seconds


@contextmanager
def progress(console: Console) -> Iterator["Counts"]:
    """Yield an object whose `update` shows the progress while the work goes on; it shows stages too."""
    counts = Counts(console)
    with counts.live if console.is_terminal else nullcontext(), listening(counts.stage):
        yield counts
        if console.is_terminal:
            counts.stage("")  # the last frame stays on the screen


@contextmanager
def _outliving_terminal() -> Iterator[None]:
    """Write to a terminal that may be gone: SIGHUP, which asks a run to stop, can come a moment after a write fails."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise


class Counts:
    """Counted things: in a terminal bars over the newest facts and the stage, in a log a line every few seconds.

    Lines that are due are printed at once, and stay above the bars.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description} {task.completed:,}/{task.total:,}{task.fields[noun]}", markup=False),
            BarColumn(bar_width=16),
            TextColumn("{task.percentage:.0f}%"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=console,
        )

        self._begun: dict[str, tuple[TaskID, float, int]] = {}  # of each name: its bar, and time and count at first
        self._last = -LINE_SECONDS  # when the newest line was printed
        self._facts: dict[str, str] = {}
        self._stage = ""
        self.live = Live(self._frame(), console=console, refresh_per_second=4)

    @_outliving_terminal()
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
        """Show the count of one thing and facts about it; over bars a fact stays until a newer one replaces it.

        Args:
            name: what is counted, for example an iteration or a benchmark.
            facts: name and formatted value.
            noun: what stands behind the count.
            start: count at which this process began; None takes the first `done`.
            is_due: print a line that stays, in a log at once; bars always show the newest count.
            lasting: names of the facts in the line that stays above the bars, and only there; None: all.
        """
        now = time.monotonic()
        if name not in self._begun:
            begun = done if start is None else start
            bar = self._bars.add_task(printable(name), total=total, completed=begun, noun=noun)
            self._begun[name] = (bar, now, done)
        bar, begun_at, first = self._begun[name]
        count = f"{name} {done:,}/{total:,}{noun}"

        if self._console.is_terminal:
            kept = {fact for fact in facts if is_due and (lasting is None or fact in lasting)}
            if is_due:
                print_line(self._console, _line(count, {fact: facts[fact] for fact in facts if fact in kept}))
            self._facts |= {fact: value for fact, value in facts.items() if fact not in kept}
            self._bars.update(bar, completed=done)
            self.live.update(self._frame())
        elif is_due or now - self._last >= LINE_SECONDS:
            self._last = now
            left = f"  {(now - begun_at) / (done - first) * (total - done):.0f} s left" if done > first else ""
            print_line(self._console, _line(count, facts) + left)

    @_outliving_terminal()
    def stage(self, text: str) -> None:
        """Show what is done now; in a log as long as nothing is counted."""
        self._stage = text
        if self._console.is_terminal:
            self.live.update(self._frame())
        elif not self._begun:
            print_line(self._console, text)

    def _frame(self) -> Group:
        below = ("  ".join(f"{name} {value}" for name, value in self._facts.items()), self._stage)
        return Group(self._bars, *(plain(text, style="dim") for text in below if text))


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
