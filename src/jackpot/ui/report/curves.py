"""Charts of every metric of several runs, in the order of `metric_layout.LAYOUT`.

Arms are overlaid; several seeds of one arm become their mean with error bars.
"""

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from jackpot.analysis.diagnose.rules import RULES
from jackpot.ui.charts import COLORS, Chart, Guide, Section, Series, Table, arm_color_indices
from jackpot.ui.error_bars import MeanLine, downsample, mean_line, rounded
from jackpot.ui.report.metric_layout import LAYOUT, LOGARITHMIC, CombinedChart, Entry, FirstOf
from jackpot.ui.report.runs import Arm

_SIGNS = {"positive": "advantage above 0", "negative": "advantage below 0"}
# A metric of the tokens at some positions, such as base_at_4-15, or of one sign of the advantage, base_positive.
_FAMILY = re.compile(r"(?P<base>.+?)_(at_(?P<band>\d+(-\d+|-up)?)|(?P<sign>positive|negative))")
_NOT_METRICS = {"iteration", "time"}


def metric_sections(arms: Sequence[Arm], named: Collection[str] = ()) -> list[Section]:
    """Return the sections of the layout for which the runs have metrics, and one that lists metrics without a number.

    Args:
        named: metrics that the findings of `diagnose` name. A section with one of them, or with a metric that is
            beyond a limit and not explained by settings, is not folded.
    """
    maker = _ChartMaker(arms)
    sections = []
    for planned in LAYOUT:
        drawn_before = set(maker.drawn)  # a copy: `draw` adds each metric that it draws to `drawn`
        charts = [chart for entry in planned.entries for chart in maker.draw(entry)]
        if charts:
            metrics = maker.drawn - drawn_before
            needs_look = any(maker.is_broken(metric) or metric in named for metric in metrics)
            is_folded = planned.is_folded and not needs_look
            sections.append(Section(title=planned.title, intro=planned.intro, items=tuple(charts), is_folded=is_folded))

    if maker.empty:
        intro = "No run counted anything for these metrics: they are null in every line."
        table = Table(title="Metrics", columns=("metric",), rows=tuple((metric,) for metric in maker.empty))
        sections.append(Section(title="Empty metrics", intro=intro, items=(table,), is_folded=True))
    return sections


class _ChartMaker:
    """A maker of charts from entries of the layout, which remembers the metrics that it has drawn."""

    def __init__(self, arms: Sequence[Arm]) -> None:
        """Compute the line of every metric for every arm; no chart is made yet."""
        self._arms = arms
        self._color_indices = arm_color_indices(arm.name for arm in arms)  # by the arm's name
        self._runs = [run for arm in arms for run in arm.runs]
        self._kl_metrics = {run.config.kl_metric for run in self._runs}  # the metric of the KL in each run

        metrics = {metric for run in self._runs for line in run.lines for metric in line} - _NOT_METRICS
        # By metric, one line for each arm.
        self._lines = {
            metric: [mean_line([run.lines for run in arm.runs], metric) for arm in arms] for metric in sorted(metrics)
        }
        # Metrics that have a number in some run.
        self._metrics = [metric for metric, lines in self._lines.items() if any(line.numbers for line in lines)]
        self.empty = sorted(metrics - set(self._metrics))  # metrics that have no number in any run
        self.drawn: set[str] = set()  # metrics that have a chart

    def draw(self, entry: Entry) -> Iterable[Chart]:
        """Return the charts of an entry of the layout; none if the runs lack its metrics."""
        if isinstance(entry, FirstOf):
            return self._first_of(entry)
        return self._combined_chart(entry) if isinstance(entry, CombinedChart) else self._metric_charts(entry)

    def is_broken(self, metric: str) -> bool:
        """Return whether a metric is beyond one of its `_limits` in a run whose settings do not explain that."""
        return any(guide.is_broken for guide in self._limits(metric)[0])

    def _limits(self, metric: str) -> tuple[list[Guide], str]:
        """Return a metric's limits that are the same for every run, and sentences on whether the values keep to them.

        All values of all runs are judged, also those that a thinned line leaves out. A limit counts as broken if a
        value is beyond it and the settings of the value's run do not explain that.
        """
        values = [
            (run.config, value) for run in self._runs for line in run.lines if (value := line.get(metric)) is not None
        ]

        guides, sentences = [], []
        # Only rules about the metric itself, not those about its ratio to another metric.
        for rule in (rule for rule in RULES if rule.metric == metric and rule.over is None):
            # The limits of the rule: (text, limit, the sign that `value - limit` has beyond the limit). A limit that
            # depends on the run is a function and no float, and has no guide.
            limits = [
                (f"{side} {limit:g}", limit, sign)
                for side, limit, sign in (("at least", rule.low, -1), ("at most", rule.high, 1))
                if isinstance(limit, float) and math.isfinite(limit)
            ]

            reasons = []  # for each value beyond a limit, the settings that explain it; "" if none do
            for text, limit, sign in limits:
                beyond = [rule.explained_by(config, value) for config, value in values if (value - limit) * sign > 0]
                guides.append(Guide(text=text, y=limit, is_broken="" in beyond))
                reasons += beyond

            named = " and ".join(text for text, _, _ in limits)
            if unexplained := reasons.count(""):
                sentences.append(
                    f"{unexplained:,} of {len(values):,} values are beyond the limit, {named}: {rule.explanation}."
                )
            elif reasons:
                settings = ", ".join(dict.fromkeys(reasons))
                sentences.append(f"Beyond its limit, {named}, only as the settings explain: {settings}.")
            elif limits:
                sentences.append(f"Within its limit, {named}.")
            else:
                sentences.append("Its limit depends on the run; the summary lists the runs beyond it.")
        return guides, " ".join(dict.fromkeys(sentences))

    def _series(self, metric: str, label: str = "", variant: int = 0) -> Iterator[Series]:
        """Yield a line for each arm that has the metric.

        Args:
            label: name of the metric in a chart of several metrics.
            variant: index of the metric in such a chart.
        """
        is_single = len(self._arms) == 1
        for arm, line in zip(self._arms, self._lines[metric], strict=True):
            if not line.numbers:
                continue
            # The line's name: the arm; in a chart of several metrics arm and metric, or the metric if there is one arm.
            name = label if label and is_single else ", ".join(filter(None, [arm.name, label]))
            color_index, shade = self._color(arm, variant)
            yield replace(_as_series(line, name, color_index), group=arm.name, shade=shade)

    def _color(self, arm: Arm, variant: int = 0) -> tuple[int, int]:
        """Choose the color index and the shade of a series; `variant` is the index of its metric in the chart.

        Metrics differ by their dashes, and arms by shades if there are more arms than colors. The metrics of a single
        arm differ by their colors.
        """
        index = self._color_indices[arm.name]
        if len(self._arms) == 1:
            return (index + variant) % len(COLORS), 0
        # The index of the same color with the next dash is higher by the number of colors.
        return index % len(COLORS) + variant * len(COLORS), index // len(COLORS)

    def _first_of(self, entry: FirstOf) -> Iterator[Chart]:
        """Yield the chart of one metric of an entry: a run's `Config.kl_metric`, else the first that the runs have."""
        metrics = [metric for metric in entry.metrics if metric in self._metrics]
        for metric in sorted(metrics, key=lambda metric: metric not in self._kl_metrics)[:1]:
            self.drawn.add(metric)
            yield self._chart(metric, self._series(metric), [metric])

    def _metric_charts(self, pattern: str) -> Iterator[Chart]:
        """Yield charts of the metrics not drawn yet whose name, without position or sign, matches a pattern."""
        # By name without suffix, its metrics by suffix: 4-15 (a band of positions), positive (a sign), or "" (none).
        families: dict[str, dict[str, str]] = {}
        for metric in self._metrics:
            match = _FAMILY.fullmatch(metric)
            base, suffix = (match["base"], match["band"] or match["sign"]) if match else (metric, "")
            if metric not in self.drawn and re.fullmatch(pattern, base):
                families.setdefault(base, {})[suffix] = metric

        for base, family in families.items():
            if "" in family:
                yield self._chart(base, self._series(base), [base])
            if signs := {family[sign]: label for sign, label in _SIGNS.items() if sign in family}:
                yield self._together(f"{base} by the sign of the advantage", signs)
            if bands := sorted(family.keys() - _SIGNS.keys() - {""}, key=lambda band: int(band.split("-")[0])):
                yield from self._by_position(base, {band: family[band] for band in bands})
            self.drawn |= set(family.values())

    def _chart(self, title: str, series: Iterable[Series], metrics: Sequence[str], note: str = "") -> Chart:
        """Make a chart over iterations; a chart of a single metric shows the limits that `diagnose` has for it."""
        drawn = tuple(series)
        # All that is drawn, with the lower ends of error bars: on a logarithmic axis all must be above 0.
        values = [value for line in drawn for value in (*line.y, *(line.low or ())) if value is not None]
        is_log = all(re.fullmatch(LOGARITHMIC, metric) for metric in metrics) and min(values) > 0
        guides, limits = self._limits(metrics[0]) if len(metrics) == 1 else ([], "")

        return Chart(
            title=title,
            x_label="iteration",
            y_label="",
            series=drawn,
            note=note or limits,
            log_y=is_log,
            # A logarithmic axis has no place for a limit of 0 or below (`y` is never None in `_limits`).
            guides=tuple(guide for guide in guides if not is_log or (guide.y or 0.0) > 0.0),
        )

    def _together(self, title: str, labels: Mapping[str, str], note: str = "") -> Chart:
        """Make one chart of several metrics; `labels` has the name of each in the legend."""
        drawn: list[Series] = []
        for variant, (metric, label) in enumerate(labels.items()):
            drawn += self._series(metric, label, variant)
        if len(labels) > 2 and len(self._arms) > 1:  # so many bands could not be told apart
            drawn = [replace(line, low=None, high=None) for line in drawn]
        return self._chart(title, drawn, list(labels), note)

    def _combined_chart(self, entry: CombinedChart) -> Iterator[Chart]:
        """Yield the one chart of an entry, if the runs have all of its metrics."""
        if entry.metrics.keys() <= set(self._metrics):
            # a metric with limits gets a chart of its own too, which shows them
            self.drawn |= {metric for metric in entry.metrics if not self._limits(metric)[0]}
            yield self._together(entry.title, entry.metrics, entry.note)

    def _by_position(self, base: str, bands: Mapping[str, str]) -> Iterator[Chart]:
        """Yield charts of a metric by token position: one for each arm over iterations, one of the newest values.

        Args:
            bands: the metric of each band of positions, such as 4-15.
        """
        newest = []  # for each arm its newest values over the positions
        for arm_index, arm in enumerate(self._arms):
            lines = {band: self._lines[metric][arm_index] for band, metric in bands.items()}
            lines = {band: line for band, line in lines.items() if line.numbers}  # bands with a number in this arm
            if not lines:
                continue

            series = [_as_series(line, band, index) for index, (band, line) in enumerate(lines.items())]
            series = [replace(line, low=None, high=None) for line in series]  # so many error bars hide each other
            suffix = f": {arm.name}" if len(self._arms) > 1 else ""
            yield self._chart(f"{base} by position{suffix}", series, [bands[band] for band in lines])

            # The newest value of each band of positions, drawn at the index of the band.
            x = [index for index, band in enumerate(bands) if band in lines]
            y = [rounded(_newest(line)) for line in lines.values()]
            index, shade = self._color(arm)
            newest.append(Series(name=arm.name, x=x, y=y, style="both", group=arm.name, color_index=index, shade=shade))

        yield Chart(
            title=f"{base} over the position, newest tenth of the iterations",
            x_label="position",
            y_label="",
            series=tuple(newest),
            x_names=tuple(bands),
        )


def _as_series(line: MeanLine, name: str, color_index: int) -> Series:
    """Convert a line to a chart's series, with fewer points and digits, so that the page stays small.

    A line of fewer than two numbers is drawn with points too, since a single number makes no visible line.
    """
    line = downsample(line)
    return Series(
        name=name,
        x=line.x,
        y=[rounded(value) for value in line.y],
        # None for a single run.
        low=line.low and [rounded(value) for value in line.low],
        high=line.high and [rounded(value) for value in line.high],
        color_index=color_index,
        style="both" if len(line.numbers) < 2 else "line",
    )


def _newest(line: MeanLine) -> float:
    """Return the mean of a line over the newest tenth of the iterations where it has a number."""
    return fmean(line.numbers[-max(1, len(line.numbers) // 10) :])
