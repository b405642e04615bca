"""The quickstart's training against that of an older commit, interleaved, every run in a process of its own.

    git worktree add /tmp/old 77fa673
    python benchmarks/quickstart.py /tmp/old                                      # 60 iterations, three times
    python benchmarks/quickstart.py /tmp/old --iterations 250 --seeds 1 2 3 --threads 2    # the same learning?

CPU seconds mean something on a busy machine too, seconds of the clock and several threads on an idle one only.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean, median

from interleaved import MARK, cell, measure, table

HERE = Path(__file__).resolve()
THIS = str(HERE.parents[1])


def work(job: dict) -> None:
    """Train the quickstart with the package of one checkout; start-up is all before the loop."""
    sys.path.insert(0, f"{job['checkout']}/src")
    import jackpot
    from jackpot.launch.start import launch

    assert Path(jackpot.__file__).is_relative_to(job["checkout"])
    try:
        from jackpot.config.recipes import resolve
    except ImportError:  # commit 77fa673
        from jackpot.recipes import resolve

    lines = []
    overrides = [f"{name}={job[name]}" for name in ("iterations", "threads", "seed")]
    with tempfile.TemporaryDirectory() as folder:
        trainer = launch(resolve("quickstart", None, overrides), Path(folder), lines.append)
        start, since = time.process_time(), time.perf_counter()
        trainer.train()
        result = {"start": start, "cpu": time.process_time() - start, "wall": time.perf_counter() - since}
        trainer.close()
    print(MARK + json.dumps(result | {"accuracy": lines[-1]["eval/policy_accuracy"]}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, help="folder of the older checkout")
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 0, 0], help="one run of each a side")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    args = parser.parse_args()
    sides = {"old": str(args.old.resolve()), "new": THIS}
    found = {(side, threads): [] for threads in args.threads for side in sides}
    for seed in args.seeds:
        for side, threads in found:
            job = {"checkout": sides[side], "iterations": args.iterations, "threads": threads, "seed": seed}
            found[side, threads].append(measure(HERE, job))
    table(
        ["checkout, threads", "start-up, CPU s", "training, CPU s", "training, s", "accuracy, mean"],
        [
            [
                f"{side}, {threads}",
                *(cell(one[name] for one in runs) for name in ("start", "cpu", "wall")),
                f"{mean(one['accuracy'] for one in runs):.1%}",
            ]
            for (side, threads), runs in found.items()
        ],
    )

    def medians(name: str, side: str) -> list[float]:
        return [median(one[name] for one in found[side, threads]) for threads in args.threads]

    print(
        f"old / new, CPU seconds: {medians('cpu', 'old')[0] / medians('cpu', 'new')[0]:.2f}, threads: {args.threads[0]}"
    )
    wall = min(medians("wall", "old")) / min(medians("wall", "new"))
    print(f"old / new, seconds of the clock: {wall:.2f}, each at its better number of threads")


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        work(json.loads(sys.argv[1]))
    else:
        main()
