"""Writes the page of `jackpot report`: findings, charts of every metric, and saved tokens of runs.

Status: supported.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jackpot.core.errors import DataError
from jackpot.training.run_folder.saved_rollouts import list_rollout_files
from jackpot.ui.html import write_page
from jackpot.ui.report.curves import metric_sections
from jackpot.ui.report.inspector import MAX_TOKENS, inspector_data
from jackpot.ui.report.metric_layout import HEADLINE
from jackpot.ui.report.runs import arms_of, common_folder, find_runs, read_runs
from jackpot.ui.report.summary import diagnoses, summary_section


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A written page: its path, and what it contains and leaves out."""

    path: Path  # the page
    runs: int  # number of runs that the page shows
    unfinished: tuple[str, ...]  # names of the runs that are not finished
    unreadable: tuple[str, ...]  # a sentence about each file and folder that was left out


def write_report(paths: Sequence[Path], out: Path | None = None, max_tokens: int = MAX_TOKENS) -> Report:
    """Write one page about several runs.

    Args:
        paths: run folders, or folders that contain run folders.
        out: the page's file; None: report.html in the run folder, or in the folder that contains all runs.
        max_tokens: most saved tokens that the page carries.

    Raises:
        DataError: no run was found, or none has written a metric.
    """
    folders, evaluations = find_runs(paths)
    path = out or (folders[0] if len(folders) == 1 else common_folder(folders)) / "report.html"
    runs = read_runs(folders)
    begun = [run for run in runs if run.lines]
    if not begun:
        raise DataError(
            f"{' and '.join(map(str, paths))} has no metrics yet: the first line of metrics.jsonl is the evaluation "
            f"before training; wait for it"
        )

    arms = arms_of(begun)
    unreadable = [
        f"{folder} is left out: it is of `jackpot eval` and no run; its results are in summary.json"
        for folder in evaluations
    ]

    saved_by_run = []
    for run in (run for arm in arms for run in arm.runs):
        saved_files, bad = list_rollout_files(run.folder)  # bad: a sentence about each file that cannot be read
        saved_by_run.append((run, saved_files))
        unreadable += bad
    tokens, bad = inspector_data(saved_by_run, max_tokens)
    unreadable += bad

    arm_diagnoses = diagnoses(arms)
    summary = summary_section(arms, arm_diagnoses, unreadable, tokens.left_out)
    findings = (finding for _, diagnosis in arm_diagnoses for finding in diagnosis.findings)
    # A finding about a ratio names two metrics, `a / b`.
    named = {metric for finding in findings for metric in finding.metric.split(" / ")}

    sections = metric_sections(arms, named)
    # The summary comes second, after the metrics at a glance, or first where there are none.
    sections.insert(1 if sections and sections[0].title == HEADLINE else 0, summary)
    title = f"Report on {begun[0].name if len(runs) == 1 else f'{len(runs)} runs in {common_folder(folders).name}'}"
    write_page(path, title, sections, tokens=tokens)

    unfinished = tuple(run.name for run in runs if run.iteration < run.config.iterations)
    return Report(path=path, runs=len(runs), unfinished=unfinished, unreadable=tuple(unreadable))
