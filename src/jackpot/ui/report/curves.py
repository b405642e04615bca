"""Draws every metric of several runs as charts, in the order of `metric_layout.LAYOUT`.

Arms are overlaid; several seeds of one arm become their mean with error bars.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from jackpot.analysis.diagnose.rules import RULES
from jackpot.config.config import Config
from jackpot.ui.charts import COLORS, Chart, Guide, Section, Series, Table, arm_numbers
from jackpot.ui.error_bars import MeanLine, downsample, mean_line, rounded
from jackpot.ui.report.metric_layout import LAYOUT, LOGARITHMIC, CombinedChart, Entry, FirstOf
from jackpot.ui.report.runs import Arm

_SIGNS = {"positive": "advantage above 0", "negative": "advantage below 0"}
_FAMILY = re.compile(r"(?P<base>.+?)_(at_(?P<band>\d+(-\d+|-up)?)|(?P<sign>positive|negative))")
_NOT_METRICS = {"iteration", "time"}


def metric_sections(arms: Sequence[Arm], named: Collection[str] = ()) -> list[Section]:
    """Return the sections for which the runs have metrics.

    Args:
        named: metrics of the findings of `diagnose`; a section with one of them is not folded.
    """
    drawer = _ChartMaker(arms)
    sections = []
    for part in LAYOUT:
        before = set(drawer.drawn)
        if items := [chart for entry in part.entries for chart in drawer.draw(entry)]:
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

    def draw(self, entry: Entry) -> Iterable[Chart]:
        """Return the charts of an entry, as far as the runs have its metrics."""
        if isinstance(entry, FirstOf):
            return self._first_of(entry)
        return self._combined_chart(entry) if isinstance(entry, CombinedChart) else self._metric_charts(entry)

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
            name = (label or arm.name) if alone else f"{arm.name}, {label}" if label else arm.name
            number, shade = self._look(arm, variant)
            yield replace(_line(whole, name, number), group=arm.name, shade=shade)

    def _look(self, arm: Arm, variant: int = 0) -> tuple[int, int]:
        """Choose number and shade of a series: arms beyond the colors take shades, variants take dashes.

        Of a single arm the variants take the colors behind its own.
        """
        number = self._numbers[arm.name]
        if len(self._arms) == 1:
            return (number + variant) % len(COLORS), 0
        return number % len(COLORS) + variant * len(COLORS), number // len(COLORS)

    def _first_of(self, entry: FirstOf) -> Iterator[Chart]:
        found = [name for name in entry.metrics if name in self._names]
        for name in sorted(found, key=lambda name: name not in self._kl)[:1]:
            self.drawn.add(name)
            yield self._chart(name, self._series(name), [name])

    def _metric_charts(self, pattern: str) -> Iterator[Chart]:
        names = [name for name in self._names if name not in self.drawn]
        found: dict[str, dict[str, dict[str, str]]] = {}  # base: kind: part: metric

        for name in names:
            family = _FAMILY.fullmatch(name)
            base, kind = (family["base"], "band" if family["band"] else "sign") if family else (name, "")
            if re.fullmatch(pattern, base):
                found.setdefault(base, {}).setdefault(kind, {})[family[kind] if family else ""] = name

        for base, kinds in found.items():
            if "" in kinds:
                yield self._chart(base, self._series(base), [base])
            if "sign" in kinds:
                parts = {kinds["sign"][sign]: _SIGNS[sign] for sign in sorted(kinds["sign"], reverse=True)}
                yield self._together(f"{base} by the sign of the advantage", parts)
            if "band" in kinds:
                yield from self._by_position(base, dict(sorted(kinds["band"].items(), key=lambda one: _start(one[0]))))
            self.drawn |= {name for kind in kinds.values() for name in kind.values()}

    def _chart(self, title: str, series: Iterable[Series], metrics: Sequence[str], note: str = "") -> Chart:
        """Make a chart over iterations; if it shows a single metric, add the limits that `diagnose` has for it."""
        drawn = tuple(series)
        values = [value for one in drawn for value in (*one.y, *(one.low or ())) if value is not None]
        log = all(re.fullmatch(LOGARITHMIC, metric) for metric in metrics) and min(values) > 0
        guides, limits = self._limits(metrics[0]) if len(metrics) == 1 else ([], "")
        return Chart(
            title=title,
            x_label="iteration",
            y_label="",
            series=drawn,
            note=note or limits,
            log_y=log,
            guides=tuple(guide for guide in guides if not log or (guide.y or 0.0) > 0.0),
        )

    def _together(self, title: str, labels: Mapping[str, str], note: str = "") -> Chart:
        """Make one chart of several metrics, each with its name in the legend."""
        drawn: list[Series] = []
        for variant, (metric, label) in enumerate(labels.items()):
            drawn += self._series(metric, label, variant)
        if len(labels) > 2 and len(self._arms) > 1:  # so many bands could not be told apart
            drawn = [replace(one, low=None, high=None) for one in drawn]
        return self._chart(title, drawn, list(labels), note)

    def _combined_chart(self, entry: CombinedChart) -> Iterator[Chart]:
        if entry.metrics.keys() <= set(self._names):
            # a metric with limits gets a chart of its own too, which shows them
            self.drawn |= {metric for metric in entry.metrics if not self._limits(metric)[0]}
            yield self._together(entry.title, entry.metrics, entry.note)

    def _by_position(self, base: str, bands: Mapping[str, str]) -> Iterator[Chart]:
        """Yield a chart of the bands for each arm, and one of all arms' newest values over the position."""
        newest = []
        for order, arm in enumerate(self._arms):
            of_arm = {band: self._of[metric][order] for band, metric in bands.items()}
            of_arm = {band: line for band, line in of_arm.items() if line.numbers}
            if not of_arm:
                continue

            lines = [_line(whole, band, number) for number, (band, whole) in enumerate(of_arm.items())]
            lines = [replace(line, low=None, high=None) for line in lines]  # so many error bars hide each other
            suffix = f": {arm.name}" if len(self._arms) > 1 else ""
            yield self._chart(f"{base} by position{suffix}", lines, [bands[band] for band in of_arm])

            x = [index for index, band in enumerate(bands) if band in of_arm]
            y = [rounded(_newest(line)) for line in of_arm.values()]
            number, shade = self._look(arm)
            newest.append(Series(name=arm.name, x=x, y=y, style="both", group=arm.name, number=number, shade=shade))

        yield Chart(
            title=f"{base} over the position, newest tenth of the iterations",
            x_label="position",
            y_label="",
            series=tuple(newest),
            x_names=tuple(bands),
        )


def _line(whole: MeanLine, name: str, number: int) -> Series:
    """Make the series of a line, thinned and rounded."""
    line = downsample(whole)
    return Series(
        name=name,
        x=line.x,
        y=[rounded(value) for value in line.y],
        low=line.low and [rounded(value) for value in line.low],
        high=line.high and [rounded(value) for value in line.high],
        number=number,
        style="both" if len(line.numbers) < 2 else "line",
    )


def _start(band: str) -> int:
    """Return the first position of a band such as 4-15."""
    return int(band.split("-")[0])


def _newest(line: MeanLine) -> float:
    """Return the mean over the newest tenth of the iterations that have a number."""
    return fmean(line.numbers[-max(1, len(line.numbers) // 10) :])


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
