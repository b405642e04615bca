"""Turns the results of `jackpot mismatch` into tables and charts.

The charts of responses are those of the post that introduced truncated importance sampling (TIS).
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

from jackpot.analysis.mismatch.measure import FAR, HIGH_GAP, TokenBand
from jackpot.analysis.mismatch.mismatch import MismatchPair, MismatchResult
from jackpot.core.statistics import Estimate
from jackpot.ui.charts import DASHED, GRAY, Chart, Guide, Section, Series, Table, finite
from jackpot.ui.numbers import format_number

_SMALLEST = 1e-16  # smallest value on a logarithmic axis
# The rows of the first table: label, and the function that formats a pair's cell.
_ROWS: tuple[tuple[str, Callable[[MismatchPair], str]], ...] = (
    ("responses", lambda pair: f"{pair.numbers.responses:,}"),
    ("tokens", lambda pair: f"{pair.numbers.tokens:,}"),
    ("cut at the limit", lambda pair: f"{pair.cut:.1%}"),
    ("largest |p - q| of all tokens", lambda pair: format_number(pair.numbers.max_gap)),
    ("largest |p - q| of a response, mean", lambda pair: estimated(pair.numbers.response_max_gap)),
    (f"responses with one above {HIGH_GAP:g}", lambda pair: f"{pair.numbers.high:,}"),
    ("mean |p - q| of a token", lambda pair: estimated(pair.numbers.gap)),
    ("mean |p - q| of a response, mean", lambda pair: estimated(pair.numbers.response_mean_gap)),
    ("mean |log p - log q|", lambda pair: estimated(pair.numbers.log_gap)),
    ("tokens with another most probable one", lambda pair: _share(pair.numbers.other_token)),
    ("tokens sent to other experts", lambda pair: _share(pair.numbers.other_experts)),
    ("KL by k1, nats per token", lambda pair: estimated(pair.numbers.k1)),
    ("KL by k3", lambda pair: estimated(pair.numbers.k3)),
    ("KL of whole distributions", lambda pair: _bounds(pair.numbers.kl, pair.numbers.kl_is_exact)),
    ("total variation", lambda pair: _bounds(pair.numbers.variation, pair.numbers.kl_is_exact)),
    ("mean q/p", lambda pair: estimated(pair.numbers.ratio)),
    ("q/p, 1 % of tokens are below", lambda pair: format_number(pair.numbers.quantiles["0.01"], ".4f")),
    ("q/p, median", lambda pair: format_number(pair.numbers.quantiles["0.5"], ".4f")),
    ("q/p, 1 % of tokens are above", lambda pair: format_number(pair.numbers.quantiles["0.99"], ".4f")),
    (f"sampled mass with q/p above {FAR:g}", lambda pair: f"{pair.numbers.above:.3%}"),
    (f"sampled mass with q/p below {1 / FAR:g}", lambda pair: f"{pair.numbers.below:.3%}"),
    (
        "learner's mass on tokens that can be drawn",
        lambda pair: estimated(pair.numbers.support) if pair.numbers.support else "1",
    ),
)


def estimated(value: Estimate | None) -> str:
    """Format a mean with its standard error in brackets."""
    if value is None:
        return "-"
    return format_number(value.value) + ("" if value.error is None else f" ({value.error:.1g})")


def _share(value: Estimate | None) -> str:
    """Format a share in percent; an unknown share becomes `-`."""
    return "-" if value is None else f"{value.value:.3%}"


def _bounds(bounds: tuple[Estimate, Estimate] | None, is_exact: bool) -> str:
    """Format the lower and the upper bound of a value; of an exact value, whose bounds are equal, only one."""
    if bounds is None:
        return "-"
    lower, upper = map(estimated, bounds)
    return lower if is_exact else f"{lower} to {upper}"


def verdicts(result: MismatchResult) -> list[str]:
    """Return the verdict on each pair; if there are several, each verdict begins with the pair's names."""
    several = len(result.pairs) > 1
    return [(f"{pair.sampler} | {pair.learner}: " if several else "") + pair.verdict for pair in result.pairs]


def mismatch_sections(result: MismatchResult) -> dict[str, Section]:
    """Return the sections of the page of `jackpot mismatch`, by name: `responses` and `tokens`."""
    return {"responses": _response_section(result.pairs), "tokens": _token_section(result.pairs)}


def _over_pairs(
    pairs: Sequence[MismatchPair],
    x: Callable[[MismatchPair], Sequence[float]],
    y: Callable[[MismatchPair], Sequence[float]],
    style: Literal["line", "points"],
) -> tuple[Series, ...]:
    """Return a series for each pair, from functions that give the x and the y of its points.

    A number that is too small for a logarithmic axis becomes a gap.
    """
    return tuple(
        Series(
            name=pair.name,
            x=finite(x(pair), _SMALLEST),
            y=finite(y(pair), _SMALLEST),
            color_index=index,
            style=style,
        )
        for index, pair in enumerate(pairs)
    )


def _response_section(pairs: Sequence[MismatchPair]) -> Section:
    """Return the section with all numbers of each pair, the verdicts, and charts over responses."""
    table = Table(
        title=_shared_sides(pairs),
        columns=("p of the sampler, q of the learner", *(pair.name for pair in pairs)),
        rows=tuple((label, *(cell(pair) for pair in pairs)) for label, cell in _ROWS),
        note="In brackets: standard errors, of means over tokens clustered by response. All numbers are at the tokens "
        "that the sampler drew. " + _exactness(pairs),
    )

    words = Table(
        title="In words",
        columns=("sampler | learner", "conclusion"),
        rows=tuple((f"{pair.sampler} | {pair.learner}", pair.verdict) for pair in pairs),
        is_detail=True,
    )

    return Section(
        title="How far the learner is from the sampler",
        intro="The sampler generated the responses and the learner scored them. Every token has two probabilities, p "
        "of the sampler and q of the learner; if both computed the same, |p - q| would be 0 everywhere.",
        items=(table, words, *_layers(pairs), *_response_charts(pairs)),
    )


def _layers(pairs: Sequence[MismatchPair]) -> tuple[Table, ...]:
    """Return a table of the layers that sampler and learner compute differently, for each pair with such layers."""
    several = len(pairs) > 1
    return tuple(
        Table(
            title="Layers that the two sides compute in different number formats"
            + (f": {pair.name}" if several else ""),
            columns=("layers", "sampler | learner"),
            rows=tuple((layers, f"{sampler} | {learner}") for layers, sampler, learner in pair.layers),
        )
        for pair in pairs
        if pair.layers
    )


def _shared_sides(pairs: Sequence[MismatchPair]) -> str:
    """Name the sampler if all pairs have the same one, and the learner likewise; if they share neither, `All pairs`."""
    sides = {"sampler": {pair.sampler for pair in pairs}, "learner": {pair.learner for pair in pairs}}
    return ", ".join(f"{role}: {names.pop()}" for role, names in sides.items() if len(names) == 1) or "All pairs"


def _exactness(pairs: Sequence[MismatchPair]) -> str:
    """Say whether the KL of whole distributions is exact, bounded or unknown."""
    if all(pair.numbers.kl is None for pair in pairs):
        return "The KL of whole distributions is not known: the learner reports single tokens only."
    if all(pair.numbers.kl_is_exact for pair in pairs if pair.numbers.kl):
        return "The KL and the total variation are exact: both sides' whole distributions were known."
    top_k = max(pair.top_log_probs for pair in pairs)
    return (
        f"The KL and the total variation lie between two bounds: of the sampler's distribution the {top_k} most "
        f"probable tokens were known."
    )


def _response_charts(pairs: Sequence[MismatchPair]) -> tuple[Chart, ...]:
    """Return charts of |p - q| in each response: the largest, the mean, and the largest against the length."""

    def ranks(pair: MismatchPair) -> list[float]:
        """Return for each response, the worst first, the share of all responses that are as bad or worse."""
        return [(rank + 1) / pair.numbers.responses for rank in range(pair.numbers.responses)]

    def largest_gaps(pair: MismatchPair) -> list[float]:
        """Return for each response the largest |p - q| of a token, p of the sampler and q of the learner."""
        return [response.max_gap for response in pair.numbers.each]

    def mean_gaps(pair: MismatchPair) -> list[float]:
        """Return for each response the mean |p - q| of its tokens, p of the sampler and q of the learner."""
        return [response.mean_gap for response in pair.numbers.each]

    return (
        Chart(
            title="Largest gap of every response",
            x_label="share of responses",
            y_label="max |p - q|",
            series=_over_pairs(pairs, ranks, lambda pair: sorted(largest_gaps(pair), reverse=True), "line"),
            note="Responses ordered from the worst: this share has a largest gap of at least y.",
            log_y=True,
            guides=(Guide(text=f"{HIGH_GAP:g}", y=HIGH_GAP),),
        ),
        Chart(
            title="Mean gap of every response",
            x_label="share of responses",
            y_label="mean |p - q|",
            series=_over_pairs(pairs, ranks, lambda pair: sorted(mean_gaps(pair), reverse=True), "line"),
            note="Responses ordered from the worst.",
            log_y=True,
        ),
        Chart(
            title="Largest gap against length",
            x_label="tokens of the response",
            y_label="max |p - q|",
            series=_over_pairs(
                pairs, lambda pair: [response.tokens for response in pair.numbers.each], largest_gaps, "points"
            ),
            note="A longer response has more chances of a large gap.",
            log_y=True,
        ),
    )


def _token_section(pairs: Sequence[MismatchPair]) -> Section:
    """Return the section with charts and tables of single tokens, by position and by entropy."""
    by_position = _band_charts(pairs, "position", "position in the response")
    by_entropy = _band_charts(pairs, "entropy", "entropy, nats")
    several = len(pairs) > 1
    tables = [table for pair in pairs for table in _band_tables(pair, f": {pair.name}" if several else "")]

    return Section(
        title="Where the gap is",
        intro="The same gaps by the length of the response, by the position of the token, and by the entropy of the "
        "learner's distribution there: a token that is certain to both has no gap.",
        items=(_scatter(pairs), *by_position, *by_entropy, _quantile_chart(pairs), *tables),
    )


def _scatter(pairs: Sequence[MismatchPair]) -> Chart:
    """Return a chart with a point for each token of a sample: p of the sampler on the x axis, q of the learner on y."""
    # `drawn` has (p, q) of each token of the sample.
    clouds = tuple(
        Series(
            name=pair.name,
            x=[p for p, _ in pair.numbers.drawn],
            y=[q for _, q in pair.numbers.drawn],
            color_index=index,
            style="points",
        )
        for index, pair in enumerate(pairs)
    )
    line = Series(name="equal", x=(0.0, 1.0), y=(0.0, 1.0), color_index=GRAY + DASHED)

    return Chart(
        title="Both probabilities of sampled tokens",
        x_label="p of the sampler",
        y_label="q of the learner",
        series=(*clouds, line),
        note="Some tokens, evenly over all, and the one with the largest gap.",
    )


def _band_charts(pairs: Sequence[MismatchPair], kind: str, label: str) -> tuple[Chart, ...]:
    """Return a chart of the mean |p - q| and one of the KL, over bands of tokens; no chart if no pair has such bands.

    Args:
        pairs: each a sampler and a learner; each has a line in both charts.
        kind: by what tokens are divided into bands, a key of `bands` of a pair's numbers.
        label: label of the horizontal axis.
    """
    names = tuple(dict.fromkeys(band.name for pair in pairs for band in pair.numbers.bands.get(kind, ())))
    if not names:
        return ()

    def line(index: int, pair: MismatchPair, estimate: Callable[[TokenBand], Estimate]) -> Series:
        """Return a pair's line: for each band of tokens (`names`) an estimate, and one standard error to both sides."""
        means = {band.name: estimate(band) for band in pair.numbers.bands.get(kind, ())}

        def shifted(errors: float) -> Sequence[float | None]:
            """Return each band's mean plus `errors` standard errors; None for a missing band or one off the axis."""
            values = {name: mean.value + errors * (mean.error or 0.0) for name, mean in means.items()}
            return finite([values.get(name) for name in names], _SMALLEST)

        return Series(
            name=pair.name,
            x=tuple(range(len(names))),
            y=shifted(0.0),
            low=shifted(-1.0),
            high=shifted(1.0),
            color_index=index,
            style="both",
        )

    is_exact = all(pair.numbers.kl_is_exact for pair in pairs)

    def chart(title: str, y_label: str, estimate: Callable[[TokenBand], Estimate]) -> Chart:
        """Return a chart of an estimate over the bands of tokens (`names`), with a line for each pair."""
        return Chart(
            title=title,
            x_label=label,
            y_label=y_label,
            series=tuple(line(index, pair, estimate) for index, pair in enumerate(pairs)),
            note="The band is one standard error.",
            x_names=names,
            log_y=True,
        )

    return (
        chart(f"Mean gap by {kind}", "mean |p - q|", lambda band: band.gap),
        chart(
            f"KL by {kind}",
            "nats per token" if is_exact else "k3, nats per token",
            # The two bounds of an exact KL are equal; the first is drawn.
            lambda band: band.kl[0] if is_exact and band.kl else band.k3,
        ),
    )


def _quantile_chart(pairs: Sequence[MismatchPair]) -> Chart:
    """Return a chart of the quantiles of log q/p over tokens, a line for each pair."""
    names = tuple(pairs[0].numbers.quantiles)

    def logs(pair: MismatchPair) -> list[float]:
        """Return the logs of a pair's quantiles of q/p; -inf for a ratio of 0."""
        return [math.log(ratio) if ratio > 0.0 else -math.inf for ratio in pair.numbers.quantiles.values()]

    return Chart(
        title="Quantiles of log q/p",
        x_label="share of tokens below",
        y_label="nats",
        series=tuple(
            Series(name=pair.name, x=tuple(range(len(names))), y=finite(logs(pair)), color_index=index, style="both")
            for index, pair in enumerate(pairs)
        ),
        note="From the smallest ratio to the largest one.",
        x_names=names,
        guides=(Guide(text="equal", y=0.0),),
    )


def _band_tables(pair: MismatchPair, suffix: str) -> tuple[Table, ...]:
    """Return a table for each way to divide tokens into bands, by position and by entropy; titles end with `suffix`."""
    return tuple(
        Table(
            title=f"By {kind}{suffix}",
            columns=(kind, "tokens", "mean |p - q|", "max |p - q|", "k1", "k3", "KL"),
            rows=tuple(
                (
                    band.name,
                    f"{band.tokens:,}",
                    estimated(band.gap),
                    format_number(band.max_gap),
                    estimated(band.k1),
                    estimated(band.k3),
                    _bounds(band.kl, pair.numbers.kl_is_exact),
                )
                for band in bands
            ),
            is_detail=True,
        )
        for kind, bands in pair.numbers.bands.items()
    )
