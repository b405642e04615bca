"""The command line: the table of all commands of `jackpot`, its own options, and how errors are shown.

Each file of `jackpot.ui.commands` declares one command with its arguments, options and help text.
"""

import logging
import sys
from typing import Annotated

import typer
from rich.console import Console

from jackpot.core.errors import JackpotError
from jackpot.core.package import version
from jackpot.ui.commands import (
    compare,
    config,
    diagnose,
    evaluate,
    export,
    launch,
    mismatch,
    recipes,
    replay,
    report,
    sample,
    simulate,
    starter,
    train,
)
from jackpot.ui.terminal.output import PrintableFormatter, plain
from jackpot.ui.typed import Commands, register

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    help="Train a large language model by reinforcement learning on the rollouts of a smaller, cheaper model.",
)


def _print_version(is_asked: bool) -> None:
    """Print the version and end the program, if --version was typed."""
    if is_asked:
        typer.echo(f"jackpot {version()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Declare the option that stands before the command's name."""


COMMANDS = (  # in the order of --help
    train,
    launch,
    compare,
    evaluate,
    recipes,
    config,
    sample,
    starter,
    diagnose,
    report,
    replay,
    export,
    simulate,
    mismatch,
)
for _command in COMMANDS:
    register(
        app,
        _command,
        name="eval" if _command is evaluate else None,
        on_ranks=_command is train,
    )


def main() -> None:
    """Run the typed command; print a user's error without a traceback and exit with code 2."""
    if logging.lastResort:  # the handler that prints the package's warnings
        logging.lastResort.setFormatter(PrintableFormatter())
    try:
        app()
    except JackpotError as error:
        console = Console(stderr=True)
        mark, text = plain("error:", style="bold red"), plain(str(error))
        console.print(mark, text, soft_wrap=not console.is_terminal, highlight=False)
        sys.exit(2)
