"""Write docs/study.md and its pictures from the summaries of the runs: python benchmarks/study_page.py

What is prose stands in benchmarks/study_page.md; every number on the page is computed here from docs/study/*.jsonl, and
a name in braces in the prose is one of those: {close[obrs]} is an accuracy, {close[obrs-none]} a paired difference.
"""

from collections.abc import Sequence
from dataclasses import replace

from study import FACTORS, JOINT, PAIRS, ROOT, SEEDS, TUNING_SEEDS, best_factor, cells, name_of, read, score

from jackpot.analysis.compare.comparison import ArmRow, Comparison, SeedSpread, compare
from jackpot.analysis.compare.summary import RunSummary
from jackpot.launch.toy_models import STUDY_MODELS, ToyModelSpec, make_meta_model
from jackpot.models.cost import forward_cost
from jackpot.ui.png import write_png
from jackpot.ui.views.comparison import comparison_charts, cost_cells, difference_cells, percent

TEMPLATE = ROOT / "benchmarks" / "study_page.md"
PAGE = ROOT / "docs" / "study.md"
PICTURES = ROOT / "docs" / "pictures"
ACCURACIES = (0.6, 0.7)  # that costs are counted to
STEPS = (  # what one change is worth: the arm with it, the arm without it
    ("tis", "none", "weights, at most 3"),
    ("tis_new", "tis", "target new in place of old, and no clip"),
    ("expected", "tis_new", "weights times Z"),
    ("obrs", "expected", "the Bernoulli mask in place of its expectation"),
    ("obrs", "tis", "all of OBRS against TIS"),
    ("obrs", "none", "all of OBRS"),
    ("obrs_clip", "obrs", "the clip of PPO on top"),
    ("only_kl", "none", "the rollout model learns by distillation alone"),
    ("obrs", "on_policy", "what is left to on-policy"),
)
ARMS = ("on_policy", "small_on_policy", *JOINT)  # their order in tables
Row = Sequence[str]


class Pair:
    """The reported runs of one pair of models, named by their arm alone, and their numbers as text."""

    def __init__(self, name: str, runs: Sequence[RunSummary]) -> None:
        mine = [replace(run, arm=arm) for run in runs for pair, arm in [run.arm.split("/")] if pair in (name, "both")]
        self.name = name
        self.runs = sorted(mine, key=lambda run: ARMS.index(run.arm))

    def __getitem__(self, key: str) -> str:
        """`obrs`: its accuracy. `obrs-none`: a paired difference. `obrs/none@0.6`: rollout FLOPs to 60 %, as a share.
        `obrs@0.6`: how many seeds got there."""
        arm, _, other = key.partition("-")
        if other:
            points, seeds = difference_cells(self.row(arm, baseline=other).difference)
            return f"{points} points ({seeds} seeds)"
        if "@" in key:
            arms, _, accuracy = key.partition("@")
            arm, _, other = arms.partition("/")
            cost = next(row.cost for row in self.compare(accuracy=float(accuracy)).rows if row.arm == arm)
            return self.share(arm, other, float(accuracy)) if other else f"{cost.reached} of {cost.of}"
        return percent(self.row(arm).after)

    def compare(self, baseline: str = "none", accuracy: float | None = None) -> Comparison:
        return compare(self.runs, baseline=baseline, accuracy=accuracy)

    def row(self, arm: str, baseline: str = "none") -> ArmRow:
        return next(row for row in self.compare(baseline).rows if row.arm == arm)

    def share(self, arm: str, other: str, accuracy: float) -> str:
        """Rollout FLOPs of one arm to an accuracy, in percent of another's."""
        costs = {row.arm: row.cost.flops for row in self.compare(accuracy=accuracy).rows}
        return "-" if costs[arm] is None or costs[other] is None else f"{100 * costs[arm] / costs[other]:.0f} %"

    @property
    def accuracies(self) -> str:
        """Every arm: each seed, mean, spread, difference to `none`, and the rollout model."""
        rows = [
            (
                f"`{row.arm}`",
                " / ".join(f"{100 * value:.1f}" for value in row.after.values),
                percent(row.after),
                *difference_cells(row.difference),
                percent(row.rollout_model_after) if row.rollout_model_after else "-",
            )
            for row in self.compare().rows
        ]
        columns = ("arm", "policy after, seed by seed", "mean", "minus `none`", "above on", "rollout model after")
        return markdown(columns, rows)

    @property
    def costs(self) -> str:
        """What it takes to each accuracy."""
        tables = []
        for accuracy in ACCURACIES:
            rows = [
                (f"`{row.arm}`", *cost_cells(row.cost), self.share(row.arm, "on_policy", accuracy))
                for row in self.compare(accuracy=accuracy).rows
            ]
            columns = ("got there", "rollout FLOPs", "training FLOPs", "processor seconds", "seconds")
            share = "rollout FLOPs, of `on_policy`'s"
            tables.append(markdown((f"to {accuracy:.0%} right", *columns, share), rows))
        return "\n\n".join(tables)

    @property
    def picture(self) -> str:
        return f"![the {self.name} pair](pictures/study-{self.name}.png)"

    def draw(self) -> None:
        charts = comparison_charts(self.compare(accuracy=ACCURACIES[0]), self.runs)
        write_png(PICTURES / f"study-{self.name}.png", charts)


def models_table(reported: Sequence[RunSummary]) -> str:
    """Return size, cost and distance from the policy of each rollout model, over the first ten iterations of `obrs`."""
    rows = []
    for name, spec in STUDY_MODELS.items():
        cost = forward_cost(make_meta_model(spec)).per_token
        rows.append((f"`{name}`", f"{parameters(spec):,}", f"{cost:,}", *_at_the_start(name, reported)))
    columns = ("model", "parameters", "FLOPs a token", "right at the start, %", "KL(it ‖ policy), nats", "acceptance")
    return markdown(columns, rows)


def parameters(spec: ToyModelSpec) -> int:
    return sum(parameter.numel() for parameter in make_meta_model(spec).parameters())


def _at_the_start(name: str, reported: Sequence[RunSummary]) -> Row:
    if name not in PAIRS:
        runs = [run for run in reported if run.arm == "both/on_policy"]
        return percent(SeedSpread(values=tuple(run.points[0].policy_accuracy for run in runs))), "0", "1"
    runs = [run for run in reported if run.arm == f"{name}/obrs"]
    right = SeedSpread(values=tuple(run.points[0].rollout_model_accuracy for run in runs))
    gap, kept = (sum(getattr(run.points[1], what) for run in runs) / len(runs) for what in ("kl", "acceptance"))
    return percent(right), f"{gap:.3f}", f"{kept:.3f}"


def tuning_table(tuning: Sequence[RunSummary]) -> str:
    """Every cell's score at each factor, and the learning rate that it was reported with."""
    rows = []
    for cell in cells():
        tried = {factor: [one for one in tuning if one.arm == name_of(cell, factor)] for factor in FACTORS}
        chosen = tried[best_factor(tuning, cell)][0].settings["policy"]["optimizer"]["learning_rate"]
        rows.append((cell[0], f"`{cell[1]}`", *map(_score_cell, tried.values()), f"{chosen:g}"))
    return markdown(("pair", "arm", *(f"x{factor:g}" for factor in FACTORS), "learning rate taken"), rows)


def _score_cell(runs: Sequence[RunSummary]) -> str:
    fallen = sum(one.collapse is not None for one in runs)
    return f"{100 * score(runs):.1f}" + (f" ({fallen} collapsed)" if fallen else "")


def steps_table(pairs: Sequence[Pair]) -> str:
    """What each change is worth, in both pairs."""
    rows = []
    for arm, without, change in STEPS:
        cells_of = [difference_cells(pair.row(arm, baseline=without).difference) for pair in pairs]
        rows.append((f"`{arm}` - `{without}`", change, *(", ".join(both) for both in cells_of)))
    return markdown(("difference", "what changes", *(pair.name for pair in pairs)), rows)


def collapses(runs: Sequence[RunSummary]) -> str:
    lines = [
        f"- `{run.arm}`, seed {run.seed}: {run.collapse.why}; first sign: {run.collapse.first_sign or 'none'}"
        for run in runs
        if run.collapse
    ]
    return "\n".join(lines) or "None."


def markdown(columns: Row, rows: Sequence[Row]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def page(tuning: Sequence[RunSummary], reported: Sequence[RunSummary]) -> str:
    """The whole document."""
    pairs = {name: Pair(name, reported) for name in PAIRS}
    environment = reported[0].environment
    return TEMPLATE.read_text().format(
        **pairs,
        models=models_table(reported),
        tuning=tuning_table(tuning),
        tuning_runs=len(tuning),
        tuning_seeds=" and ".join(map(str, TUNING_SEEDS)),
        reported_runs=len(reported),
        seeds=f"{SEEDS[0]} to {SEEDS[-1]}",
        steps=steps_table(list(pairs.values())),
        tuning_collapses=collapses(tuning),
        collapses=collapses(reported),
        versions=", ".join(f"{name} {environment[name]}" for name in ("python", "torch", "transformers")),
        hours=f"{sum(run.last.cpu_seconds for run in [*tuning, *reported]) / 3600:.1f}",
    )


def main() -> None:
    tuning, reported = read("tuning"), read("reported")
    PAGE.write_text(page(tuning, reported))
    for name in PAIRS:
        Pair(name, reported).draw()
    print(f"{PAGE}: {len(tuning)} tuning runs, {len(reported)} reported ones")


if __name__ == "__main__":
    main()
