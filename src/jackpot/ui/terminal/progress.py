"""What `jackpot replay` prints."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from jackpot.analysis.compare.process import ArmRun
from jackpot.analysis.compare.scheduler import ArmListener, Lines
from jackpot.analysis.mismatch.run import Found
from jackpot.analysis.mismatch.run import Listener as MismatchListener
from jackpot.analysis.replay.replay import Replay
from jackpot.ui.charts import Section
from jackpot.ui.terminal.tables import show_tables
from jackpot.ui.views.replay import facts, replay_sections


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


def arms_progress(console: Console) -> ArmListener:
    """A listener that prints a line for every evaluation, and for every run that ends."""
    shown: dict[str, int] = {}

    def listen(run: ArmRun, lines: Lines, end: str) -> None:
        evaluated = [line for line in lines if line.get("eval/policy_accuracy") is not None]
        newest = evaluated[-1]["iteration"] if evaluated else -1
        if end or newest > shown.get(run.name, -1):
            shown[run.name] = newest
            accuracy = f"policy {evaluated[-1]['eval/policy_accuracy']:.1%}" if evaluated else ""
            console.print(
                f"{run.name}  iteration {newest}/{run.config.iterations}  {accuracy}  {end}",
                highlight=False,
                soft_wrap=True,
            )

    return listen


@contextmanager
def mismatch_progress(console: Console) -> Iterator[MismatchListener]:
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
