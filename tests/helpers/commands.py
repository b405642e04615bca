"""What a user types, run in this process: importing what the command line needs takes seconds of CPU each time."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from unittest import mock

from jackpot.ui import cli

SCREEN = {"COLUMNS": "160", "NO_COLOR": "1"}


def jackpot(*arguments: str, cwd: Path, **environment: str) -> CompletedProcess[str]:
    """Run a command in `cwd` and return its exit code and what it printed, as if it had a process of its own."""
    with _as_typed(arguments, cwd, SCREEN | environment) as (output, error):
        try:
            cli.main()
        except SystemExit as exit_request:
            code = exit_request.code or 0
        else:
            code = 0
    return CompletedProcess(arguments, code, output.getvalue(), error.getvalue())


@contextlib.contextmanager
def _as_typed(
    arguments: tuple[str, ...], cwd: Path, environment: dict[str, str]
) -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """Give this process the folder, environment and arguments of a command; yield what it prints, by stream."""
    output, error = io.StringIO(), io.StringIO()
    with (
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(error),
        mock.patch.dict(os.environ, environment),
        mock.patch.object(sys, "argv", ["jackpot", *arguments]),
    ):
        yield output, error
