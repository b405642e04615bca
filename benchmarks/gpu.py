"""Measures what only a GPU can tell, part by part: docs/gpu.md has the results.

    make gpu PART=check                    # first: the numbers of the GPU are those of the CPU
    make gpu PART="head step"              # each part in at most 8 minutes; the same command goes on where it ended
    make gpu PART=check ARGS=--tiny        # the same code with tiny shapes, in seconds, on a CPU too; nothing is kept
    make gpu-wheels                        # for a machine without network: the packages that it may lack
    python benchmarks/gpu.py page          # docs/gpu.md from docs/gpu.jsonl, as after each part

A part is a list of rows. Each measured row is a line of docs/gpu.jsonl as soon as it is there, under the last commit
that changed src/ or benchmarks/, and is not measured again at that commit. A row that fails, or lacks a package, says
so in its line, and the next row goes on; the same command tries it again, after all rows that were never tried. The
exit status is 1 where `check` found a wrong number or lacks one, or `fsdp` found one, else 0.
"""

import argparse
import importlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "src")]

from gpu_parts import page, wheels  # noqa: E402
from gpu_parts.page import PARTS  # noqa: E402
from gpu_parts.results import RESULTS, Results, Row, table  # noqa: E402

LEAST_SECONDS = 20.0  # with less time left no further row is begun


class OutOfTime(Exception):
    """A row took longer than the time that it had."""


def commit() -> str:
    """Return the last commit that changed the code, with a digest of what differs from it; "unknown" without git."""
    paths = ("--", "src", "benchmarks")
    found, changes = _git("log", "-1", "--format=%h", *paths), _git("diff", "HEAD", *paths)
    return (found or "unknown") + (f"+{sha256(changes.encode()).hexdigest()[:6]}" if changes else "")


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the body after this many seconds."""

    def end(number: int, frame: FrameType | None) -> None:
        raise OutOfTime(f"not done after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def run_part(part: str, rows: Sequence[Row], results: Results, forget: Callable[[], None], seconds: float) -> list[str]:
    """Measure the rows that have no result yet, never tried ones first, and return the names of those left at the end.

    Args:
        forget: called after each row, to free its memory.
        seconds: after which no row is begun or goes on.
    """
    ends = time.monotonic() + seconds
    todo = sorted(
        (row for row in rows if not results.is_done(part, row.name)), key=lambda row: results.tried(part, row.name)
    )
    for number, row in enumerate(todo):
        left = ends - time.monotonic()
        if left < LEAST_SECONDS:
            return [other.name for other in todo[number:]]
        results.begin(part, row.name)
        began = time.monotonic()
        try:
            with time_limit(min(row.seconds, left)):
                result = row.measure()
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        results.end(part, row.name, result, time.monotonic() - began)
        print(f"{part}: {row.name}: {result}", file=sys.stderr, flush=True)
        forget()
    return []


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=[*PARTS, "all", "wheels", "page"], metavar="PART")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes; nothing is kept unless --results says where")
    parser.add_argument("--results", type=Path, help=f"read and extended; default {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--minutes", type=float, default=8.0, help="for each part")
    parser.add_argument("--commit", help="that the results are of; default: what git says")
    parser.add_argument("--only", default="", help="only rows with this text in their name")
    parser.add_argument("--python", default="3.12", help="of the GPU machine, for wheels")
    options = parser.parse_args(arguments)
    if "wheels" in options.parts:
        return wheels.download(options.python)
    if "page" in options.parts:
        page.write()
        return 0
    if missing := wheels.use():
        print(
            f"missing here: {', '.join(missing)}. Install them; all but {', '.join(wheels.EXPECTED)} can be carried "
            f"in {wheels.FOLDER.name}/, which `make gpu-wheels` fills where there is a network",
            file=sys.stderr,
        )
        return 2
    from gpu_parts.machine import Machine

    machine = Machine(options.tiny)
    if not machine.has_gpu and not options.tiny:
        print("torch finds no GPU; --tiny runs the same code with tiny shapes on a CPU", file=sys.stderr)
        return 2
    path = options.results or (None if options.tiny else RESULTS)
    results = Results(path, options.commit or commit(), machine.about())
    status = 0
    for part in PARTS if "all" in options.parts else options.parts:
        rows = [row for row in importlib.import_module(f"gpu_parts.{part}").rows(machine) if options.only in row.name]
        left = run_part(part, rows, results, machine.forget, 60.0 * options.minutes)
        found = results.of(part)
        print(f"\n## {part}\n\n{table(found)}\n", flush=True)
        if left:
            print(f"No time was left for {'; '.join(left)}. The same command goes on there.\n", flush=True)
        if path == RESULTS:
            page.write()
        is_wrong = any(line.result.get("right") is False for line in found)
        if is_wrong or (part == "check" and (left or not all(line.result.get("right") for line in found))):
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
