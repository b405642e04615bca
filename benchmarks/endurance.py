"""Measures what grows with a run: memory and open files over 1,000 iterations, large replays, long reports.

    OMP_NUM_THREADS=1 python benchmarks/endurance.py [memory equal_rewards replay report]

Writes docs/reliability/measured.json, in which measurements that were not asked for stay, and docs/pictures/memory.png.

    memory          1,000 iterations of examples/own_reward.yaml (two models, reward functions in worker processes) on
                    small batches, with evaluations, checkpoints and saved rollouts
    equal_rewards   500 iterations in which every response gets the same reward: the policy must not move
    replay, report  processor time and peak memory of the commands on 10,240 saved rollouts of the quickstart, and on
                    5,000 lines of metrics: those of 100 iterations, given to the run folder's own writer again

Each measurement is a process of its own. Linux alone.
"""

import argparse
import json
import math
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import transformers
from png import write_png

from jackpot.config.config import Config
from jackpot.config.recipes import resolve
from jackpot.launch.start import launch
from jackpot.models.load import load_model
from jackpot.training.run_folder.folder import RunFolder
from jackpot.training.run_folder.saved_rollouts import list_rollout_files
from jackpot.ui.charts import Chart, Series

ROOT = Path(__file__).parents[1]
MEASURED, PICTURE = ROOT / "docs" / "reliability" / "measured.json", ROOT / "docs" / "pictures" / "memory.png"
SMALL = (
    "threads=1",
    "batch.prompts=2",
    "batch.group_size=3",
    "sampling.max_new_tokens=16",
    "evaluation.every=20",
    "evaluation.problems=8",
    "checkpoint.every=20",
    "rollouts.every=10",
)
WARM_UP = 200  # iterations that the slope leaves out
EVERY = 10  # iterations between two points that are kept
ENTRY = """
import atexit, pathlib, runpy, sys
atexit.register(lambda: sys.stderr.write(pathlib.Path("/proc/self/status").read_text()))
runpy.run_module("jackpot", run_name="__main__", alter_sys=True)
"""  # getrusage would count the memory of the process that started this one, too
Found = dict[str, Any]


def same_reward(**response: object) -> float:
    """Return a number whose mean over a group of three is not itself in float64."""
    return 0.7


def memory(home: Path) -> Found:
    points = watch(resolve("examples/own_reward.yaml", None, [*SMALL, "iterations=1000"]), home)
    late = np.array([(one["iteration"], one["rss_kb"]) for one in points if one["iteration"] >= WARM_UP])
    return {
        "rss_kb_per_iteration": float(np.polyfit(*late.T, deg=1)[0]),
        "open_files": [points[0]["open_files"], points[-1]["open_files"]],
        "points": {name: [one[name] for one in points[::EVERY]] for name in points[0]},
    }


def equal_rewards(home: Path) -> Found:
    rewards = ["iterations=500", "task.rewards=[endurance:same_reward]"]
    config = resolve("examples/own_data.yaml", None, [*SMALL, *rewards])
    points = watch(config, home)
    lines = RunFolder(home).read("metrics.jsonl")[1:]
    before = load_model(config.policy.path, torch.float32).state_dict()
    after = load_model(str(home / "checkpoints" / "last" / "policy"), torch.float32).state_dict()
    late = np.array([(one["iteration"], one["rss_kb"]) for one in points if one["iteration"] >= WARM_UP])
    return {
        "rss_kb_per_iteration": float(np.polyfit(*late.T, deg=1)[0]),
        "policy_is_unchanged": all(torch.equal(before[name], after[name]) for name in before),
        "policy_steps_skipped": sum(line["policy/skipped_steps"] for line in lines),
        "non_finite_steps": sum(line["health/non_finite_steps"] for line in lines),
        "distill_kl": [
            sum(line["rollout_model/distill_kl"] for line in some) / len(some) for some in (lines[:50], lines[-50:])
        ],
    }


def watch(config: Config, folder: Path) -> list[Found]:
    """Train, and return the memory and the open files of this process and its workers after every iteration."""
    this, points = psutil.Process(), []

    def listen(line: dict[str, Any]) -> None:
        everyone = [this, *this.children(recursive=True)]
        points.append(
            {
                "iteration": line["iteration"],
                "rss_kb": this.memory_info().rss // 1024,
                "workers_rss_kb": sum(one.memory_info().rss for one in everyone[1:]) // 1024,
                "open_files": sum(one.num_fds() for one in everyone),
            }
        )

    with closing(launch(config, folder, listen)) as trainer:
        trainer.train()
    return points


def replay(home: Path) -> Found:
    sizes = ["threads=1", "iterations=10", "batch.prompts=128", "rollouts.every=1", "evaluation.problems=8"]
    with closing(launch(resolve("quickstart", None, sizes), home, lambda line: None)) as trainer:
        trainer.train()
    files, _ = list_rollout_files(home)
    counts = {"rollouts": sum(one.responses for one in files), "tokens": sum(one.tokens for one in files)}
    return counts | command("replay", str(home))


def report(home: Path) -> Found:
    with closing(launch(resolve("quickstart", None, [*SMALL, "iterations=100"]), home, lambda line: None)) as trainer:
        trainer.train()
    with closing(RunFolder(home)) as folder:
        folder.rewind(100)
        lines = folder.read("metrics.jsonl")[1:]
        for number in range(101, 5001):
            values = lines[number % len(lines)]
            numbers = {name: math.nan if value is None else value for name, value in values.items()}
            folder.report(number, {name: one for name, one in numbers.items() if name not in ("iteration", "time")})
    found = {"iterations": 5000, "metrics": len(lines[-1])} | command("report", str(home))
    return found | {"page_mb": (home / "report.html").stat().st_size / 1e6}


def command(*arguments: str) -> Found:
    """Run a command of jackpot; its processor time and the most memory that it held."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", ENTRY, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    said = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, said
    seconds = {"cpu_seconds": used.ru_utime + used.ru_stime, "seconds": time.perf_counter() - began}
    return seconds | {"peak_mib": int(re.search(r"VmHWM:\s+(\d+) kB", said)[1]) / 2**10}


def curves(points: dict[str, list[int]]) -> list[Chart]:
    x = points["iteration"]
    memories = [
        Series(name=name, color_index=number, x=x, y=[one / 1024 for one in points[key]])
        for number, (name, key) in enumerate((("training process", "rss_kb"), ("reward workers", "workers_rss_kb")))
    ]
    files = Series(name="open files", x=x, y=points["open_files"])
    return [
        Chart(title="Resident memory", x_label="iteration", y_label="MiB", series=memories),
        Chart(title="Open files, workers included", x_label="iteration", y_label="", series=[files]),
    ]


MEASUREMENTS: dict[str, Callable[[Path], Found]] = {
    one.__name__: one for one in (memory, equal_rewards, replay, report)
}


def measure(name: str) -> Found:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as home:
        return MEASUREMENTS[name](Path(home) / "run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MEASUREMENTS)}; default all")
    os.chdir(ROOT)  # recipes and reward functions of examples/ are found from here
    names = parser.parse_args().names or list(MEASUREMENTS)
    if unknown := set(names) - MEASUREMENTS.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    measured = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    measured["versions"] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpus": os.cpu_count(),
    }
    for name in names:
        with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as process:
            measured[name] = process.submit(measure, name).result()
        print(name, {key: value for key, value in measured[name].items() if key != "points"}, flush=True)
        MEASURED.parent.mkdir(exist_ok=True)
        lines = (f"  {json.dumps(one)}: {json.dumps(found)}" for one, found in measured.items())
        MEASURED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    write_png(PICTURE, curves(measured["memory"]["points"]), columns=2)


if __name__ == "__main__":
    main()
