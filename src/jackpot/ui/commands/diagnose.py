"""Implements `jackpot diagnose`, which says what is wrong with a run, or which signs it looked at."""

import json
from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer
from rich.console import Console

from jackpot.ui.arguments import AsJson
from jackpot.ui.lazy import lazy
from jackpot.ui.terminal.output import plain, show_next, show_table

with lazy():
    from jackpot.analysis.diagnose import diagnose as diagnosing
    from jackpot.training.run_folder import folder as run_folder
    from jackpot.ui.report import summary


def diagnose(
    run: Annotated[Path, typer.Argument(help="Run folder, of a finished run or of one that is still training.")],
    as_json: AsJson = False,
) -> None:
    """Look for signs that a run is unhealthy: what is wrong, since when, which metric shows it and what to try.

    Without a finding it says which signs it looked at. Exit code 0: no finding; 1: unhealthy; 2: no run there.

    Status: supported.
    """
    config, folder = run_folder.run_config(run), run_folder.RunFolder(run)
    found = diagnosing.diagnose(folder.read("metrics.jsonl"), folder.read("events.jsonl"), config)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
    else:
        _show(console := Console(), found)
        show_next(console, {f"jackpot report {quote(str(run))}": "the charts of these metrics, and every saved token"})
    if found.verdict == "unhealthy":
        raise typer.Exit(1)


def _show(console: Console, diagnosis: "diagnosing.Diagnosis") -> None:
    """Print the summary, and the findings with what they mean and what to try; without one, what was looked at."""
    console.print(plain(diagnosis.summary), highlight=False)
    if not diagnosis.findings:
        for sentence in diagnosis.coverage:
            console.print(plain(sentence), highlight=False)
        return
    columns = ("metric", "since", "then", "now", "limit")
    rows = [summary.finding_cells(finding)[: len(columns)] for finding in diagnosis.findings]
    show_table(console, "Causes before their symptoms", columns, rows, columns[1:4])
    for finding in diagnosis.findings:
        console.print(plain(f"{finding.metric}: {finding.explanation}. Try: {finding.suggestion}."), highlight=False)
