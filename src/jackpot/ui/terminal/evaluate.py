"""What `jackpot eval` shows."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from jackpot.analysis.evaluate.run import Listener, Progress, Result
from jackpot.rollout.pass_at_k import CONFIDENCE, BootstrapEstimate, EvaluationSummary

_SECONDS = 5.0  # between two lines where there is no terminal


@contextmanager
def evaluation_progress(console: Console) -> Iterator[Listener]:
    """A listener that shows answers, tokens a second and the time left: a bar for each set in a terminal, else plain
    lines."""
    if not console.is_terminal:
        yield _PlainProgress(console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console) as bar:
        tasks = {}

        def listen(progress: Progress) -> None:
            name = progress.benchmark
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=progress.total, completed=progress.done - progress.fresh)
            bar.update(tasks[name], completed=progress.done, description=f"{name}  {_so_far(progress)}")

        yield listen


class _PlainProgress:
    """At most one line every few seconds, and one at the end of each set."""

    def __init__(self, console: Console) -> None:
        self._console, self._last = console, 0.0

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.done < progress.total and now - self._last < _SECONDS:
            return
        self._last = now
        self._console.print(
            f"{progress.benchmark}  {progress.done}/{progress.total} answers  {_so_far(progress)}",
            highlight=False,
            soft_wrap=True,
        )


def _so_far(progress: Progress) -> str:
    """How fast; not how many are right: the answers that end first are the short ones."""
    return f"{progress.tokens / progress.seconds:,.0f} tokens/s"


def show_evaluation(console: Console, results: Sequence[Result], folder: Path) -> None:
    """A row for each set, what went wrong, and where the answers are."""
    if all(result.was_done for result in results):
        console.print("This evaluation was finished before; nothing was asked.", highlight=False)
    k = results[0].summary.k
    title = f"{k} sampled {'answer' if k == 1 else 'answers'} to each problem, percent"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for column in ("benchmark", "problems", f"mean@{k}", *([f"pass@{k}"] if k > 1 else []), "truncated", "tokens"):
        table.add_column(column, justify="left" if column == "benchmark" else "right")
    for result in results:
        found = result.summary
        passed = [_percent(found.pass_at_k[k])] if k > 1 else []
        cells = (f"{found.problems:,}", _percent(found.mean_at_k), *passed, f"{100 * found.truncated:.1f}")
        table.add_row(Text(result.benchmark), *cells, f"{found.tokens:,.0f}")
    console.print(table)
    for result in results:
        for sentence in _sentences(result.summary):
            console.print(Text(f"{result.benchmark}: {sentence}"), soft_wrap=True)
    console.print(
        Text(f"In brackets: {100 * CONFIDENCE:g} % intervals over problems. All answers: {folder}"), soft_wrap=True
    )


def _percent(estimate: BootstrapEstimate) -> str:
    """The value, and its interval if it has one."""
    interval = "" if estimate.low is None else f" ({100 * estimate.low:.1f}-{100 * estimate.high:.1f})"
    return f"{100 * estimate.value:.1f}{interval}"


def _sentences(found: EvaluationSummary) -> Iterator[str]:
    """The other pass@k, and what counts as wrong without anybody having said so."""
    if found.k > 2:
        yield ", ".join(f"pass@{k} {100 * estimate.value:.1f}" for k, estimate in found.pass_at_k.items())
    answers = found.problems * found.k
    wrong = {
        "were given up by the engine": found.aborted,
        "could not be judged in time": found.reward_timeouts,
        "broke the judge": found.reward_crashes,
    }
    for what, share in wrong.items():
        if share:
            yield f"{round(share * answers):,} of {answers:,} answers {what}; they count as wrong"
