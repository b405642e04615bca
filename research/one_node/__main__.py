"""Runs the preregistered experiment of README.md beside this file on the GPUs of one machine.

    python -m research.one_node runs/one_node              8 GPUs, node.yaml
    python -m research.one_node runs/one_node --gpus 1     one GPU, the recipe one_gpu
    python -m research.one_node runs/tiny --gpus 2 --tiny  small random models, on CPUs too

The same line goes on where it was cut. First every arm is tried at every rate on a seed of its own, then it trains at
its best one on three others. Each run is a line of results.jsonl; bundle.tar.gz holds the lines and what reads without
weights of every run (`jackpot report`, `compare`, `diagnose`).
"""

import argparse
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from research.runs import finish

HERE = Path(__file__).parent
ARMS = ("on_policy", "none", "tis", "obrs", "annealed")
RATE_OF = {"annealed": "obrs"}  # whose tuned rate an arm takes; tuning ends before it differs from that arm
RATES = (5e-7, 1e-6, 2e-6)  # of both models
TUNING_SEED, SEEDS = 7, (1, 2, 3)
TUNING = ["iterations=50", "evaluation.every=50"]
BUNDLED = ("config.yaml", "environment.json", "metrics.jsonl", "events.jsonl")


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """Return the finished runs of an experiment, a line each."""
    file = folder / "results.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def overrides_of(arm: str, rate: float) -> list[str]:
    """Return the settings of an arm at a learning rate of its models."""
    roles = ("policy",) if arm == "on_policy" else ("policy", "rollout_model")
    return [f"{role}.optimizer.learning_rate={rate:g}" for role in roles]


def final(line: dict[str, Any]) -> float:
    """Return the policy's accuracy at the last evaluation of a run."""
    return line["points"][-1]["policy_accuracy"]


def best_rate(lines: Sequence[dict[str, Any]], arm: str) -> float:
    """Return the rate at which an arm ended best on the tuning seed, the lowest of equal ones."""
    tuned = RATE_OF.get(arm, arm)
    tried = [line for line in lines if line["arm"] == tuned and line["seed"] == TUNING_SEED]
    return max(sorted(tried, key=lambda line: line["rate"]), key=final)["rate"]


def run(folder: Path, arm: str, seed: int, rate: float, gpus: int, more: list[str]) -> None:
    """Train an arm on a seed at a rate, unless it has its line."""
    if any((line["arm"], line["seed"], line["rate"]) == (arm, seed, rate) for line in read_lines(folder)):
        return

    recipe = "one_gpu" if gpus == 1 else str(HERE / "node.yaml")
    name = f"{arm}-rate{rate:g}-seed{seed}"
    line = finish(recipe, arm, seed, [*overrides_of(arm, rate), *more], folder, name, ranks=gpus)
    with (folder / "results.jsonl").open("a") as file:
        file.write(json.dumps(line | {"rate": rate, "gpus": gpus}) + "\n")


def bundle(folder: Path) -> Path:
    """Pack the lines and what reads without weights of every run, and return the file."""
    file = folder / "bundle.tar.gz"
    with tarfile.open(file, "w:gz") as archive:
        archive.add(folder / "results.jsonl", "results.jsonl")
        for metrics in sorted(folder.glob("*/metrics.jsonl")):
            rollouts = sorted(metrics.parent.glob("rollouts/*.parquet"))[-1:]
            for path in [*(metrics.parent / name for name in BUNDLED), *rollouts]:
                if path.exists():
                    archive.add(path, path.relative_to(folder))
    return file


def main() -> None:
    """Run what has no line yet, print where every arm ended, and pack the bundle."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("folder", type=Path, help="folder of the runs, on a disk with room for their checkpoints")
    arguments.add_argument("--gpus", type=int, default=8, help="of this machine, a rank each")
    arguments.add_argument("--tiny", action="store_true", help="small random models, to see that all of it runs here")
    options = arguments.parse_args()

    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    more = ["--tiny"] if options.tiny else []
    for arm in (arm for arm in ARMS if arm not in RATE_OF):
        for rate in RATES:
            run(folder, arm, TUNING_SEED, rate, options.gpus, [*more, *([] if options.tiny else TUNING)])

    chosen = {arm: best_rate(read_lines(folder), arm) for arm in ARMS}
    for seed in SEEDS:
        for arm, rate in chosen.items():
            run(folder, arm, seed, rate, options.gpus, more)

    for arm, rate in chosen.items():
        ends = [final(line) for line in read_lines(folder) if line["arm"] == arm and line["seed"] in SEEDS]
        print(f"{arm:10} rate {rate:g}: " + ", ".join(f"{100 * end:.1f} %" for end in ends))
    print(f"Send us {bundle(folder)}")


if __name__ == "__main__":
    main()
