"""The table of docs/precision.md about quantized rollouts and its picture, from the folders of `jackpot compare
research/quantized.yaml`: that of the starter, a small gap, and that of its twin with outliers, a large one.

    python -m research.quantized_page runs/compare-quantized runs/quantized-outliers --picture quantized.png

The picture is of the large gap. `logged` is what a training log shows, the mean reward of what the quantized copy
wrote over the last tenth of the iterations; `right` is the policy without rounding on held-out problems, at the end.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.png import write_png
from jackpot.analysis.compare.comparison import Difference
from jackpot.config.recipes import load_recipe
from jackpot.core.statistics import Sample
from jackpot.training.run_folder.folder import RunFolder
from jackpot.ui.charts import Chart, Guide, Series
from jackpot.ui.error_bars import error_bars
from jackpot.ui.views.comparison import difference_cells
from jackpot.ui.views.comparison import spread_text as percent
from research.study_page import markdown

RECIPE = Path(__file__).with_name("quantized.yaml")
DRAWN = ("exact", "int8_none", "int8_ppo_is", "int8_is", "int8_tis", "int8_obrs")
WINDOW = 10  # iterations that a point of a noisy curve is the mean of
CURVES = {
    "eval/policy_accuracy": ("Policy, without rounding", "right on held-out problems"),
    "reward/mean": ("Logged reward, of the quantized copy", "mean reward"),
    "mismatch/engine_gap": ("Gap", "mean |p - q| of sampled tokens"),
    "policy/entropy": ("Entropy of the policy", "nats per token"),
    "policy/approx_kl_k1": ("KL of an update, by k1", "nats per token"),
    "policy/approx_kl_weighted": ("The same, weighted by p_old / p_inf", "nats per token"),
}

LEARNT = ("right, %", "minus its `none`")

Line = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """The lines of one run's metrics.jsonl after the first, which is an evaluation."""

    lines: list[Line]

    def all(self, metric: str) -> list[float]:
        return [line[metric] for line in self.lines if line.get(metric) is not None]

    def end(self, metric: str) -> float:
        return self.all(metric)[-1]

    def late(self, metric: str) -> float:
        """Mean over the last tenth of the iterations."""
        values = self.all(metric)
        return fmean(values[-max(1, len(values) // 10) :])


def read(folder: Path) -> dict[str, list[Run]]:
    """The runs of each arm in the recipe's order, by seed."""
    found = {arm: sorted(folder.glob(f"{arm}-seed*")) for arm in load_recipe(str(RECIPE))["arms"]}
    return {
        arm: [Run(RunFolder(path).read("metrics.jsonl")[1:]) for path in paths] for arm, paths in found.items() if paths
    }


def learning_table(small: dict[str, list[Run]], large: dict[str, list[Run]]) -> str:
    """What was learnt at the large gap, what the log said of it, and what was learnt at the small gap."""
    columns = ("arm", *LEARNT, "copy, %", "logged, %", f"small gap: {LEARNT[0]}", LEARNT[1])
    rows = []
    for arm, runs in large.items():
        copy, logged = over(runs, "end", "eval/rollout_model_accuracy"), over(runs, "late", "reward/mean")
        means = (f"{100 * sample.mean:.1f}" for sample in (copy, logged))
        rows.append((f"`{arm}`", *learnt(large, arm), *means, *learnt(small, arm)))
    return markdown(columns, rows)


def learnt(arms: dict[str, list[Run]], arm: str) -> tuple[str, str]:
    """The accuracy of an arm, and its difference from the arm without correction that has its engine and clip."""
    without = f"{arm.split('_')[0]}_none" + "_no_clip" * arm.endswith("_no_clip")
    has_other = without in arms and without != arm
    difference = differences(arms[arm], arms[without]) if has_other else None
    return percent(over(arms[arm], "end", "eval/policy_accuracy")), difference_cells(difference)[0]


def over(runs: Sequence[Run], what: str, metric: str) -> Sample:
    return Sample(tuple(getattr(run, what)(metric) for run in runs))


def differences(runs: Sequence[Run], without: Sequence[Run]) -> Difference:
    """Seed by seed."""
    pairs = zip(*(over(each, "end", "eval/policy_accuracy").values for each in (runs, without)), strict=True)
    apart = tuple(one - other for one, other in pairs)
    higher, lower = sum(value > 0.0 for value in apart), sum(value < 0.0 for value in apart)
    return Difference(spread=Sample(apart), higher=higher, lower=lower, noise=None)


def charts(arms: dict[str, list[Run]]) -> list[Chart]:
    """One for each of CURVES: means over seeds, from least to greatest."""
    return [
        Chart(
            title=title,
            x_label="iteration",
            y_label=label,
            series=tuple(series(arm, number, arms[arm], metric) for number, arm in enumerate(DRAWN) if arm in arms),
            guides=(Guide(text="0", y=0.0),) if "update_kl" in metric else (),
        )
        for metric, (title, label) in CURVES.items()
    ]


def series(arm: str, number: int, runs: Sequence[Run], metric: str) -> Series:
    curves = [curve(run, metric) for run in runs]
    mean, low, high = error_bars([[y for _, y in points] for points in curves])
    return Series(name=arm, x=[x for x, _ in curves[0]], y=mean, low=low, high=high, color_index=number)


def curve(run: Run, metric: str) -> list[tuple[int, float]]:
    """Iteration and value; what every iteration has, by windows."""
    points = [(line["iteration"], line[metric]) for line in run.lines if line.get(metric) is not None]
    if metric.startswith("eval/"):
        return points
    windows = [points[start : start + WINDOW] for start in range(0, len(points), WINDOW)]
    return [(window[-1][0], fmean(value for _, value in window)) for window in windows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("small", type=Path, help="folder of the starter's runs")
    parser.add_argument("large", type=Path, help="folder of the runs with outliers")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    small, large = read(options.small), read(options.large)
    print(learning_table(small, large))
    if options.picture:
        write_png(options.picture, charts(large))


if __name__ == "__main__":
    main()
