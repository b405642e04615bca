"""Makes runs sick on purpose, and healthy ones that may not look so, and asks `jackpot diagnose` what they have.

    python -m research.doctor run --seed 11 --lines docs/doctor.jsonl     # runs every case, a line each
    python -m research.doctor judge --seed 11 --lines docs/doctor.jsonl   # diagnoses again what was run
    python -m research.doctor table                                       # writes the result into docs/metrics.md

A case is a few lines of cases.py. Each runs in a process of its own, forked from one that has imported everything.
"""

import argparse
import contextlib
import json
import os
import re
import resource
import shutil
import sys
import textwrap
import traceback
from pathlib import Path
from typing import Any

import torch

from jackpot.analysis.diagnose.diagnose import Diagnosis, diagnose
from jackpot.analysis.diagnose.saved import read_saved
from jackpot.config.recipes import resolve
from jackpot.launch.start import train_run
from jackpot.training.run_folder.folder import RunFolder, run_config
from research.doctor.cases import CASES, HEALTHY, SICK, Case

ROOT = Path(__file__).resolve().parents[2]
LINES, PAGE = ROOT / "docs" / "doctor.jsonl", ROOT / "docs" / "metrics.md"
BEGIN, END = "<!-- python -m research.doctor table -->", "<!-- end of the table -->"
KINDS = {"sick": [case.name for case in SICK], "healthy": [case.name for case in HEALTHY]}


class Killed(BaseException):
    """Ends a start of a run as abruptly as an exception can."""


def train(case: Case, seed: int, folder: Path, more: list[str]) -> None:
    """Train the run of a case in `folder`/run; an error that ends it is printed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    case.prepare(folder)
    config = resolve(case.recipe, case.arm, [*case.overrides(folder, seed), *more])
    for start in range(case.starts):
        kill_at = config.iterations // 2 + 3 if start < case.starts - 1 else None

        def listen(line: dict[str, Any], kill_at: int | None = kill_at) -> None:
            if line["iteration"] == kill_at:
                raise Killed

        with contextlib.suppress(Killed):
            train_run(config, folder / "run", listen)


def in_a_process(case: Case, seed: int, folder: Path, more: list[str]) -> float:
    """Train in a fork of this process, with its output in `folder`.log; return the CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    child = os.fork()
    if not child:
        with Path(f"{folder}.log").open("w") as log, contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
            try:
                train(case, seed, folder, more)
            except BaseException:
                traceback.print_exc()
            finally:
                log.flush()
                os._exit(0)
    os.waitpid(child, 0)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def judge(run: Path) -> Diagnosis:
    """Diagnose a run as `jackpot diagnose` does."""
    folder, config = RunFolder(run), run_config(run)
    return diagnose(folder.read("metrics.jsonl"), folder.read("events.jsonl"), config, read_saved(run, config))


def is_right(case: Case, found: Diagnosis) -> bool:
    """Return whether the first finding is the cause of the case, or none where there should be none."""
    if not case.expected:
        return not found.findings
    return bool(found.findings) and bool(re.search(case.expected, found.findings[0].explanation))


def name_of(case: Case, seed: int) -> str:
    """Return the name of the folder of a case's run."""
    return f"{re.sub(r'[^a-z0-9]+', '-', case.name.lower())}-{seed}"


def show(case: Case, seed: int, found: Diagnosis, cpu: float) -> dict[str, Any]:
    """Print what was found of a run, and return its line."""
    first = found.findings[0] if found.findings else None
    said = first.explanation if first else found.verdict
    right = is_right(case, found)
    print(f"{'right' if right else 'WRONG'}  {case.name} [{seed}] {cpu:.0f} s: {said}", flush=True)
    if not right:
        for finding in found.findings:
            print(f"         {finding.metric} since {finding.since}: {finding.now:.3g} ({finding.limit:.3g})")
    return {
        "case": case.name,
        "seed": seed,
        "right": right,
        "metric": first.metric if first else None,
        "since": first.since if first else None,
        "said": said,
        "cpu_seconds": round(cpu, 1),
    }


def in_words(title: str, runs: list[str]) -> list[str]:
    """Return a line of the list on the page."""
    return textwrap.wrap(f"- {title}: {', '.join(runs)}.", 130, subsequent_indent="  ", break_on_hyphens=False)


def write_table() -> None:
    """Write what came of all lines into the page, between its two comments."""
    rows = [json.loads(line) for line in LINES.read_text().splitlines()]
    seeds = sorted({row["seed"] for row in rows})
    right = {kind: sum(row["right"] for row in rows if row["case"] in kind_names) for kind, kind_names in KINDS.items()}
    of = {kind: sum(row["case"] in kind_names for row in rows) for kind, kind_names in KINDS.items()}
    seconds = sum(row["cpu_seconds"] for row in rows)
    named = [row for row in rows if row["right"] and row["metric"]]
    lines = [
        f"Right: {right['sick']} of {of['sick']} sick runs, {right['healthy']} of {of['healthy']} healthy ones "
        f"(seed {', '.join(map(str, seeds))}; {seconds:.0f} CPU seconds).",
        "",
        *in_words("Named rightly, by the metric in brackets", [f"{row['case']} (`{row['metric']}`)" for row in named]),
        *in_words("Named wrongly", [f"{row['case']} ({row['said']})" for row in rows if not row["right"]]),
        *in_words("Rightly silent", [row["case"] for row in rows if row["right"] and not row["metric"]]),
    ]

    page = PAGE.read_text()
    start, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    PAGE.write_text(f"{page[:start]}\n" + "\n".join(lines) + f"\n{page[end:]}")


def main() -> None:
    """Run, judge or tabulate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "judge", "table"))
    parser.add_argument("--cases", default="", help="names of cases between semicolons; empty: all of the table")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/doctor"))
    parser.add_argument("--smollm", default="smollm2/policy", help="path of the policy of the case SmolLM2")
    parser.add_argument("--lines", type=Path, default=None, help="file that gets a line for each run")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    if arguments.what == "table":
        return write_table()
    names = arguments.cases.split("; ") if arguments.cases else [case.name for case in (*SICK, *HEALTHY)]
    for case in (CASES[name] for name in names):
        folder, cpu = arguments.out / name_of(case, arguments.seed), 0.0
        if arguments.what == "run":
            more = [f"policy.path={arguments.smollm}"] if case.recipe == "smollm" else []
            cpu = in_a_process(case, arguments.seed, folder, more)
        if not (folder / "run" / "config.yaml").exists():
            print(f"no run of {case.name}: see {folder}.log", file=sys.stderr)
            continue
        if cpu:
            (folder / "cpu_seconds").write_text(f"{cpu:.1f}")
        elif (folder / "cpu_seconds").exists():
            cpu = float((folder / "cpu_seconds").read_text())
        line = show(case, arguments.seed, judge(folder / "run"), cpu)
        if arguments.lines:
            with arguments.lines.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
