"""A whole GRPO step, ours against TRL's GRPOTrainer: prompts, writing, rewards, loss, backward, AdamW, weights sent.

    OMP_NUM_THREADS=1 python benchmarks/step.py --peer .venv-peers/bin/python --repetitions 3 > step.md

`make .venv-peers/ready` makes the peer's environment. The same model (Qwen3, hidden 256, 4 layers, 4,096 words, tied,
4.2 M parameters, random), the same prompts of 36 to 53 tokens, 8 responses each of at most 64 tokens, the same reward,
learning rate and micro-batches of 64 sequences, float32. `joint` is ours with a second model of the same size: the one
writes, both are trained. Sides take turns, each in a process of its own. A step is the CPU seconds between two steps'
ends, the first two left out; memory is the process's peak, and that above what it had before its first step.
"""

import argparse
import platform
import statistics
import sys
import tempfile
from pathlib import Path

from interleaved import Result, cell, measure, table

HERE = Path(__file__).parent
SIDES = ("TRL", "ours", "ours, joint")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", required=True, help="the Python with TRL")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5, help="of each process; the first two are not counted")
    options = parser.parse_args()
    results: dict[str, list[Result]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        job = {"folder": folder, "prompts": options.prompts, "new_tokens": options.new_tokens, "steps": options.steps}
        measure(HERE / "step_ours.py", job | {"what": "models"})
        for _ in range(options.repetitions):
            results["TRL"].append(measure(HERE / "step_trl.py", job, options.peer))
            results["ours"].append(measure(HERE / "step_ours.py", job | {"what": "on_policy"}))
            results["ours, joint"].append(measure(HERE / "step_ours.py", job | {"what": "joint"}))
    base = {name: statistics.median(one[name] for one in results["TRL"]) for name in ("step", "peak_mib", "own_mib")}
    rows = [
        (
            side,
            cell(one["step"] for one in of_side),
            cell((base["step"] / one["step"] for one in of_side), 2),
            cell((one["tokens"] / one["step"] for one in of_side), 0),
            cell((one["peak_mib"] for one in of_side), 0),
            cell((one["own_mib"] for one in of_side), 0),
            f"{statistics.median(one['own_mib'] for one in of_side) / base['own_mib']:.2f}",
        )
        for side, of_side in results.items()
    ]
    columns = ("", "step, CPU s", "times faster", "tokens / CPU s", "peak RSS, MiB", "of it its own", "of TRL's")
    table(columns, rows)
    versions = {name: value for one in results.values() for name, value in one[0].items() if isinstance(value, str)}
    print(", ".join(f"{name} {value}" for name, value in versions.items()), platform.machine(), file=sys.stdout)


if __name__ == "__main__":
    main()
