"""Runs arms of a recipe on several seeds, each as one line of a committed file.

    python -m research.runs smollm docs/smollm.jsonl --arms on_policy,obrs --seeds 1,2,3 policy.path=FOLDER

A line says the commit, the machine, what it cost (wall and CPU seconds, rollout and all FLOPs), and every evaluation. A
run that has its line is not run again; one that was cut goes on from its checkpoint. The runs take the code from a
worktree of the commit they began with, so that the source may be edited meanwhile. Overrides are part of what a line is
of, but for those of paths, which differ between machines.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from jackpot.analysis.compare.summary import summarize
from research.reference import digest_of, git

reference_of = cache(digest_of)


def frozen_source(folder: Path) -> tuple[str, Path]:
    """Return the commit that a folder of runs is of, and a worktree of it; a new folder is of the newest commit."""
    source = folder / "source"
    if not source.exists():
        git("worktree", "add", "--detach", str(source), "HEAD")
    return git("rev-parse", "HEAD", folder=source), source


def key_of(recipe: str, arm: str, seed: int, overrides: list[str]) -> dict[str, Any]:
    """Return what makes a run the same run on any machine."""
    return {"recipe": recipe, "arm": arm, "seed": seed, "overrides": [one for one in overrides if ".path=" not in one]}


def processor() -> str:
    """Return the processor's name and the number of cores that this process may use."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = names[0].partition(":")[2].strip() if names else platform.processor()
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def finish(
    recipe: str, arm: str, seed: int, overrides: list[str], runs: Path, name: str = "", ranks: int = 1
) -> dict[str, Any]:
    """Train a run to its end in processes of its own, and return its line.

    Args:
        name: of its folder in `runs`; empty: arm and seed.
        ranks: processes of torchrun that train.
    """
    commit, source = frozen_source(runs)
    folder = runs / (name or f"{arm}-seed{seed}")
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "--", "jackpot"]
    launcher = [sys.executable, *(torchrun if ranks > 1 else ["-m", "jackpot"])]
    command = [*launcher, "train", recipe, "--arm", arm, "--run", str(folder), f"seed={seed}"]
    paths = os.pathsep.join([str(source / "src"), str(source)])
    subprocess.run([*command, *overrides], check=True, env=os.environ | {"PYTHONPATH": paths})

    summary = summarize(folder, arm)
    last = summary.last
    cost = {
        "seconds": last.seconds,
        "cpu_seconds": last.cpu_seconds,
        "rollout_flops": last.flops,
        "all_flops": last.flops + last.training_flops,
    }
    return {
        **key_of(recipe, arm, seed, overrides),
        "commit": commit,
        "reference": reference_of(source),
        "machine": processor(),
        "threads": summary.environment["threads"],
        "torch": summary.environment.get("torch"),
        **cost,
        "problems": summary.problems,
        "sampling": summary.sampling,
        "points": [asdict(point) for point in summary.points],
    }


def main() -> None:
    """Run what the command line names and has no line yet."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("recipe")
    arguments.add_argument("lines", type=Path, help="file that gets a line for each run")
    arguments.add_argument("overrides", nargs="*", help="settings of all runs as key=value")
    arguments.add_argument("--arms", required=True, help="separated by commas")
    arguments.add_argument("--seeds", required=True, help="separated by commas; those that nothing was tuned on")
    arguments.add_argument("--runs", type=Path, default=Path("runs/research"), help="folder of the runs")
    options = arguments.parse_intermixed_args()

    options.runs.mkdir(parents=True, exist_ok=True)
    known = [json.loads(line) for line in options.lines.read_text().splitlines()] if options.lines.exists() else []
    for seed in map(int, options.seeds.split(",")):
        for arm in options.arms.split(","):
            key = key_of(options.recipe, arm, seed, options.overrides)
            if any(key.items() <= line.items() for line in known):
                print(f"{arm}, seed {seed}: has its line")
                continue
            line = finish(options.recipe, arm, seed, options.overrides, options.runs.resolve())
            with options.lines.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
