"""Turns the results of `jackpot mismatch` into tables and charts; computes no number of its own.

The charts are those of the TIS post (largest and mean gap of every response, gap by length), and gaps by position,
entropy and ratio.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

from jackpot.analysis.mismatch.measure import FAR, HIGH_GAP, MismatchNumbers, TokenBand
from jackpot.analysis.mismatch.mismatch import MismatchPair, MismatchResult
from jackpot.core.statistics import Estimate
from jackpot.ui.charts import DASHED, GRAY, Chart, Guide, Section, Series, Table, as_details, finite
from jackpot.ui.numbers import format_number

_SMALLEST = 1e-16  # smallest value on a logarithmic axis
_ROWS: tuple[tuple[str, Callable[[MismatchPair], str]], ...] = (
    ("responses", lambda one: f"{one.numbers.responses:,}"),
    ("tokens", lambda one: f"{one.numbers.tokens:,}"),
    ("cut at the limit", lambda one: f"{one.cut:.1%}"),
    ("largest |p - q| of all tokens", lambda one: format_number(one.numbers.max_gap)),
    ("largest |p - q| of a response, mean", lambda one: estimated(one.numbers.response_max_gap)),
    (f"responses with one above {HIGH_GAP:g}", lambda one: f"{one.numbers.high:,}"),
    ("mean |p - q| of a token", lambda one: estimated(one.numbers.gap)),
    ("mean |p - q| of a response, mean", lambda one: estimated(one.numbers.response_mean_gap)),
    ("mean |log p - log q|", lambda one: estimated(one.numbers.log_gap)),
    ("tokens with another most probable one", lambda one: _share(one.numbers.other_token)),
    ("tokens sent to other experts", lambda one: _share(one.numbers.other_experts)),
    ("KL by k1, nats per token", lambda one: estimated(one.numbers.k1)),
    ("KL by k3", lambda one: estimated(one.numbers.k3)),
    ("KL of whole distributions", lambda one: _bounds(one.numbers.kl, one.numbers.kl_is_exact)),
    ("total variation", lambda one: _bounds(one.numbers.variation, one.numbers.kl_is_exact)),
    ("mean q/p", lambda one: estimated(one.numbers.ratio)),
    ("q/p, 1 % of tokens are below", lambda one: format_number(one.numbers.quantiles["0.01"], ".4f")),
    ("q/p, median", lambda one: format_number(one.numbers.quantiles["0.5"], ".4f")),
    ("q/p, 1 % of tokens are above", lambda one: format_number(one.numbers.quantiles["0.99"], ".4f")),
    (f"sampled mass with q/p above {FAR:g}", lambda one: f"{one.numbers.above:.3%}"),
    (f"sampled mass with q/p below {1 / FAR:g}", lambda one: f"{one.numbers.below:.3%}"),
    (
        "learner's mass on tokens that can be drawn",
        lambda one: estimated(one.numbers.support) if one.numbers.support else "1",
    ),
)


def estimated(value: Estimate | None) -> str:
    """Format a mean with its standard error in brackets."""
    if value is None:
        return "-"
    return format_number(value.value) + ("" if value.error is None else f" ({value.error:.1g})")


def _share(value: Estimate | None) -> str:
    return "-" if value is None else f"{value.value:.3%}"


def _bounds(both: tuple[Estimate, Estimate] | None, is_exact: bool) -> str:
    if both is None:
        return "-"
    return estimated(both[0]) if is_exact else f"{estimated(both[0])} to {estimated(both[1])}"


def verdicts(result: MismatchResult) -> list[str]:
    """Return a sentence for each pair, which names it where there are several."""
    several = len(result.pairs) > 1
    return [f"{pair.sampler} | {pair.learner}: " * several + pair.verdict for pair in result.pairs]


def mismatch_sections(result: MismatchResult) -> dict[str, Section]:
    """Return the sections of the page by their names."""
    details = as_details({"tokens": _token_section(result.pairs)})
    return {"responses": _response_section(result.pairs)} | details


def _over_pairs(
    pairs: Sequence[MismatchPair],
    x: Callable[[MismatchPair], Sequence[float]],
    y: Callable[[MismatchPair], Sequence[float]],
    style: Literal["line", "points"],
) -> tuple[Series, ...]:
    return tuple(
        Series(
            name=pair.name,
            x=finite(x(pair), _SMALLEST),
            y=finite(y(pair), _SMALLEST),
            number=number,
            style=style,
        )
        for number, pair in enumerate(pairs)
    )


def _response_section(pairs: Sequence[MismatchPair]) -> Section:
    table = Table(
        title=_what(pairs),
        columns=("p of the sampler, q of the learner", *(pair.name for pair in pairs)),
        rows=tuple((text, *(read(pair) for pair in pairs)) for text, read in _ROWS),
        note="In brackets: standard errors, of means over tokens clustered by response. All numbers are at the tokens "
        "that the sampler drew. " + _known(pairs),
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
    """Return a table for each pair with such layers; of two columns, which are text and break where they must."""
    several = len(pairs) > 1
    return tuple(
        Table(
            title="Layers that the two sides compute in different number formats" + f": {pair.name}" * several,
            columns=("layers", "sampler | learner"),
            rows=tuple((layers, f"{sampler} | {learner}") for layers, sampler, learner in pair.layers),
        )
        for pair in pairs
        if pair.layers
    )


def _what(pairs: Sequence[MismatchPair]) -> str:
    """Name the sampler and the learner that all pairs share."""
    sides = {"sampler": {pair.sampler for pair in pairs}, "learner": {pair.learner for pair in pairs}}
    return ", ".join(f"{role}: {names.pop()}" for role, names in sides.items() if len(names) == 1) or "All pairs"


def _known(pairs: Sequence[MismatchPair]) -> str:
    """Say whether the KL of whole distributions is exact, bounded or unknown."""
    if all(pair.numbers.kl is None for pair in pairs):
        return "The KL of whole distributions is not known: the learner reports single tokens only."
    if all(pair.numbers.kl_is_exact for pair in pairs if pair.numbers.kl):
        return "The KL and the total variation are exact: both sides' whole distributions were known."
    most = max(pair.top_log_probs for pair in pairs)
    return (
        f"The KL and the total variation lie between two bounds: of the sampler's distribution the {most} most "
        f"probable tokens were known."
    )


def _response_charts(pairs: Sequence[MismatchPair]) -> tuple[Chart, ...]:
    def ranks(pair: MismatchPair) -> list[float]:
        return [(rank + 1) / pair.numbers.responses for rank in range(pair.numbers.responses)]

    def ordered(read: Callable[[MismatchNumbers], list[float]]) -> Callable[[MismatchPair], list[float]]:
        return lambda pair: sorted(read(pair.numbers), reverse=True)

    largest = ordered(lambda numbers: [one.max_gap for one in numbers.each])
    means = ordered(lambda numbers: [one.mean_gap for one in numbers.each])
    return (
        Chart(
            title="Largest gap of every response",
            x_label="share of responses",
            y_label="max |p - q|",
            series=_over_pairs(pairs, ranks, largest, "line"),
            note="Responses ordered from the worst: this share has a largest gap of at least y.",
            log_y=True,
            guides=(Guide(text=f"{HIGH_GAP:g}", y=HIGH_GAP),),
        ),
        Chart(
            title="Mean gap of every response",
            x_label="share of responses",
            y_label="mean |p - q|",
            series=_over_pairs(pairs, ranks, means, "line"),
            note="Responses ordered from the worst.",
            log_y=True,
        ),
        Chart(
            title="Largest gap against length",
            x_label="tokens of the response",
            y_label="max |p - q|",
            series=_over_pairs(
                pairs,
                lambda pair: [one.tokens for one in pair.numbers.each],
                lambda pair: [one.max_gap for one in pair.numbers.each],
                "points",
            ),
            note="A longer response has more chances of a large gap.",
            log_y=True,
        ),
    )


def _token_section(pairs: Sequence[MismatchPair]) -> Section:
    by_position = _band_charts(pairs, "position", "position in the response")
    by_entropy = _band_charts(pairs, "entropy", "entropy, nats")
    tables = tuple(table for pair in pairs for table in _band_tables(pair, f": {pair.name}" if len(pairs) > 1 else ""))
    return Section(
        title="Where the gap is",
        intro="The same gaps by the length of the response, by the position of the token, and by the entropy of the "
        "learner's distribution there: a token that is certain to both has no gap.",
        items=(_scatter(pairs), *by_position, *by_entropy, _quantile_chart(pairs), *tables),
    )


def _scatter(pairs: Sequence[MismatchPair]) -> Chart:
    clouds = tuple(
        Series(
            name=pair.name,
            x=[p for p, _ in pair.numbers.drawn],
            y=[q for _, q in pair.numbers.drawn],
            number=number,
            style="points",
        )
        for number, pair in enumerate(pairs)
    )
    line = Series(name="equal", x=(0.0, 1.0), y=(0.0, 1.0), number=GRAY + DASHED)

    return Chart(
        title="Both probabilities of sampled tokens",
        x_label="p of the sampler",
        y_label="q of the learner",
        series=(*clouds, line),
        note="Some tokens, evenly over all, and the one with the largest gap.",
    )


def _band_charts(pairs: Sequence[MismatchPair], kind: str, label: str) -> tuple[Chart, ...]:
    names = tuple(dict.fromkeys(band.name for pair in pairs for band in pair.numbers.bands.get(kind, ())))
    if not names:
        return ()

    def line(number: int, pair: MismatchPair, value: Callable[[TokenBand], Estimate]) -> Series:
        bands = {band.name: value(band) for band in pair.numbers.bands.get(kind, ())}

        def edge(errors: float) -> Sequence[float | None]:
            edges = {name: mean.value + errors * (mean.error or 0.0) for name, mean in bands.items()}
            return finite([edges.get(name) for name in names], _SMALLEST)

        return Series(
            name=pair.name,
            x=tuple(range(len(names))),
            y=edge(0.0),
            low=edge(-1.0),
            high=edge(1.0),
            number=number,
            style="both",
        )

    is_exact = all(pair.numbers.kl_is_exact for pair in pairs)

    def chart(title: str, y_label: str, value: Callable[[TokenBand], Estimate]) -> Chart:
        return Chart(
            title=title,
            x_label=label,
            y_label=y_label,
            series=tuple(line(number, pair, value) for number, pair in enumerate(pairs)),
            note="The band is one standard error.",
            x_names=names,
            log_y=True,
        )

    return (
        chart(f"Mean gap by {kind}", "mean |p - q|", lambda band: band.gap),
        chart(
            f"KL by {kind}",
            "nats per token" if is_exact else "k3, nats per token",
            lambda band: band.kl[0] if is_exact and band.kl else band.k3,
        ),
    )


def _quantile_chart(pairs: Sequence[MismatchPair]) -> Chart:
    names = tuple(pairs[0].numbers.quantiles)

    def logs(pair: MismatchPair) -> list[float]:
        return [math.log(ratio) if ratio > 0.0 else -math.inf for ratio in pair.numbers.quantiles.values()]

    return Chart(
        title="Quantiles of log q/p",
        x_label="share of tokens below",
        y_label="nats",
        series=tuple(
            Series(name=pair.name, x=tuple(range(len(names))), y=finite(logs(pair)), number=number, style="both")
            for number, pair in enumerate(pairs)
        ),
        note="From the smallest ratio to the largest one.",
        x_names=names,
        guides=(Guide(text="equal", y=0.0),),
    )


def _band_tables(pair: MismatchPair, of: str) -> tuple[Table, ...]:
    return tuple(
        Table(
            title=f"By {kind}{of}",
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
        )
        for kind, bands in pair.numbers.bands.items()
    )
