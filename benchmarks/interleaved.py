"""What the benchmarks share: every measurement in a process of its own, taking turns, medians with their range."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Job = dict[str, Any]
Result = dict[str, float]
MARK = "RESULT "


def measure(worker: Path, job: Job, python: str = sys.executable, flags: Sequence[str] = ()) -> Result:
    """Run one job in a process of its own: `worker` gets it as JSON, behind `flags`, and prints `RESULT ` and its
    numbers."""
    done = subprocess.run([python, worker, *flags, json.dumps(job)], capture_output=True, text=True, check=False)
    answers = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not answers:
        raise RuntimeError(f"{job} failed with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    result = json.loads(answers[-1]) | {"load": os.getloadavg()[0]}
    print(job, result, file=sys.stderr, flush=True)
    return result


def cell(values: Iterable[float], digits: int = 2) -> str:
    """The median and, of several, the smallest and the largest."""
    values = list(values)
    text = f"{statistics.median(values):,.{digits}f}"
    return text if len(values) == 1 else f"{text} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()
