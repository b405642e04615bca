"""Z from the two top-k sets as a section of a page. Layer 6, pure."""

from collections.abc import Callable, Sequence

from jackpot.lab.simulate.simulation import Source
from jackpot.lab.simulate.topk import RECIPE_K, TopK
from jackpot.report.charts import Chart, Section, Series, Table
from jackpot.report.shown import DASHED, drawn, number

_COLUMNS: tuple[tuple[str, Callable[[TopK], str]], ...] = (
    ("fill-in", lambda row: "yes" if row.fill_in else "no"),
    ("Z_k / Z", lambda row: number(row.z_share, ".4f")),
    ("1 % below", lambda row: number(row.z_share_low, ".4f")),
    ("width", lambda row: number(row.width, ".1e")),
    ("captured", lambda row: number(row.captured, ".4f")),
    ("kappa", lambda row: number(row.kappa, ".4f")),
    ("error", lambda row: number(row.kappa_error, ".4f")),
    ("Z / Z_k", lambda row: number(row.kappa_exact, ".4f")),
)


def topk_section(sources: Sequence[Source]) -> Section:
    """Of every source, at every k."""
    names = tuple(name for name, _ in _COLUMNS)
    usual = tuple(_row(source, row) for source in sources for row in source.topk if row.k == RECIPE_K)
    table = Table(
        title=f"Z from the top {RECIPE_K}",
        columns=("source", *names),
        rows=usual,
        note="kappa, with its standard error, is what training computes from the tokens that were written; Z / Z_k is "
        "what it estimates. It mends the mean, not the single state.",
    )
    every = Table(
        title="Z from the top k",
        columns=("source", *names, "k", "corrected"),
        rows=tuple(
            (*_row(source, row), str(row.k), number(row.corrected, ".4f")) for source in sources for row in source.topk
        ),
        note="corrected: the mean of kappa Z_k over the mean of Z.",
    )
    outside = sum(row.outside for source in sources for row in source.topk)
    vocabulary = sources[0].vocabulary if sources else 0
    return Section(
        title="Z from the two top-k sets",
        intro=f"Appendix C.3 at lam = 1 over a vocabulary of {vocabulary:,}; k is never more than that. The fill-in "
        f"asks the rollout model for its probability of the policy's top k. The exact Z lies outside the bounds at "
        f"{outside} states. " + " ".join(f"{source.name}: {source.text}." for source in sources),
        items=(table, *_topk_charts([source.name for source in sources], [source.topk for source in sources]), every),
    )


def _row(source: Source, row: TopK) -> tuple[str, ...]:
    return (source.name, *(read(row) for _, read in _COLUMNS))


_TOPK_CHARTS: tuple[tuple[str, str, Callable[[TopK], float], str], ...] = (
    ("Share of Z", "mean of Z_k / Z", lambda row: row.z_share, "Z_k is never above Z and meets it as k grows."),
    (
        "Share of Z at the worst states",
        "Z_k / Z, 1 % of states are below",
        lambda row: row.z_share_low,
        "The mean hides flat states, where the top k hold little.",
    ),
    ("What is left open", "upper - lower bound on Z", lambda row: row.width, "The exact Z lies in between."),
    ("Mass that is captured", "p_rollout with both known", lambda row: row.captured, "Solid: with the fill-in."),
    ("What kappa estimates", "mean Z / mean Z_k", lambda row: row.kappa_exact, "One number for a whole step."),
    (
        "What kappa makes of it",
        "kappa x mean Z_k / mean Z",
        lambda row: row.corrected,
        "The same for every k: what is left is which tokens were drawn.",
    ),
)


def _topk_charts(names: Sequence[str], rows: Sequence[Sequence[TopK]]) -> tuple[Chart, ...]:
    """Over k: solid with the fill-in, dashed without."""
    charts = []
    for title, label, read, note in _TOPK_CHARTS:
        series = []
        for order, (name, each) in enumerate(zip(names, rows, strict=True)):
            for fill_in in (True, False):
                chosen = [row for row in each if row.fill_in == fill_in]
                series.append(
                    Series(
                        name=name if fill_in else f"{name}, no fill-in",
                        x=tuple(row.k for row in chosen),
                        y=drawn([read(row) for row in chosen]),
                        number=order if fill_in else order + DASHED,
                        style="both",
                    )
                )
        charts.append(Chart(title=title, x_label="k", y_label=label, series=tuple(series), note=note, log_x=True))
    return tuple(charts)
