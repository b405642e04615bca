"""Does a policy learn in the FP8 flow as in fp32? Arms of research/unified.yaml on the starter and on its twin with
outliers, over seeds.

    python -m research.unified --plan              # what runs
    python -m research.unified --jobs 2            # all, continued where they were cut
    python -m research.unified --only starter --arms fp32,unified --seeds 101,102 iterations=250
    python -m research.unified --table             # the table of the lines that are there

Each finished run becomes a line of docs/unified.jsonl, which says at which commit of src/, and is not run again at that
commit. A killed run continues from its newest checkpoint. Nothing runs where src/ has changes without a commit, and the
tables do not mix commits.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from jackpot.analysis.compare.process import ArmRun, runs_at_once
from jackpot.analysis.compare.scheduler import FAILED, Lines, run_all
from jackpot.config.recipes import resolve
from jackpot.core.statistics import paired_differences

ROOT = Path(__file__).resolve().parents[1]
RECIPE, RESULTS = ROOT / "research" / "unified.yaml", ROOT / "docs" / "unified.jsonl"
SEEDS = (101, 102, 103, 104, 105)
ARMS = {  # by model
    "starter": ("fp32", "fp8_none", "fp8_tis", "fp8_obrs", "unified"),
    "outliers": ("fp32", "fp8_none", "fp8_tis", "unified"),  # fp32: what a gap is measured from
}
GAPS = {"mean": ("mismatch/engine_gap", fmean), "largest": ("mismatch/engine_gap_max", max)}


def source() -> str:
    """Return the last commit that changed src/, marked where it has changed since."""
    git = lambda *words: subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True)  # noqa: E731
    changed = git("status", "--porcelain", "--untracked-files=no", "--", "src").stdout
    return git("log", "-1", "--format=%h", "--", "src").stdout.strip() + "+" * bool(changed)


def model_of(name: str, runs: Path) -> str:
    """Return the path of a model; the one with outliers is made where it is missing."""
    if name == "starter":
        return "starter:policy"
    folder = runs / "outliers"
    if not (folder / "config.json").exists():
        subprocess.run([sys.executable, str(ROOT / "research" / "outliers.py"), str(folder)], check=True)
    return str(folder)


def described(one: ArmRun, model: str, settings: Sequence[str], lines: Lines, commit: str) -> dict[str, Any]:
    """Return what a finished run is worth: accuracies of the policy in fp32 and of the copy that generates, gaps of all
    iterations, and the number of weight updates after which the digests of codes were equal: others stop a run."""
    first, last = ([line for line in lines if "eval/policy_accuracy" in line][place] for place in (0, -1))
    trained = [line for line in lines if line["iteration"] > 0]
    found: dict[str, Any] = {"model": model, "arm": one.arm, "seed": one.seed, "settings": list(settings)}
    found |= {"source": commit, "iterations": trained[-1]["iteration"]}
    found |= {"start": first["eval/policy_accuracy"], "accuracy": last["eval/policy_accuracy"]}
    found |= {"stderr": last.get("eval/policy_accuracy_stderr"), "copy": last.get("eval/rollout_model_accuracy")}
    for name, (metric, reduce) in GAPS.items():
        values = [line[metric] for line in trained if line.get(metric) is not None]
        found[f"gap, {name}"] = reduce(values)
        if reduce is not max:
            found[f"gap, {name}, worst batch"] = max(values)
    found["updates compared"] = sum(line.get("mismatch/codes_differ") is not None for line in trained)
    phases = [value or 0.0 for line in lines for name, value in line.items() if name.startswith("cpu_seconds/")]
    return found | {"CPU s": round(sum(phases))}


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return accuracy, copy, gaps and the paired difference from fp32, an arm of a model a row, of one commit."""
    head = (
        "model",
        "arm",
        "seeds",
        "right, %",
        "minus fp32",
        "its copy right, %",
        "gap, mean",
        "gap, largest",
        "updates compared",
    )
    rows = [head, ("---",) * len(head)]
    for model, arm in dict.fromkeys((one["model"], one["arm"]) for one in found):
        of = {one["seed"]: one for one in found if (one["model"], one["arm"]) == (model, arm)}
        plain = {one["seed"]: one for one in found if (one["model"], one["arm"]) == (model, "fp32")}
        apart = paired_differences(
            *({seed: 100 * one["accuracy"] for seed, one in runs.items()} for runs in (of, plain))
        )
        error = f" ± {apart.error:.1f}" if apart and apart.error is not None else ""
        rows.append(
            (
                model,
                f"`{arm}`",
                str(len(of)),
                f"{100 * fmean(one['accuracy'] for one in of.values()):.1f}",
                f"{apart.mean:+.1f}{error}" if apart and arm != "fp32" else "-",
                f"{100 * fmean(one['copy'] for one in of.values()):.1f}"
                if all(one["copy"] for one in of.values())
                else "-",
                f"{fmean(one['gap, mean'] for one in of.values()):.1e}",
                f"{max(one['gap, largest'] for one in of.values()):.1e}",
                str(sum(one["updates compared"] for one in of.values())),
            )
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", help="key=value of every run, such as iterations=250")
    parser.add_argument("--plan", action="store_true", help="print what runs and end")
    parser.add_argument("--table", action="store_true", help="print the table of finished runs and end")
    parser.add_argument("--only", choices=ARMS, help="one model")
    parser.add_argument("--arms", help="arms of unified.yaml, with commas; default: those of the comparison")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--jobs", type=int, help="runs at once; default: as many as the machine has free cores for")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "unified")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    texts = options.results.read_text().splitlines() if options.results.exists() else []
    found, seeds = [json.loads(text) for text in texts], [int(one) for one in options.seeds.split(",")]
    if options.table:
        for commit in dict.fromkeys(one["source"] for one in found):
            chosen = (commit, options.settings)
            of = [one for one in found if (one["source"], one["settings"]) == chosen and one["seed"] in seeds]
            print(f"src/ of {commit}\n\n{table(of)}\n")
        return
    commit, wanted = source(), {}
    if commit.endswith("+") and not options.plan:
        raise SystemExit("src/ has changes that are not in a commit, which a result could not name; commit them first")
    done = {
        (one["model"], one["arm"], one["seed"], one["source"]) for one in found if one["settings"] == options.settings
    }
    for seed in seeds:
        for model, arms in ARMS.items():
            if options.only not in (None, model):
                continue
            for arm in options.arms.split(",") if options.arms else arms:
                left = (model, arm, seed, commit) not in done
                print(f"{model:9} {arm:22} seed {seed}  {'runs' if left else 'is finished'}")
                if options.plan or not left:
                    continue
                overrides = [f"policy.path={model_of(model, options.runs)}", f"seed={seed}", "threads=1"]
                config = resolve(str(RECIPE), arm, [*overrides, *options.settings])
                name = "-".join([model, arm, f"seed{seed}", *options.settings]).replace("/", "_")
                folder = options.runs / commit / name
                one = ArmRun(arm=arm, seed=seed, folder=folder, log=folder.with_suffix(".log"), config=config)
                wanted[folder] = (model, one)
    if options.plan or not wanted:
        return

    def listen(one: ArmRun, lines: Lines, end: str) -> None:
        if not end or end == FAILED:
            return
        model = wanted[one.folder][0]
        print(f"{model}, {one.name}: {end}", flush=True)
        with options.results.open("a") as file:
            file.write(json.dumps(described(one, model, options.settings, lines, commit)) + "\n")

    runs = [one for _, one in wanted.values()]
    at_once = options.jobs or runs_at_once(one.config for one in runs)
    if failed := run_all(runs, at_once, lambda one, lines, events: None, listen):
        raise SystemExit("\n".join(f"{one.name} failed: {end}" for one, end in failed.items()))


if __name__ == "__main__":
    main()
