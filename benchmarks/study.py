"""Which correction helps: tune every arm alike, then run what is reported. Continues where it was cut.

    python benchmarks/study.py            # everything that is not in docs/study/*.jsonl yet
    python benchmarks/study.py --jobs 2 --stage tuning

Summaries of finished runs are appended to docs/study/tuning.jsonl and docs/study/reported.jsonl, which are committed;
what is in them is not run again.
"""

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

from jackpot.analysis.compare.process import ArmRun
from jackpot.analysis.compare.scheduler import FAILED, Lines, run_all, runs_at_once
from jackpot.analysis.compare.summary import RunSummary, summarize
from jackpot.analysis.diagnose.collapse import collapse_of
from jackpot.config.recipes import resolve
from jackpot.launch.toy_models import STUDY_MODELS, make_toy_models

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "benchmarks" / "study.yaml"
SUMMARIES = ROOT / "docs" / "study"
RUNS = Path("runs/study")  # the recipe names its models there
PAIRS = ("close", "far")
JOINT = ("none", "only_kl", "tis", "tis_new", "expected", "obrs", "obrs_clip")
FACTORS = (0.5, 1.0, 2.0)  # of the policy's learning rate in the recipe: the grid of every arm
TUNING_SEEDS = (0,)  # reported with other seeds
SEEDS = (101, 102, 103, 104, 105)  # reported; nothing was tuned on them
LAST = 3  # evaluations whose mean decides between learning rates

Cell = tuple[str, str]  # pair and arm; on_policy has no writer and belongs to both pairs


def cells() -> list[Cell]:
    """Everything that is tuned and reported."""
    return [("both", "on_policy"), *itertools.product(PAIRS, ("small_on_policy", *JOINT))]


def overrides(cell: Cell, factor: float) -> list[str]:
    """What makes a run of the recipe's arm one of this cell."""
    pair, arm = cell
    rate = factor * resolve(str(RECIPE), arm, []).policy.optimizer.learning_rate
    settings = [f"policy.optimizer.learning_rate={rate:g}"]
    if arm == "small_on_policy":
        settings.append(f"policy.path={RUNS}/models/{pair}")
    elif pair != "both":
        settings.append(f"rollout_model.path={RUNS}/models/{pair}")
    return settings


def name_of(cell: Cell, factor: float | None = None) -> str:
    """`far/obrs`, and in tuning `far/obrs x2`: what a summary calls its arm."""
    return "/".join(cell) + (f" x{factor:g}" if factor else "")


def make_run(stage: str, cell: Cell, factor: float, seed: int) -> ArmRun:
    """Describe the run of one cell with a learning rate and a seed."""
    config = resolve(str(RECIPE), cell[1], [*overrides(cell, factor), f"seed={seed}"])
    name = f"{'-'.join(cell)}-x{factor:g}-seed{seed}"
    arm = name_of(cell, factor if stage == "tuning" else None)
    log = RUNS / stage / "logs" / f"{name}.log"
    return ArmRun(arm=arm, seed=seed, folder=RUNS / stage / name, log=log, config=config)


def read(stage: str) -> list[RunSummary]:
    path = SUMMARIES / f"{stage}.jsonl"
    return [RunSummary.from_json(line) for line in path.read_text().splitlines()] if path.exists() else []


def run(stage: str, wanted: Sequence[ArmRun], at_once: int | None) -> list[RunSummary]:
    """Run what has no summary yet; each is written down as it ends. A collapsed run is stopped."""
    known = {(one.arm, one.seed) for one in read(stage)}
    missing = [one for one in wanted if (one.arm, one.seed) not in known]
    SUMMARIES.mkdir(parents=True, exist_ok=True)

    def why_to_stop(one: ArmRun, lines: Lines, events: Lines) -> str | None:
        found = collapse_of(lines, events, one.config)
        return f"collapsed: {found.why}" if found else None

    def listen(one: ArmRun, lines: Lines, end: str) -> None:
        if not end or end == FAILED:
            return
        print(f"{stage}: {one.arm}, seed {one.seed}: {end}", flush=True)
        summary = summarize(one.folder, one.arm)
        if summary.is_done:
            with (SUMMARIES / f"{stage}.jsonl").open("a") as file:
                file.write(summary.to_json() + "\n")

    if missing:
        failed = run_all(missing, at_once or runs_at_once(one.config for one in missing), why_to_stop, listen)
        if failed:
            raise SystemExit("\n".join(f"{one.arm}, seed {one.seed} failed: {end}" for one, end in failed.items()))
    return read(stage)


def score(runs: Sequence[RunSummary]) -> float:
    """What decides between learning rates: mean accuracy over seeds and the last evaluations; collapsed counts 0."""
    ends = [[point.policy_accuracy for point in one.points[-LAST:]] for one in runs]
    return sum(0.0 if one.collapse else sum(end) / len(end) for one, end in zip(runs, ends, strict=True)) / len(runs)


def best_factor(tuning: Sequence[RunSummary], cell: Cell) -> float:
    """The factor with the highest score, the smaller of equals."""
    scores = {factor: score([one for one in tuning if one.arm == name_of(cell, factor)]) for factor in FACTORS}
    return max(FACTORS, key=lambda factor: (scores[factor], -factor))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=("tuning",), help="stop after it")
    parser.add_argument("--jobs", type=int, help="runs at once; default as many as cores are free")
    options = parser.parse_args()
    if not all((RUNS / "models" / name).exists() for name in STUDY_MODELS):
        make_toy_models(RUNS / "models", STUDY_MODELS)
    grid = itertools.product(TUNING_SEEDS, cells(), FACTORS)
    tuning = run("tuning", [make_run("tuning", cell, factor, seed) for seed, cell, factor in grid], options.jobs)
    if options.stage != "tuning":
        chosen = {cell: best_factor(tuning, cell) for cell in cells()}
        reported = [make_run("reported", cell, chosen[cell], seed) for seed in SEEDS for cell in cells()]
        run("reported", reported, options.jobs)


if __name__ == "__main__":
    main()
