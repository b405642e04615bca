"""Writes the page about run folders, once or repeatedly while they train.

Status: supported.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jackpot.core.errors import DataError
from jackpot.training.run_folder.rollouts import list_rollout_files
from jackpot.ui.html import write_page
from jackpot.ui.report.curves import metric_sections
from jackpot.ui.report.inspector import MAX_TOKENS, inspector_data
from jackpot.ui.report.metric_layout import HEADLINE
from jackpot.ui.report.runs import arms_of, common_folder, find_evaluations, find_runs, read_runs
from jackpot.ui.report.summary import diagnoses, summary_section

NAME = "report.html"


class NoMetricsYet(DataError):
    """Says that the runs have begun and have not written a metric yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Says what `write_report` wrote, and what the page leaves out."""

    path: Path  # the page
    runs: int  # number of runs in it
    unfinished: tuple[str, ...]  # names of the runs that are not finished
    is_going: bool  # whether a run has not ended
    unreadable: tuple[str, ...]  # a sentence for each file and folder that was left out


def write_report(
    paths: Sequence[Path], out: Path | None = None, max_tokens: int = MAX_TOKENS, reload_every: float | None = None
) -> Report:
    """Write one page about all runs in `paths`, which are run folders or folders that contain run folders.

    Args:
        out: the page's file; None: report.html in the run folder, or in the folder that contains all of several.
        max_tokens: number of saved tokens that the page carries.
        reload_every: seconds between two reloads of the open page while a run has not ended; None: never.

    Raises:
        DataError: no run was found.
        NoMetricsYet: no run has written a metric.
    """
    folders = find_runs(paths)
    path = out or (folders[0] if len(folders) == 1 else common_folder(folders)) / NAME
    runs = read_runs(folders)
    begun = [run for run in runs if run.lines]
    if not begun:
        raise NoMetricsYet(
            f"{' and '.join(map(str, paths))} has no metrics yet: the first line of metrics.jsonl is the evaluation "
            f"before training; wait for it, or use --watch"
        )
    arms = arms_of(begun)
    unreadable = [
        f"{folder} is left out: it is of `jackpot eval` and no run; its results are in summary.json"
        for folder in find_evaluations(paths)
    ]
    saved_by_run = []
    for run in (run for arm in arms for run in arm.runs):
        saved_files, bad = list_rollout_files(run.folder)
        saved_by_run.append((run, saved_files))
        unreadable += bad
    tokens, bad = inspector_data(saved_by_run, max_tokens)
    unreadable += bad
    found = diagnoses(arms)
    summary = summary_section(arms, found, unreadable)
    if tokens.left_out.rows:
        summary = replace(summary, items=(*summary.items, tokens.left_out))
    findings = (finding for _, diagnosis in found for finding in diagnosis.findings)
    named = {metric for finding in findings for metric in finding.metric.split(" / ")}
    sections = metric_sections(arms, named)
    sections.insert(1 if sections and sections[0].title == HEADLINE else 0, summary)
    title = f"Report on {begun[0].name if len(runs) == 1 else f'{len(runs)} runs in {common_folder(folders).name}'}"
    is_going = not all(run.ended for run in runs)
    write_page(path, title, sections, tokens=tokens, reload_every=reload_every if is_going else None)

    unfinished = tuple(run.name for run in runs if not run.finished)
    return Report(path=path, runs=len(runs), unfinished=unfinished, is_going=is_going, unreadable=tuple(unreadable))


def watch(
    paths: Sequence[Path],
    out: Path | None,
    max_tokens: int,
    every: float,
    show: Callable[[Report], None],
    wait: Callable[[float], None] = time.sleep,
) -> None:
    """Write the page again whenever the runs have written something, until all are finished or have stopped themselves.

    Args:
        every: seconds between two checks.
        show: called after each time the page was written.
        wait: sleeps for this many seconds.
    """
    before: list[tuple[str, int, int]] = []
    while True:
        now = _fingerprint(paths)
        if now != before:
            before = now
            with contextlib.suppress(NoMetricsYet):
                report = write_report(paths, out, max_tokens, reload_every=every)
                show(report)
                if not report.is_going:
                    return
        wait(every)


def _fingerprint(paths: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Return names, sizes and times of all files that go into the page; they change when a run writes."""
    found = []
    for folder in find_runs(paths):
        for pattern in ("*.jsonl", "rollouts/*.parquet"):
            for path in sorted(folder.glob(pattern)):
                try:
                    status = path.stat()
                except FileNotFoundError:  # training removes old rollouts
                    continue
                found.append((str(path), status.st_size, status.st_mtime_ns))
    return found
