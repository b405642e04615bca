"""Shows what is wrong with saved rollouts of another trainer.

This file stands apart from `commands/diagnose.py` so that `jackpot diagnose RUN` does not import torch.
"""

import json
from pathlib import Path
from shlex import quote

import typer
from rich.console import Console

from jackpot.ui.lazy import lazy
from jackpot.ui.terminal.output import labelled, print_line, show_next

with lazy():
    from jackpot.analysis.replay import replay as replaying
    from jackpot.analysis.replay import results


def diagnose_dump(path: Path, as_json: bool) -> None:
    """Print what is wrong with saved rollouts of another trainer; if anything is, end the program with code 1."""
    result = replaying.replay(path, names=["none"])  # of the corrections, only the one that corrects nothing
    findings = results.dump_findings(result)
    if as_json:
        typer.echo(json.dumps({"verdict": "unhealthy" if findings else "healthy", "findings": findings}, indent=2))
    else:
        looked_at = {"Looked at": f"{result.format}, {result.answer.measured_on}"}
        nothing = {"Found": "nothing: the columns agree, and the policy's log-probs can be those of these tokens"}
        console = Console()
        print_line(console, labelled((findings or nothing) | looked_at))
        show_next(console, {f"jackpot replay {quote(str(path))}": "which correction it wants, and what that is worth"})
    if findings:
        raise typer.Exit(1)
