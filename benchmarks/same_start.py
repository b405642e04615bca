"""Shows that runs begin as they did at an older commit: the metrics of the quickstart's first iterations, compared.

    git worktree add /tmp/old b756030
    python benchmarks/same_start.py /tmp/old                        # obrs, none and on_policy, 5 iterations, seed 101

Every number of metrics.jsonl but times must agree within 1e-5. Exit code 1 where one does not. One thread each.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from fence import Command, is_measured

THIS = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-5  # absolute


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, nargs="+", help="folders of older checkouts")
    parser.add_argument("--arms", default="obrs,none,on_policy")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--seed", type=int, default=101)
    given = parser.parse_args()
    different = 0
    for arm in given.arms.split(","):
        now = start(THIS, arm, given.iterations, given.seed)
        for old in given.old:
            was = start(old.resolve(), arm, given.iterations, given.seed)
            apart = {name: abs(was[name] - now.get(name, float("inf"))) for name in was}
            worst = max(apart, key=apart.__getitem__)
            print(
                f"{arm}, {old}: {len(apart)} numbers, at most {apart[worst]:.1e} apart: {' of iteration '.join(worst)}"
            )
            different += not apart[worst] <= TOLERANCE
    sys.exit(1 if different else 0)


def start(checkout: Path, arm: str, iterations: int, seed: int) -> dict[tuple[str, str], float]:
    """Train the first iterations with the package of a checkout; return every number, by metric and iteration."""
    with tempfile.TemporaryDirectory() as home:
        run = Path(home) / "run"
        short = (f"iterations={iterations}", f"evaluation.every={iterations}", "evaluation.problems=32", "threads=1")
        Command(checkout, Path(home))("train", "quickstart", "--arm", arm, f"seed={seed}", *short, "--run", str(run))
        lines: list[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        (name, str(line["iteration"])): float(value)
        for line in lines
        for name, value in line.items()
        if isinstance(value, int | float) and not is_measured(name)
    }


if __name__ == "__main__":
    main()
