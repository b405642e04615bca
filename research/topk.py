"""Compares Z from the two top-k sets with the exact Z (appendix C.3), with the fill-in and without.

    python -m research.topk                 # the synthetic families of research/families.py
    python -m research.topk quickstart      # a recipe's two models, on responses of the rollout model

A table is printed; the folder gets topk.html and topk.json. At lam = 1. Shapes: `N` states, `K` values of k, `D` tokens
drawn at each state.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

import torch
from rich.console import Console
from torch import Tensor

from jackpot.analysis.simulate.distributions import (
    LAMS,
    RECIPE_LAM,
    StateNumbers,
    StatePairs,
    concatenate,
    measure_states,
)
from jackpot.objectives import obrs
from jackpot.ui.charts import DASHED, Chart, Section, Series, Table, finite
from jackpot.ui.numbers import format_number
from jackpot.ui.results import write_results
from jackpot.ui.terminal.output import show_files, show_tables
from research.families import (
    FAMILIES,
    VOCABULARY,
    example_gap,
    example_states,
    family_points,
    recipe_states,
    source_parser,
)

KS = (2, 5, 10, 20, 40, 80, 160)
RECIPE_K = 20  # k of the paper and of the recipes
_LOW_QUANTILE = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class TopKNumbers:
    """The top-k estimate of Z at each state and each k, [N, K] each."""

    value: Tensor  # Z_k, which enters the weight
    lower: Tensor
    upper: Tensor
    captured: Tensor  # p_inf of the tokens whose two probabilities are known


@dataclass(frozen=True, kw_only=True, slots=True)
class TopKSummary:
    """The top-k estimate of Z at one k, over all states of a pair of models."""

    k: int
    fill_in: bool  # whether p_inf is known at the policy's top-k
    z_share: float  # mean of Z_k / Z
    z_share_low: float  # the quantile of 1 % of Z_k / Z
    width: float  # mean of upper - lower
    captured: float  # mean
    outside: int  # states whose exact Z lies outside the bounds
    kappa: float  # sum a / sum Z_k over the sampled tokens
    kappa_error: float  # standard error of kappa over the draw of tokens at these states
    kappa_exact: float  # sum Z / sum Z_k, which kappa estimates
    corrected: float  # mean of kappa * Z_k over the mean of Z


def topk_sizes(vocabulary: int) -> tuple[int, ...]:
    """Return the KS below the vocabulary's size; where that leaves some out, the vocabulary comes last (Z_k is Z)."""
    below = tuple(k for k in KS if k < vocabulary)
    return below if len(below) == len(KS) else (*below, vocabulary)


def topk_numbers(states: StatePairs, fill_in: bool) -> TopKNumbers:
    """Estimate Z of every state at every k, as training does from the top-k lists of engine and policy."""
    ks = topk_sizes(states.rollout.shape[1])
    rollout = states.rollout.topk(ks[-1], dim=-1)
    target = states.target.topk(ks[-1], dim=-1)
    target_at_rollout = states.target.gather(-1, rollout.indices)
    rollout_at_target = states.rollout.gather(-1, target.indices)
    valid = torch.full((len(states),), fill_in)
    estimates = [
        obrs.topk_z(
            rollout_top_log_probs=rollout.values[:, :k],
            target_at_rollout_top=target_at_rollout[:, :k],
            rollout_top_ids=rollout.indices[:, :k],
            target_top_ids=target.indices[:, :k],
            target_top_log_probs=target.values[:, :k],
            fill_ins=rollout_at_target[:, :k],
            fill_valid=valid,
            lam=1.0,
        )
        for k in ks
    ]
    value, lower, upper, captured, *_ = (torch.stack(columns, dim=-1) for columns in zip(*estimates, strict=True))
    return TopKNumbers(value=value, lower=lower, upper=upper, captured=captured)


def topk_summary(
    numbers: TopKNumbers, exact: StateNumbers, variance: Tensor, sampled: Tensor, vocabulary: int, fill_in: bool
) -> tuple[TopKSummary, ...]:
    """Summarize the estimates over all states, one row for each k.

    Args:
        numbers: at each of the `topk_sizes` of `vocabulary`.
        variance: [N] of a(x) at each state, x drawn from p_inf.
        sampled: [N, D] acceptance a(x) of the tokens drawn at each state.
    """
    z = exact.acceptance[:, RECIPE_LAM]
    draws = sampled.shape[1]
    error = (variance.sum() * draws).sqrt()  # standard deviation of sum a, given the states
    rows = []
    for index, k in enumerate(topk_sizes(vocabulary)):
        value, lower, upper = numbers.value[:, index], numbers.lower[:, index], numbers.upper[:, index]
        share = torch.where(z > 0, value / z, 1.0)
        z_sum = value.sum() * draws
        kappa = obrs.kappa(sampled.sum(), z_sum)
        rows.append(
            TopKSummary(
                k=k,
                fill_in=fill_in,
                z_share=float(share.mean()),
                z_share_low=float(share.quantile(_LOW_QUANTILE)),
                width=float((upper - lower).mean()),
                captured=float(numbers.captured[:, index].mean()),
                outside=int(((z < lower - 1e-12) | (z > upper + 1e-12)).sum()),
                kappa=float(kappa),
                kappa_error=float(error / z_sum),
                kappa_exact=float(obrs.kappa(z.sum(), value.sum())),
                corrected=float(kappa * value.mean() / z.mean()),
            )
        )
    return tuple(rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class TopKSource:
    """Holds the estimates for one pair of models."""

    name: str
    vocabulary: int
    rows: tuple[TopKSummary, ...]  # with the fill-in, then without


def main() -> None:
    typed = source_parser(__doc__, "runs/topk").parse_intermixed_args()

    if typed.recipe:
        name, _, states = recipe_states(typed.recipe, typed.arm, typed.overrides, typed.prompts, typed.seed)
        sources = [topk_source(name, states)]
    else:
        sources = of_families(typed.seed)

    sections = {"topk": topk_section(sources)}
    numbers = {"seed": typed.seed, "sources": [asdict(source) for source in sources]}
    files = write_results(typed.out, "topk", "Z from the top k", sections, numbers)
    show_tables(Console(), sections.values())
    show_files(Console(), files)


def of_families(seed: int, vocabulary: int = VOCABULARY) -> list[TopKSource]:
    """Estimate Z for each synthetic family at the gap of its example."""
    sources = []
    for family in FAMILIES:
        gap = example_gap(family, family_points(family, seed, vocabulary))
        sources.append(topk_source(family.name, example_states(family, gap, seed, vocabulary)))
    return sources


def topk_source(name: str, chunks: Iterable[StatePairs]) -> TopKSource:
    """Estimate Z at all states of one pair of models."""
    exact, variances, sampled, vocabulary = [], [], [], 0
    estimates: dict[bool, list[TopKNumbers]] = {True: [], False: []}
    for states in chunks:
        exact.append(measure_states(states))
        variances.append(acceptance_variance(states))
        sampled.append(sampled_acceptance(states))
        for fill_in, parts in estimates.items():
            parts.append(topk_numbers(states, fill_in))
        vocabulary = states.rollout.shape[1]

    drawn = (concatenate(exact), torch.cat(variances), torch.cat(sampled))
    rows = [
        row
        for fill_in, parts in estimates.items()
        for row in topk_summary(concatenate(parts), *drawn, vocabulary, fill_in)
    ]
    return TopKSource(name=name, vocabulary=vocabulary, rows=tuple(rows))


def acceptance_variance(states: StatePairs) -> Tensor:
    """Return the variance of the acceptance a(x) at lam = 1 at each state, x drawn from p_inf, [N]."""
    accept = obrs.acceptance(states.rollout, states.target, 1.0)
    square = torch.where(states.rollout > -torch.inf, states.rollout.exp() * accept.square(), 0.0).sum(-1)
    return (square - obrs.exact_z(states.rollout, states.target, 1.0).square()).clamp(min=0.0)


def sampled_acceptance(states: StatePairs) -> Tensor:
    """Return the acceptance a(x) of the drawn tokens at lam = 1, [N, D]."""
    ids = states.token_ids
    return obrs.acceptance(states.rollout.gather(-1, ids), states.target.gather(-1, ids), LAMS[RECIPE_LAM])


_COLUMNS: tuple[tuple[str, Callable[[TopKSummary], str]], ...] = (
    ("fill-in", lambda row: "yes" if row.fill_in else "no"),
    ("Z_k / Z", lambda row: format_number(row.z_share, ".4f")),
    ("1 % below", lambda row: format_number(row.z_share_low, ".4f")),
    ("width", lambda row: format_number(row.width, ".1e")),
    ("captured", lambda row: format_number(row.captured, ".4f")),
    ("kappa", lambda row: format_number(row.kappa, ".4f")),
    ("error", lambda row: format_number(row.kappa_error, ".4f")),
    ("Z / Z_k", lambda row: format_number(row.kappa_exact, ".4f")),
)


def topk_section(sources: Sequence[TopKSource]) -> Section:
    """Return the section on Z from the top k, for every pair of models and every k."""
    names = tuple(name for name, _ in _COLUMNS)
    usual = tuple(_row(source, row) for source in sources for row in source.rows if row.k == RECIPE_K)
    table = Table(
        title=f"Z from the top {RECIPE_K}",
        columns=("source", *names),
        rows=usual,
        note="kappa, with its standard error, is what training computes from the sampled tokens; it estimates Z / Z_k. "
        "It corrects the mean over states, not each state.",
    )
    every = Table(
        title="Z from the top k",
        columns=("source", *names, "k", "corrected"),
        rows=tuple(
            (*_row(source, row), str(row.k), format_number(row.corrected, ".4f"))
            for source in sources
            for row in source.rows
        ),
        note="corrected: the mean of kappa Z_k over the mean of Z.",
    )
    outside = sum(row.outside for source in sources for row in source.rows)
    vocabulary = sources[0].vocabulary if sources else 0
    return Section(
        title="Z from the two top-k sets",
        intro=f"Appendix C.3 at lam = 1 over a vocabulary of {vocabulary:,}; k is never more than that. The fill-in "
        f"takes the rollout model's probabilities of the policy's top k. The exact Z lies outside the bounds at "
        f"{outside} states.",
        items=(table, *_topk_charts([source.name for source in sources], [source.rows for source in sources]), every),
    )


def _row(source: TopKSource, row: TopKSummary) -> tuple[str, ...]:
    return (source.name, *(read(row) for _, read in _COLUMNS))


_TOPK_CHARTS: tuple[tuple[str, str, Callable[[TopKSummary], float], str], ...] = (
    ("Share of Z", "mean of Z_k / Z", lambda row: row.z_share, "Z_k is at most Z and reaches it as k grows."),
    (
        "Share of Z at the worst states",
        "Z_k / Z, 1 % of states are below",
        lambda row: row.z_share_low,
        "The mean hides flat states, where the top k hold little.",
    ),
    ("Width of the bounds", "upper - lower bound on Z", lambda row: row.width, "The exact Z lies in between."),
    ("Captured mass", "p_rollout with both known", lambda row: row.captured, "Solid: with the fill-in."),
    (
        "The ratio that kappa estimates",
        "mean Z / mean Z_k",
        lambda row: row.kappa_exact,
        "One number for a whole step.",
    ),
    (
        "Z_k corrected by kappa",
        "kappa x mean Z_k / mean Z",
        lambda row: row.corrected,
        "Equal for every k: the rest is noise of the sampled tokens.",
    ),
)


def _topk_charts(names: Sequence[str], rows: Sequence[Sequence[TopKSummary]]) -> tuple[Chart, ...]:
    """Return charts over k: solid with the fill-in, dashed without."""
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
                        y=finite([read(row) for row in chosen]),
                        color_index=order if fill_in else order + DASHED,
                        style="both",
                    )
                )
        charts.append(Chart(title=title, x_label="k", y_label=label, series=tuple(series), note=note, log_x=True))
    return tuple(charts)


if __name__ == "__main__":
    main()
