"""Arms of the quickstart on several seeds: a Markdown table of accuracies before and after.

    python benchmarks/quickstart_seeds.py --arms obrs none on_policy --seeds 101 102 103 --jobs 2

Runs that are already in --folder are continued or read. One thread each, so that --jobs runs disturb each other little.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

JACKPOT = Path(sys.executable).with_name("jackpot")


def train(folder: Path, arm: str, seed: int, overrides: list[str]) -> list[dict]:
    """One run to its end; the lines of its metrics.jsonl."""
    run = folder / f"{arm}-seed{seed}"
    command = [JACKPOT, "train", "quickstart", "--arm", arm, "--run", run, f"seed={seed}", "threads=1", *overrides]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def summary(lines: list[dict]) -> dict[str, float]:
    """Start and end in percent, the highest evaluation, the KL at the end, seconds of training."""
    policy = [100 * line["eval/policy_accuracy"] for line in lines if "eval/policy_accuracy" in line]
    rollout = [100 * line["eval/rollout_model_accuracy"] for line in lines if "eval/policy_accuracy" in line]
    seconds = [line.get("seconds/rollout", 0.0) + line.get("seconds/train", 0.0) for line in lines]
    return {
        "before": policy[0],
        "after": policy[-1],
        "rollout before": rollout[0],
        "rollout after": rollout[-1],
        "KL": lines[-1]["mismatch/kl_rollout_policy"],
        "seconds": sum(seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=["obrs", "none", "on_policy"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[101, 102, 103])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("runs/quickstart-seeds"))
    parser.add_argument("overrides", nargs="*", help="key=value, after --")
    options = parser.parse_args()
    jobs = [(arm, seed) for seed in options.seeds for arm in options.arms]
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = list(pool.map(lambda job: train(options.folder, *job, options.overrides), jobs))
    results = {job: summary(lines) for job, lines in zip(jobs, runs, strict=True)}
    seeds = ", ".join(map(str, options.seeds))
    columns = ["arm", "policy before", f"policy after (seeds {seeds})", "mean (sd)"]
    columns += ["rollout model after", "KL at end", "seconds"]
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for arm in options.arms:
        rows = [results[arm, seed] for seed in options.seeds]
        after = [row["after"] for row in rows]
        spread = f"{statistics.mean(after):.1f} ({statistics.stdev(after) if len(after) > 1 else float('nan'):.1f})"
        cells = [
            " / ".join(f"{row['before']:.1f}" for row in rows),
            " / ".join(f"{value:.1f}" for value in after),
            spread,
            " / ".join(f"{row['rollout after']:.1f}" for row in rows),
            " / ".join(f"{row['KL']:.3f}" for row in rows),
            f"{statistics.mean(row['seconds'] for row in rows):.0f}",
        ]
        print(f"| `{arm}` | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
