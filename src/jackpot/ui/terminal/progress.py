"""Shows how far a command has come: bars in a terminal, single lines in a log."""

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
    """Show counts and stages while the block runs; yield the `Counts` whose `update` the work calls."""
    counts = Counts(console)
    with counts.live if console.is_terminal else nullcontext(), listening(counts.stage):
        yield counts
        if console.is_terminal:
            counts.stage("")  # without a stage, as the last frame stays on the screen


@contextmanager
def _outliving_terminal() -> Iterator[None]:
    """Ignore writes that fail because the terminal is gone, a moment before SIGHUP arrives and asks the run to stop."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise


class Counts:
    """The progress of counted work, such as iterations: bars in a terminal, a line every few seconds in a log.

    A terminal shows the newest facts and the stage below the bars, and keeps above them the lines that `update` prints.
    """

    def __init__(self, console: Console) -> None:
        """Make the display without any bar; `progress` begins to show it (`live`) if the console is a terminal."""
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

        # For each name of counted work: its bar, and the time and the count of the bar's first update.
        self._starts: dict[str, tuple[TaskID, float, int]] = {}
        self._last_line = -LINE_SECONDS  # when the newest line was printed; at first so long ago that a line is due
        self._facts: dict[str, str] = {}  # newest facts below the bars, by name
        self._stage = ""  # what the command does now
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
        """Show a count with facts about it: in a terminal a bar, and below all bars the newest facts; in a log a line.

        Args:
            name: what is counted, for example iteration, or the name of a benchmark.
            facts: formatted values by their names.
            noun: text after the count.
            start: count at which this process began; None takes the first `done`.
            is_due: whether a terminal prints a line too, which stays above the bars, and a log its line at once.
            lasting: names of the facts that a terminal shows in that line and not below the bars; None: all of them.
        """
        now = time.monotonic()
        if name not in self._starts:
            completed = done if start is None else start
            bar = self._bars.add_task(printable(name), total=total, completed=completed, noun=noun)
            self._starts[name] = (bar, now, done)
        bar, start_time, start_count = self._starts[name]
        count = f"{name} {done:,}/{total:,}{noun}"

        if self._console.is_terminal:
            in_line = {fact: value for fact, value in facts.items() if is_due and (lasting is None or fact in lasting)}
            if is_due:
                print_line(self._console, _line(count, in_line))
            self._facts |= {fact: value for fact, value in facts.items() if fact not in in_line}
            self._bars.update(bar, completed=done)
            self.live.update(self._frame())
        elif is_due or now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            line = _line(count, facts)
            if done > start_count:  # the rest is expected at the speed since the first update
                line += f"  {(now - start_time) / (done - start_count) * (total - done):.0f} s left"
            print_line(self._console, line)

    @_outliving_terminal()
    def stage(self, text: str) -> None:
        """Show what the command does now; a log shows it only before the first call of `update`."""
        self._stage = text
        if self._console.is_terminal:
            self.live.update(self._frame())
        elif not self._starts:
            print_line(self._console, text)

    def _frame(self) -> Group:
        """Return what the bottom of the terminal shows: the bars, then up to two lines.

        The first has the newest value of every fact, such as `loss 0.31`, the second what the command does now.
        """
        # The two lines below the bars; an empty one is left out.
        below = ("  ".join(f"{name} {value}" for name, value in self._facts.items()), self._stage)
        return Group(self._bars, *(plain(text, style="dim") for text in below if text))


def _line(count: str, facts: Mapping[str, str]) -> str:
    """Join a count such as `iteration 3/20` and its facts to a line of text."""
    return "  ".join([count, *(f"{fact} {value}" for fact, value in facts.items())])


@contextmanager
def status(console: Console, text: str, every: float = 0.0) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows what the command does now: a terminal rewrites one line, a log gets further lines.

    Args:
        text: first text of the line in a terminal; each stage that begins replaces it.
        every: shortest time between two lines of a log, seconds.
    """
    if console.is_terminal:
        # The line shows what the caller passes to the function, and each stage that the work announces by itself.
        with console.status(plain(text)) as line, listening(lambda newer: line.update(plain(newer))):
            yield lambda newer: line.update(plain(newer))
        return

    last = time.monotonic()

    def show(newer: str) -> None:
        """Print a further line of the log, unless less than `every` seconds have passed since the last one."""
        nonlocal last
        if time.monotonic() - last >= every:
            last = time.monotonic()
            print_line(console, newer)

    yield show
