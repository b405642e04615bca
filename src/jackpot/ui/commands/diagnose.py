"""Implements `jackpot diagnose`, which says what is wrong with a run, or which signs it looked at."""

import json
from dataclasses import asdict
from pathlib import Path
from shlex import quote

import typer
from rich.console import Console

from jackpot.analysis.diagnose.diagnose import Diagnosis
from jackpot.analysis.diagnose.diagnose import diagnose as diagnosis_of
from jackpot.training.run.folder import RunFolder, run_config
from jackpot.ui.report.summary import finding_cells
from jackpot.ui.terminal.answer import show_next
from jackpot.ui.terminal.tables import show_table
from jackpot.ui.terminal.text import plain


def diagnose(run: Path, as_json: bool) -> None:
    """Print the diagnosis of a run; exit with code 1 if the run is unhealthy."""
    config, folder = run_config(run), RunFolder(run)
    found = diagnosis_of(folder.read("metrics.jsonl"), folder.read("events.jsonl"), config)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
    else:
        _show(console := Console(), found)
        show_next(console, {f"jackpot report {quote(str(run))}": "the charts of these metrics, and every saved token"})
    if found.verdict == "unhealthy":
        raise typer.Exit(1)


def _show(console: Console, diagnosis: Diagnosis) -> None:
    """Print the summary, and the findings with what they mean and what to try; without one, what was looked at."""
    console.print(plain(diagnosis.summary), highlight=False)
    if not diagnosis.findings:
        for sentence in diagnosis.coverage:
            console.print(plain(sentence), highlight=False)
        return
    columns = ("metric", "since", "then", "now", "limit")
    rows = [finding_cells(finding)[: len(columns)] for finding in diagnosis.findings]
    show_table(console, "Causes before their symptoms", columns, rows, columns[1:4])
    for finding in diagnosis.findings:
        console.print(plain(f"{finding.metric}: {finding.explanation}. Try: {finding.suggestion}."), highlight=False)
