"""Shows what is wrong with saved rollouts of another trainer. `jackpot diagnose RUN` stays without torch by that."""

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
    """Print what is wrong with saved rollouts of another trainer."""
    result = replaying.replay(path, names=["none"])
    found = results.dump_findings(result)
    if as_json:
        typer.echo(json.dumps({"verdict": "unhealthy" if found else "healthy", "findings": found}, indent=2))
    else:
        looked_at = {"Looked at": f"{result.format}, {result.answer.measured_on}"}
        nothing = {"Found": "nothing: the columns fit each other, and the policy's can be what scored these tokens"}
        print_line(console := Console(), labelled((found or nothing) | looked_at))
        show_next(console, {f"jackpot replay {quote(str(path))}": "which correction it wants, and what that is worth"})
    if found:
        raise typer.Exit(1)
