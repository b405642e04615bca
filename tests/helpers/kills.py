"""Kills commands that read or measure, at moments spread over their time, and lets the same command end.

    python kills.py HOME RUN    works in HOME on a finished run; prints a JSON list of `Kill`

Everything is imported once and every process is a fork, so that it costs a fraction of a second.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from helpers.runs import contents
from jackpot.models.load import load_model
from jackpot.ui import cli
from jackpot.ui.commands import evaluate, replay, report
from jackpot.ui.lazy import load

COMMANDS = {
    "eval": ["eval", "starter:policy", "--benchmarks", "arithmetic", "--k", "16", "problems=64", "threads=1"],
    "report": ["report", "{run}", "--out", "page.html"],
    "replay": ["replay", "{run}", "--json"],
}
KILLS = (  # signal, and its moment as a share of the time that the whole command takes
    ("SIGKILL", 0.2),
    ("SIGKILL", 0.6),
    ("SIGTERM", 0.3),
    ("SIGINT", 0.3),
)


@dataclass
class Kill:
    """What was seen of a command that was killed and run again."""

    command: str
    signal: str
    code: int  # how the killed process ended
    left: int  # processes of its session that were alive 5 s later
    half_written: list[str]  # files that stand under their final name with other contents than the whole command's
    again: int  # exit code of the same command afterwards
    differs: list[str]  # files that then differ from the whole command's
    reads_only: bool  # whether the run folder is as before


class Command:
    """A process, the leader of its own session, that runs a command in a folder."""

    def __init__(self, arguments: Sequence[str], cwd: Path) -> None:
        cwd.mkdir(exist_ok=True)
        self.process = os.fork()
        if self.process == 0:
            os._exit(_run(arguments, cwd))

    def end(self) -> int:
        """Wait for the process and return its exit code."""
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])

    def left(self) -> int:
        """Count the processes of the session that are still there 5 s later."""
        for _ in range(50):
            with suppress(ProcessLookupError):
                os.killpg(self.process, 0)
                time.sleep(0.1)
                continue
            return 0
        return 1


def _run(arguments: Sequence[str], cwd: Path) -> int:
    """Run a command in this process, whose output goes to a file, and return its exit code."""
    os.setsid()
    os.chdir(cwd)
    with Path("output").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.argv = ["jackpot", *arguments]
    try:
        cli.main()
    except SystemExit as exit_request:
        return int(exit_request.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def files(cwd: Path) -> dict[str, bytes | str]:
    """Return what every file holds that the command leaves, but for those with times."""
    files_left = contents(cwd)
    for name in ("output", "runs/eval-starter-policy/summary.json"):
        files_left.pop(name, None)
    return files_left


def kill_all(home: Path, run: Path) -> list[Kill]:
    """Run each command undisturbed, then kill it by each of `KILLS` and run it again."""
    kills, run_contents = [], contents(run)
    for name, words in COMMANDS.items():
        arguments = [word.format(run=run) for word in words]
        for folder in (home / f"{name}-warm", home / f"{name}-whole"):  # the first one warms caches up
            start = time.monotonic()
            assert Command(arguments, folder).end() == 0, (folder / "output").read_text()
        seconds, undisturbed_files = time.monotonic() - start, files(folder)

        for index, (signal_name, moment) in enumerate(KILLS):
            cwd = home / f"{name}-{index}"
            killed_command = Command(arguments, cwd)
            time.sleep(moment * seconds)
            os.kill(killed_command.process, getattr(signal, signal_name))
            exit_code, process_count = killed_command.end(), killed_command.left()
            half_written = [
                path
                for path, content in files(cwd).items()
                if path in undisturbed_files and content != undisturbed_files[path]
            ]

            second_exit_code = Command(arguments, cwd).end()
            second_files = files(cwd)
            paths = sorted(undisturbed_files.keys() | second_files.keys())
            kills.append(
                Kill(
                    command=name,
                    signal=signal_name,
                    code=exit_code,
                    left=process_count,
                    half_written=half_written,
                    again=second_exit_code,
                    differs=[path for path in paths if undisturbed_files.get(path) != second_files.get(path)],
                    reads_only=contents(run) == run_contents,
                )
            )
    return kills


if __name__ == "__main__":
    torch.set_num_threads(1)
    for command in (evaluate, replay, report):
        load(command)  # what a command imports when it is called
    load_model("starter:policy", torch.float32)  # what transformers imports late
    print(json.dumps([asdict(kill) for kill in kill_all(Path(sys.argv[1]), Path(sys.argv[2]))]))
