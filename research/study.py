"""Which way reaches on-policy accuracy for the least rollout FLOPs: tune every arm alike, then run what is reported.

    python -m research.study --plan          # what runs, and how many core-hours it takes
    python -m research.study                 # all panels, continued where they were cut
    python -m research.study --panel first --jobs 2

Each finished run becomes a line of docs/study/PANEL.jsonl, or of docs/study/tuning.jsonl, which are committed; what is
in them is not run again. All lines of a file are of code that computes the same (research/reference.py).
"""

import argparse
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import jackpot
from jackpot.analysis.compare.process import ArmRun, runs_at_once
from jackpot.analysis.compare.scheduler import FAILED, Lines, run_all
from jackpot.analysis.compare.summary import EvaluationPoint, RunSummary, summarize
from jackpot.analysis.diagnose.collapse import Collapse, collapse_of
from jackpot.config.arms import build_config
from jackpot.config.changes import fixed_changes, settings_of
from jackpot.config.config import Config
from jackpot.config.corrections import WITH_PROXIMAL
from jackpot.config.recipes import resolve
from jackpot.config.schedules import ShareSchedule
from jackpot.core.statistics import Interval, Sample, student_t
from research.reference import ROOT, digest_of, git, still_holds
from tools.toy_models import HARD_MODELS, STUDY_MODELS, make_toy_models

RECIPE = ROOT / "research" / "study.yaml"
FACTORS = (0.5, 1.0, 2.0)  # of the policy's learning rate in the recipe: the grid of every arm
TUNING_SEED = 0  # reported with other seeds
SEEDS = (101, 102, 103, 104, 105)  # reported; nothing was tuned on them
FEW = SEEDS[:3]
MANY = tuple(range(201, 225))  # of the panel `power`
TWELVE = tuple(range(301, 313))  # of the panel `hard`
ALONE = "alone"  # in place of a pair's name, where there is no rollout model
LONG = 250  # iterations: 1,000 optimizer steps


def interval_of(sample: Sample) -> Interval:
    """The mean of a sample with its confidence interval by Student's t; without bounds for a single value."""
    mean, error = sample.mean, sample.error
    if error is None:
        return Interval(mean, None, None)

    half = student_t(len(sample.values) - 1) * error
    return Interval(mean, mean - half, mean + half)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One arm of the recipe, with one rollout model."""

    pair: str  # a rollout model of STUDY_MODELS or HARD_MODELS, or ALONE
    policy: str = "policy"  # of the same
    arm: str
    rate_of: "Cell | None" = None  # the cell whose learning rate it takes; None: it is tuned itself
    times: float = 1.0  # factor of that learning rate
    iterations: int | None = None  # None: those of the recipe
    seeds: tuple[int, ...] = SEEDS

    @property
    def name(self) -> str:
        """`far/obrs`, `alone/stale_64_clip x2`, `far/none 250`: what a summary calls its arm."""
        times = f" x{self.times:g}" if self.times != 1.0 else ""
        return f"{self.pair}/{self.arm}{times}" + (f" {self.iterations}" if self.iterations else "")

    @property
    def tuned(self) -> "Cell":
        """The cell that decides the learning rate."""
        return self.rate_of or self


@dataclass(frozen=True, kw_only=True)
class Finished:
    """One line of a results file."""

    source: str  # commit of src/
    run: RunSummary
    draft_acceptance: float | None = None  # mean over iterations; None without drafts
    reference: str = ""  # digest of the code (research/reference.py); lines of the first edition have none

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "run": json.loads(self.run.to_json())})

    @classmethod
    def from_json(cls, text: str) -> "Finished":
        fields = json.loads(text)
        return cls(**{**fields, "run": read_summary(json.dumps(fields["run"]))})


def read_summary(text: str) -> RunSummary:
    """Read a line of `RunSummary.to_json`."""
    fields = json.loads(text)
    fields["points"] = tuple(EvaluationPoint(**point) for point in fields["points"])
    fields["collapse"] = Collapse(**fields["collapse"]) if fields["collapse"] else None
    return RunSummary(**fields)


def cells(pair: str, *arms: str) -> list[Cell]:
    return [Cell(pair=pair, arm=arm) for arm in arms]


ON_POLICY = Cell(pair=ALONE, arm="on_policy")
JOINT = ("none", "tis", "obrs", "expected", "prefix", "dppo_topk")
ANNEALED = ("annealed_none", "annealed_tis", "annealed_obrs", "annealed_expected", "annealed_half", "annealed_linear")
FIRST = (*JOINT, *ANNEALED, "frozen_annealed", "mixed_quarter", "mixed_half")
GAP = ("none", "tis", "expected", "annealed_expected", "mixed_half")
STALE = ("clip", "tis_adjusted", "obrs", "expected", "mask_only", "weight_only")
FOREIGN = ("foreign_none", "foreign_tis", "foreign_obrs")
ABLATION = ("lam_0.8", "lam_0.9", "lam_1.1", "lam_1.2", "c1_2", "c1_4", "c1_8", "k_10", "k_32")
POWER = ("none", "tis", "obrs", "annealed_none", "annealed_obrs")
HARD = ("hard_none", "hard_tis", "hard_obrs", "hard_annealed_none", "hard_annealed_tis")
FAR_OBRS = Cell(pair="far", arm="obrs")


def drafted(pair: str) -> Cell:
    """Its accuracy is on_policy's; only its cost is measured, on one seed."""
    return Cell(pair=pair, arm="drafted", rate_of=ON_POLICY, seeds=SEEDS[:1])


def twice(those: Iterable[Cell]) -> list[Cell]:
    """The same at twice the tuned learning rate, each behind its own."""
    return [one for cell in those for one in (cell, Cell(pair=cell.pair, arm=cell.arm, rate_of=cell, times=2.0))]


def stale(staleness: int) -> list[Cell]:
    return twice(cells(ALONE, *(f"stale_{staleness}_{arm}" for arm in STALE)))


def powered(pair: str) -> list[Cell]:
    """Arms that decide the target, with many seeds at the rates of `first`; the annealed ones a quarter longer too."""
    those = [Cell(pair=pair, arm=arm, rate_of=Cell(pair=pair, arm=arm), seeds=MANY) for arm in POWER]
    return those + [replace(cell, iterations=100) for cell in those if cell.arm.startswith("annealed")]


def hard() -> list[Cell]:
    """Arms of hard problems with dynamic sampling, where rollouts are three quarters of on-policy's FLOPs."""
    alone = Cell(pair=ALONE, policy="large", arm="hard_on_policy", seeds=TWELVE)
    those = [Cell(pair="small", policy="large", arm=arm, seeds=TWELVE) for arm in HARD]
    return [alone, *those, Cell(pair="small", policy="large", arm="hard_drafted", rate_of=alone, seeds=TWELVE[:1])]


PANELS: dict[str, list[Cell]] = {
    "first": [
        ON_POLICY,
        *cells("close", *FIRST),
        drafted("close"),
        *cells("far", *FIRST),
        drafted("far"),
    ],
    "gap": [*cells("gap", *GAP), drafted("gap")],
    "stale": [*stale(64), *stale(128)],
    "foreign": twice(cells("far", *FOREIGN)),
    "ablation": [Cell(pair="far", arm=arm, rate_of=FAR_OBRS, seeds=FEW) for arm in ABLATION],
    "long": [],  # known once `first` is: `long_cells`
    "power": [replace(ON_POLICY, rate_of=ON_POLICY, seeds=MANY), *powered("close"), *powered("far")],
    "hard": hard(),
}
CUT = (
    "stale: TIS towards the old policy, which generated the rollouts itself: its weights are 1, it is clip",
    "ablation: no tuning of its own, all at the rate of far/obrs; lam 1, c1 3 and k 20 are far/obrs of `first`",
    "drafted: one seed at on_policy's rate, for its cost",
    "long: one pair, far, at the rates of `first`",
)

# Processor seconds of short runs, one thread of two busy vCPU (AMD EPYC).
GENERATE = {"policy": 0.14, "rollout_model": 0.09, "drafted": 0.28}  # 256 rollouts, or a part of them
TRAIN = {"policy": 0.50, "both": 0.62, "frozen": 0.54}  # on 256, in four steps
STEP = 0.06  # what each further step on them adds
EVALUATE = {"policy": 1.7, "rollout_model": 1.2}  # 2,048 answers
START = 4.0  # a process and its models
LARGE = 5.0  # times as many with the larger policy and dynamic sampling


def seconds(config: Config) -> float:
    """Estimate the processor seconds of a run."""
    batches, total = config.batch.rollouts / 256, START
    more = STEP * (config.batch.steps_per_iteration / batches - 4)
    for iteration in range(1, config.iterations + 1):
        trained = "policy"
        if config.uses_rollout_model(iteration):
            trained = "both" if config.rollout_model.optimizer else "frozen"
        writers = ("drafted",) if config.draft else config.writers(iteration)
        total += batches * (TRAIN[trained] + more + sum(GENERATE[writer] for writer in writers))
    times = config.iterations // config.evaluation.every + 1
    roles = ("policy", "rollout_model") if config.rollout_model else ("policy",)
    return total + times * config.evaluation.problems / 2048 * sum(EVALUATE[role] for role in roles)


@dataclass(frozen=True, kw_only=True)
class Study:
    """Where the study stands, and what runs."""

    results: Path  # folder of the jsonl files
    runs: Path  # folder of models and run folders
    source: str  # commit of src/
    reference: str = ""  # digest of the code
    overrides: tuple[str, ...] = ()  # of every run, for tests

    def config(self, cell: Cell, factor: float, seed: int, is_tuning: bool) -> Config:
        """Settings of one run. Tuning evaluates at the half and at the end."""
        base = recipe_of(cell.arm)
        rate = factor * cell.times * base.policy.optimizer.learning_rate
        settings = [
            f"policy.path={self.runs}/models/{cell.policy}",
            f"policy.optimizer.learning_rate={rate:g}",
            f"seed={seed}",
        ]
        if cell.pair != ALONE:
            settings.append(f"rollout_model.path={self.runs}/models/{cell.pair}")
        if is_tuning:
            settings.append(f"evaluation.every={max(1, base.iterations // 2)}")
        if cell.iterations:
            settings += stretched(base, cell.iterations)
        return resolve(str(RECIPE), cell.arm, [*settings, *self.overrides])

    def run_of(self, panel: str, cell: Cell, factor: float, seed: int) -> ArmRun:
        """Describe one run; with the panel `tuning`, its learning rate is one of the grid."""
        config = self.config(cell, factor, seed, panel == "tuning")
        arm = tuning_name(cell, factor) if panel == "tuning" else cell.name
        folder = self.runs / self.source[:12] / panel
        name = f"{arm.replace('/', '-').replace(' ', '-')}-seed{seed}"
        return ArmRun(arm=arm, seed=seed, folder=folder / name, log=folder / "logs" / f"{name}.log", config=config)

    def read(self, panel: str) -> list[Finished]:
        """Finished runs of a panel, or of the tuning."""
        path = self.results / f"{panel}.jsonl"
        return [Finished.from_json(line) for line in path.read_text().splitlines()] if path.exists() else []

    def check(self, panel: str, wanted: Sequence[ArmRun]) -> None:
        """Refuse to add runs to those of code that computes something else, and runs of other settings."""
        path, runs = self.results / f"{panel}.jsonl", {(run.arm, run.seed): run for run in wanted}
        lines = self.read(panel)
        is_whole = runs.keys() <= {(line.run.arm, line.run.seed) for line in lines}
        for one in lines:
            if not is_whole and not still_holds(one.source, one.reference, self.reference):
                raise SystemExit(
                    f"{path} has runs of src/ at {one.source}, which computed something else than src/ does now; go on "
                    f"from there: git worktree add ../study {one.source}, and in it git checkout {current_branch()} -- "
                    f"research docs/study. Or remove the file and begin it anew."
                )
            same = runs.get((one.run.arm, one.run.seed))
            if same and (other := fixed_changes(Config, filled(one.run.settings), settings_of(same.config))):
                raise SystemExit(
                    f"{path} has {same.name} with other settings than research/study.yaml gives it now "
                    f"({'; '.join(map(str, other))}); remove its line to run it again, or take back the change."
                )

    def tuning_runs(self, panel: str) -> list[ArmRun]:
        """Every learning rate of every cell that decides one."""
        tuned = dict.fromkeys(cell.tuned for cell in self.cells(panel))
        return [self.run_of("tuning", cell, factor, TUNING_SEED) for cell in tuned for factor in FACTORS]

    def reported_runs(self, panel: str) -> list[ArmRun]:
        """Every cell with its learning rate, seed by seed."""
        tuning, those = self.read("tuning"), self.cells(panel)
        rates = {cell: best_factor(tuning, cell.tuned) for cell in those}
        seeds = sorted({seed for cell in those for seed in cell.seeds})
        return [self.run_of(panel, cell, rates[cell], seed) for seed in seeds for cell in those if seed in cell.seeds]

    def cells(self, panel: str) -> list[Cell]:
        """Cells of a panel; `long` has none before `first` is complete."""
        return long_cells(self.read("first")) if panel == "long" else PANELS[panel]

    def is_complete(self, panel: str) -> bool:
        """Return whether every run of a panel is finished."""
        finished = {(one.run.arm, one.run.seed) for one in self.read(panel)}
        wanted = {(cell.name, seed) for cell in self.cells(panel) for seed in cell.seeds}
        return bool(wanted) and wanted <= finished

    def run(self, panel: str, wanted: Sequence[ArmRun], at_once: int | None) -> None:
        """Run what has no line yet; each is written down as it ends. A collapsed run is stopped."""
        self.check(panel, wanted)
        known = {(one.run.arm, one.run.seed) for one in self.read(panel)}
        missing = [one for one in wanted if (one.arm, one.seed) not in known]
        self.results.mkdir(parents=True, exist_ok=True)

        def listen(one: ArmRun, lines: Lines, end: str) -> None:
            if not end or end == FAILED:
                return
            print(f"{panel}: {one.name}: {end}", flush=True)
            summary = summarize(one.folder, one.arm)
            if summary.is_done:
                accepted = [line["draft/acceptance"] for line in lines if line.get("draft/acceptance") is not None]
                drafted = fmean(accepted) if accepted else None
                line = Finished(
                    source=self.source, run=summary, draft_acceptance=drafted, reference=self.reference
                ).to_json()
                with (self.results / f"{panel}.jsonl").open("a") as file:
                    file.write(line + "\n")
                shutil.rmtree(one.folder / "checkpoints", ignore_errors=True)  # metrics and rollouts stay

        for one in missing:
            if not (one.folder / "checkpoints").exists():  # killed before its first one, or its line was removed
                shutil.rmtree(one.folder, ignore_errors=True)
        if missing:
            failed = run_all(missing, at_once or runs_at_once(one.config for one in missing), why_to_stop, listen)
            if failed:
                raise SystemExit("\n".join(f"{one.name} failed: {end}" for one, end in failed.items()))

    def plan(self, panels: Iterable[str]) -> tuple[str, float]:
        """The table of what runs, and its core-hours, finished runs included."""
        rows, total, tuned = [], 0.0, set()
        for panel in panels:
            for cell in self.cells(panel) or planned_long_cells():
                grid = () if cell.tuned in tuned else FACTORS
                tuned.add(cell.tuned)
                times = LARGE if cell.policy == "large" else 1.0
                tuning = len(grid) * seconds(self.config(cell.tuned, 1.0, TUNING_SEED, True)) if grid else 0.0
                reported = len(cell.seeds) * seconds(self.config(cell, 1.0, TUNING_SEED, False))
                hours = times * (tuning + reported) / 3600
                rows.append(f"{panel:9} {cell.name:34} {len(grid):6} {len(cell.seeds):8} {hours:10.2f}")
                total += hours
        done = sum(len(self.read(panel)) for panel in ("tuning", *panels))
        head = f"{'panel':9} {'arm':34} tuning reported core-hours"
        end = f"{total:.1f} core-hours in all, estimated; {done} runs are finished"
        return "\n".join((head, *rows, end, "Cut:", *(f"  {line}" for line in CUT))), total


@cache
def recipe_of(arm: str) -> Config:
    """Settings of an arm of the recipe as it stands."""
    return resolve(str(RECIPE), arm, [])


def filled(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Name a correction as today, and add the defaults of settings that were not there yet when a run finished.

    `guard.rollback`, which all of these runs left at null, is not a setting any more.
    """
    objective = settings["objective"]
    correction = objective["correction"]
    now = correction | WITH_PROXIMAL.get(correction["name"], {})
    guard = {name: value for name, value in settings["guard"].items() if name != "rollback"}
    return settings_of(build_config({**settings, "guard": guard, "objective": {**objective, "correction": now}}))


def why_to_stop(one: ArmRun, lines: Lines, events: Lines) -> str | None:
    """Stop a run that has collapsed."""
    found = collapse_of(lines, events, one.config)
    return f"collapsed: {found.why}" if found else None


def stretched(base: Config, iterations: int) -> list[str]:
    """Settings of a run of more iterations, in which the share's schedule ends at the same part of the run."""
    settings = [f"iterations={iterations}", f"evaluation.every={iterations // 5}"]
    share = base.rollout_model and base.rollout_model.share
    if isinstance(share, ShareSchedule):
        for name in ("hold", "until"):
            if getattr(share, name) is not None:
                settings.append(
                    f"rollout_model.share.{name}={round(getattr(share, name) * iterations / base.iterations)}"
                )
    return settings


def tuning_name(cell: Cell, factor: float) -> str:
    """`far/obrs at x0.5`: what a summary of the tuning calls its arm."""
    return f"{cell.name} at x{factor:g}"


def score(runs: Sequence[Finished]) -> float:
    """What decides between learning rates: the mean of the last accuracies; collapsed counts 0."""
    return fmean(0.0 if one.run.collapse else one.run.last.policy_accuracy for one in runs)


def best_factor(tuning: Sequence[Finished], cell: Cell) -> float:
    """The factor with the highest score, the smaller of equals."""
    scores = {factor: score([one for one in tuning if one.run.arm == tuning_name(cell, factor)]) for factor in FACTORS}
    return max(FACTORS, key=lambda factor: (scores[factor], -factor))


def mean_last(runs: Sequence[Finished], name: str, what: str) -> float:
    """Mean over seeds of a quantity of a cell's last evaluations."""
    return fmean(getattr(one.run.last, what) for one in runs if one.run.arm == name)


def long_cells(first: Sequence[Finished]) -> list[Cell]:
    """`none`, and the most accurate arm of the far pair for half of on_policy's rollout FLOPs or less."""
    arms = [cell for cell in PANELS["first"] if cell.pair == "far" and cell.arm != "drafted"]
    if not {cell.name for cell in (*arms, ON_POLICY)} <= {one.run.arm for one in first}:
        return []
    limit = 0.5 * mean_last(first, ON_POLICY.name, "flops")
    cheap = [cell for cell in arms if mean_last(first, cell.name, "flops") <= limit]
    best = max(cheap, key=lambda cell: mean_last(first, cell.name, "policy_accuracy"))
    return [long_cell("none"), long_cell(best.arm)]


def planned_long_cells() -> list[Cell]:
    """Stand-ins for `long_cells` before `first` is complete."""
    return [long_cell("none"), long_cell("annealed_expected")]


def long_cell(arm: str) -> Cell:
    return Cell(pair="far", arm=arm, rate_of=Cell(pair="far", arm=arm), iterations=LONG, seeds=FEW)


def current_branch() -> str:
    return git("rev-parse", "--abbrev-ref", "HEAD")


def source_commit() -> str:
    """Return the commit that last changed src/; refuse a src/ that no commit has, or that is not imported."""
    if Path(jackpot.__file__).resolve().parents[1] != ROOT / "src":
        raise SystemExit(
            f"jackpot comes from {jackpot.__file__}, not from {ROOT / 'src'}; set PYTHONPATH={ROOT / 'src'}"
        )
    if changed := git("status", "--porcelain", "--", "src"):
        raise SystemExit(f"src/ differs from its commit, and every run names one; commit or take back:\n{changed}")
    return git("log", "-1", "--format=%H", "--", "src")


def committed() -> Study:
    """The study whose results are in docs/study/; without its commit of src/, which only running it needs."""
    return Study(results=ROOT / "docs" / "study", runs=Path("runs/study"), source="")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--panel", action="append", choices=PANELS, help="only this one; may be given again")
    parser.add_argument("--jobs", type=int, help="runs at once; default as many as cores are free")
    parser.add_argument("--plan", action="store_true", help="print the plan and stop")
    options = parser.parse_args()
    os.chdir(ROOT)  # the recipe names its models from there
    study, panels = committed(), options.panel or list(PANELS)
    print(study.plan(panels)[0], flush=True)
    if options.plan:
        return
    study = replace(study, source=source_commit(), reference=digest_of(ROOT))
    models = STUDY_MODELS | HARD_MODELS
    missing = {name: spec for name, spec in models.items() if not (study.runs / "models" / name).exists()}
    make_toy_models(study.runs / "models", missing)
    for panel in panels:
        if panel == "long" and not study.is_complete("first"):
            raise SystemExit("`long` takes the best arm of `first`, which is not complete; run that panel first")
        study.run("tuning", study.tuning_runs(panel), options.jobs)
        study.run(panel, study.reported_runs(panel), options.jobs)


if __name__ == "__main__":
    main()
