"""Draws every metric of several runs as charts, in the order of `metric_layout.LAYOUT`.

Arms are overlaid; several seeds of one arm become their mean with error bars.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from jackpot.analysis.diagnose.rules import RULES
from jackpot.config.run import Config
from jackpot.ui.charts import COLORS, Chart, Guide, Heatmap, Section, Series, Table, arm_numbers
from jackpot.ui.error_bars import MeanLine, Number, downsample, mean_line, rounded
from jackpot.ui.report.metric_layout import (
    LAYOUT,
    LOGARITHMIC,
    CombinedChart,
    Distribution,
    Entry,
    FirstOf,
    MetricCharts,
    QuantileChart,
    ScatterChart,
)
from jackpot.ui.report.runs import Arm

MOST_COLUMNS = 240  # columns of a heatmap
_SIGNS = {"positive": "advantage above 0", "negative": "advantage below 0"}
_FAMILY = re.compile(r"(?P<base>.+?)_(at_(?P<band>\d+(-\d+|-up)?)|(?P<sign>positive|negative))")
_NOT_METRICS = {"iteration", "time"}


def metric_sections(
    arms: Sequence[Arm], spreads: Mapping[str, Sequence[Heatmap]], named: Collection[str] = ()
) -> list[Section]:
    """Return the sections for which the runs have metrics.

    Args:
        spreads: heatmaps of saved rollouts by column, as `distributions` returns them.
        named: metrics of the findings of `diagnose`; a section with one of them is not folded.
    """
    drawer = _ChartMaker(arms)
    sections = []
    for part in LAYOUT:
        before = set(drawer.drawn)
        items: list[Chart | Heatmap | Table] = []
        for entry in part.entries:
            items += spreads.get(entry.column, ()) if isinstance(entry, Distribution) else drawer.draw(entry)
        if items:
            here = drawer.drawn - before
            folded = part.is_folded and not any(drawer.is_broken(name) or name in named for name in here)
            sections.append(Section(title=part.title, intro=part.intro, items=tuple(items), is_folded=folded))
    if empty := drawer.without_numbers:
        title, intro = "Empty metrics", "No run counted anything for these metrics: they are null in every line."
        rows = Table(title="Metrics", columns=("metric",), rows=tuple((name,) for name in empty))
        sections.append(Section(title=title, intro=intro, items=(rows,), is_folded=True))
    return sections


class _ChartMaker:
    """Turns entries of the layout into charts, and remembers which metrics are drawn."""

    def __init__(self, arms: Sequence[Arm]) -> None:
        self._arms = arms
        self._numbers = arm_numbers(arm.name for arm in arms)
        runs = [[run.lines for run in arm.runs] for arm in arms]
        names = {name for arm in runs for lines in arm for line in lines for name in line} - _NOT_METRICS
        # one line for each arm
        self._of = {name: [mean_line(lines, name) for lines in runs] for name in sorted(names)}
        self._names = [name for name, lines in self._of.items() if any(line.numbers for line in lines)]
        self.without_numbers = sorted(names - set(self._names))
        self.drawn: set[str] = set()
        self._kl = {run.config.kl_metric for arm in arms for run in arm.runs}

    def draw(self, entry: Entry) -> Iterable[Chart | Heatmap]:
        """Return the charts of an entry, as far as the runs have its metrics."""
        if isinstance(entry, MetricCharts):
            return self._metric_charts(re.compile(entry.pattern))
        if isinstance(entry, FirstOf):
            return self._first_of(entry)
        if isinstance(entry, CombinedChart):
            return self._combined_chart(entry)
        return self._quantile_chart(entry) if isinstance(entry, QuantileChart) else self._scatter_chart(entry)

    def is_broken(self, metric: str) -> bool:
        """Return whether a value of any run is beyond a limit that is the same for every run."""
        return any(guide.is_broken for guide in self._limits(metric)[0])

    def _limits(self, metric: str) -> tuple[list[Guide], str]:
        """Judge the values of all runs, of which a line may be the mean and may leave out some."""
        runs = [run for arm in self._arms for run in arm.runs]
        values = [(run.config, value) for run in runs for line in run.lines if (value := line.get(metric)) is not None]
        return _limits(metric, values)

    def _series(self, metric: str, label: str = "", variant: int = 0) -> Iterator[Series]:
        """Yield a line for each arm that has the metric. `label` and `variant` are of one metric among several."""
        alone = len(self._arms) == 1
        for arm, whole in zip(self._arms, self._of[metric], strict=True):
            if not whole.numbers:
                continue
            line = downsample(whole)
            yield Series(
                name=(label or arm.name) if alone else f"{arm.name}, {label}" if label else arm.name,
                x=line.x,
                y=[rounded(value) for value in line.y],
                low=line.low and [rounded(value) for value in line.low],
                high=line.high and [rounded(value) for value in line.high],
                **self._look(arm, variant),
                style="both" if len(line.numbers) < 2 else "line",
                group=arm.name,
            )

    def _look(self, arm: Arm, variant: int = 0) -> dict[str, int]:
        """Choose number and shade of a series: arms beyond the colors take shades, variants take dashes.

        Of a single arm the variants take the colors behind its own.
        """
        number = self._numbers[arm.name]
        if len(self._arms) == 1:
            return {"number": (number + variant) % len(COLORS)}
        return {"number": number % len(COLORS) + variant * len(COLORS), "shade": number // len(COLORS)}

    def _first_of(self, entry: FirstOf) -> Iterator[Chart]:
        found = [name for name in entry.metrics if name in self._names]
        for name in sorted(found, key=lambda name: name not in self._kl)[:1]:
            self.drawn.add(name)
            yield self._chart(name, self._series(name), metric=name)

    def _metric_charts(self, pattern: re.Pattern[str]) -> Iterator[Chart | Heatmap]:
        names = [name for name in self._names if name not in self.drawn]
        found: dict[str, dict[str, dict[str, str]]] = {}  # base: kind: part: metric
        for name in names:
            family = _FAMILY.fullmatch(name)
            base, kind = (family["base"], "band" if family["band"] else "sign") if family else (name, "")
            if pattern.fullmatch(base):
                found.setdefault(base, {}).setdefault(kind, {})[family[kind] if family else ""] = name
        for base, kinds in found.items():
            if "" in kinds:
                yield self._chart(base, self._series(base), metric=base)
            if "sign" in kinds:
                parts = enumerate(sorted(kinds["sign"], reverse=True))  # positive first
                lines = [self._series(kinds["sign"][sign], _SIGNS[sign], place) for place, sign in parts]
                yield self._chart(f"{base} by the sign of the advantage", (one for part in lines for one in part))
            if "band" in kinds:
                yield from self._by_position(base, dict(sorted(kinds["band"].items(), key=lambda one: _start(one[0]))))
            self.drawn |= {name for kind in kinds.values() for name in kind.values()}

    def _chart(self, title: str, series: Iterable[Series], metric: str = "", note: str = "") -> Chart:
        """Make a chart over iterations; if it shows a single `metric`, add the limits that `diagnose` has for it."""
        drawn = tuple(series)
        values = [value for one in drawn for value in (*one.y, *(one.low or ())) if value is not None]
        guides, limits = self._limits(metric)
        log = bool(re.fullmatch(LOGARITHMIC, metric)) and min(values) > 0
        return Chart(
            title=title,
            x_label="iteration",
            y_label="",
            series=drawn,
            note=note or limits,
            log_y=log,
            guides=tuple(guide for guide in guides if not log or guide.y > 0),
        )

    def _combined_chart(self, entry: CombinedChart) -> Iterator[Chart]:
        names = {name: label for name, label in entry.metrics.items() if name in self._names}
        if len(names) == len(entry.metrics):
            lines = [self._series(name, label, place) for place, (name, label) in enumerate(names.items())]
            self.drawn |= names.keys() - set(self._by_themselves(names))
            yield self._chart(entry.title, (one for part in lines for one in part))

    def _by_themselves(self, names: Iterable[str]) -> list[str]:
        """Return the metrics with limits, which a chart of several metrics does not show."""
        return [name for name in names if self._limits(name)[0]]

    def _quantile_chart(self, entry: QuantileChart) -> Iterator[Chart]:
        names = (entry.middle, entry.low, entry.high)
        if not set(names) <= set(self._names):
            return
        self.drawn |= set(names)
        if len(self._arms) > 1:  # overlapping bands could not be distinguished
            labels = ("median", *entry.ends)
            lines = [
                self._series(name, label, place) for place, (name, label) in enumerate(zip(names, labels, strict=True))
            ]
            drawn = [replace(one, low=None, high=None) for part in lines for one in part]
        else:
            middle, low, high = (next(self._series(name)) for name in names)
            drawn = [replace(middle, low=_at(low, middle.x), high=_at(high, middle.x))]
        yield self._chart(entry.title, drawn, metric=names[0], note=entry.note)

    def _scatter_chart(self, entry: ScatterChart) -> Iterator[Chart]:
        if entry.x not in self._names or entry.y not in self._names:
            return
        drawn = []
        for arm, x, y in zip(self._arms, self._of[entry.x], self._of[entry.y], strict=True):
            at = dict(zip(y.x, y.y, strict=True))
            pairs = [(rounded(one), rounded(at[i])) for i, one in zip(x.x, x.y, strict=True) if one and at.get(i)]
            pairs = pairs[:: max(1, math.ceil(len(pairs) / 400))]
            if pairs:
                xs, ys = map(list, zip(*pairs, strict=True))
                drawn.append(Series(name=arm.name, x=xs, y=ys, style="points", group=arm.name, **self._look(arm)))
        guides, _ = self._limits(entry.y)
        unity = Guide(text="kappa = 1", y=1.0)
        yield Chart(
            title=entry.title,
            x_label=entry.x,
            y_label=entry.y,
            series=tuple(drawn),
            note=entry.note,
            guides=(unity, *guides),
        )

    def _by_position(self, base: str, bands: Mapping[str, str]) -> Iterator[Chart | Heatmap]:
        """Yield a heatmap for each arm, and one chart of all arms' newest values over the position."""
        for number, arm in enumerate(self._arms):
            rows = {band: self._of[metric][number] for band, metric in bands.items()}
            rows = {band: line for band, line in rows.items() if line.numbers}
            if rows:
                yield _heatmap(f"{base} by position{_suffix(arm, self._arms)}", base, rows)
        bands = {band: metric for band, metric in bands.items() if metric in self._names}
        drawn = []
        for number, arm in enumerate(self._arms):
            points = [(place, _newest(self._of[metric][number])) for place, metric in enumerate(bands.values())]
            points = [(x, rounded(y)) for x, y in points if y is not None]
            if points:
                x, y = map(list, zip(*points, strict=True))
                drawn.append(Series(name=arm.name, x=x, y=y, style="both", group=arm.name, **self._look(arm)))
        yield Chart(
            title=f"{base} over the position, newest tenth of the iterations",
            x_label="position",
            y_label="",
            series=tuple(drawn),
            x_names=tuple(bands),
        )


def _suffix(arm: Arm, arms: Sequence[Arm]) -> str:
    return f": {arm.name}" if len(arms) > 1 else ""


def _start(band: str) -> int:
    """Return the first position of a band such as 4-15."""
    return int(band.split("-")[0])


def _at(series: Series, x: Sequence[Any]) -> list[Number]:
    """Return the value at each x or at the nearest x before: each line is downsampled by its own extremes."""
    found, place = [], 0
    for wanted in x:
        while place + 1 < len(series.x) and series.x[place + 1] <= wanted:
            place += 1
        found.append(series.y[place])
    return found


def _newest(line: MeanLine) -> float | None:
    """Return the mean over the newest tenth of the iterations that have a number."""
    values = line.numbers
    return fmean(values[-max(1, len(values) // 10) :]) if values else None


def _heatmap(title: str, label: str, rows: Mapping[str, MeanLine]) -> Heatmap:
    """Make a heatmap with a row for each band; above `MOST_COLUMNS` iterations a column is the mean of a stretch."""
    x = sorted({iteration for line in rows.values() for iteration in line.x})
    width = max(1, math.ceil(len(x) / MOST_COLUMNS))
    stretches = [x[begin : begin + width] for begin in range(0, len(x), width)]
    values = []
    for line in rows.values():
        at = dict(zip(line.x, line.y, strict=True))
        cells = [[at[i] for i in stretch if at.get(i) is not None] for stretch in stretches]
        values.append([rounded(fmean(cell)) if cell else None for cell in cells])
    return Heatmap(
        title=title,
        x_label="iteration",
        y_label="position",
        x=[stretch[0] for stretch in stretches],
        y=list(rows),
        values=values,
        value_label=label,
    )


def _limits(metric: str, values: Sequence[tuple[Config, float]]) -> tuple[list[Guide], str]:
    """Return the limits of a metric that are the same for every run, and sentences on whether the values keep them.

    A value counts as beyond a limit where the settings of its run do not explain it.
    """
    guides, said = [], []
    for rule in (rule for rule in RULES if rule.metric == metric and rule.over is None):
        limits = [
            (text, limit, [rule.explained_by(config, value) for config, value in values if (value - limit) * sign > 0])
            for text, limit, sign in (("at least", rule.low, -1), ("at most", rule.high, 1))
            if isinstance(limit, float) and math.isfinite(limit)
        ]
        named = " and ".join(f"{text} {limit:g}" for text, limit, _ in limits)
        guides += [Guide(text=f"{text} {limit:g}", y=limit, is_broken="" in beyond) for text, limit, beyond in limits]
        beyond = [settings for _, _, settings_of_values in limits for settings in settings_of_values]
        if unexplained := beyond.count(""):
            said.append(f"{unexplained:,} of {len(values):,} values are beyond the limit, {named}: {rule.explanation}.")
        elif beyond:
            said.append(f"Beyond its limit, {named}, only as the settings explain: {', '.join(dict.fromkeys(beyond))}.")
        elif limits:
            said.append(f"Within its limit, {named}.")
        else:
            said.append("Its limit depends on the run; the summary lists the runs beyond it.")
    return guides, " ".join(dict.fromkeys(said))
