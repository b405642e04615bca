"""Tables of a replay: the run before any correction, and what each correction does to it."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from jackpot.analysis.replay.results import QUANTILES, CorrectionResult, ReplayResult, correction_result
from jackpot.analysis.replay.stats import ratio_quantile
from jackpot.core.metrics import Mean
from jackpot.ui.charts import Section, Table
from jackpot.ui.numbers import format_number
from jackpot.ui.views.advice import generation_tables, judged_table

_OWN_MARK = " *"  # after the name of the correction that the run trains with
_NOTHING = 1e-4  # largest share of rejected tokens that counts as no rejection
_NAMES_IN_ROW = 2  # most names of corrections with equal results in one row; further names are counted
_Columns = tuple[tuple[str, Callable[[CorrectionResult], str]], ...]  # head, and how a result's cell is formatted
_Row = tuple[str, CorrectionResult]  # names of corrections with equal results, and that result
_SAMPLED: _Columns = (
    ("rejected", lambda result: f"{1.0 - result.accepted:.1%}"),
    ("responses", lambda result: f"{result.dropped_responses:.1%}"),
    ("capped", lambda result: f"{result.capped:.2%}"),
    ("clipped", lambda result: f"{result.clipped:.1%}"),
    ("ESS", lambda result: f"{result.effective:.1%}"),
    ("TV after", lambda result: f"{result.sampled_tv_after_correction:.2%}"),
)
_WEIGHTS: _Columns = (
    ("1 %", lambda result: format_number(result.weight_p1)),
    ("median", lambda result: format_number(result.weight_p50)),
    ("99 %", lambda result: format_number(result.weight_p99)),
    ("max", lambda result: format_number(result.weight_max)),
    ("mean", lambda result: format_number(result.weight_mean, ".3f")),
)
_EXACT: _Columns = (
    ("TV after", lambda result: f"{result.tv_after_correction:.2%}"),
    ("ESS", lambda result: f"{result.exact_effective:.1%}"),
    ("bias", lambda result: format_number(result.bias, ".3f")),
    ("drift", lambda result: format_number(result.drift, ".3f")),
    ("variance", lambda result: format_number(result.variance, ".2f")),
    ("states", lambda result: format_number(result.state_spread, ".3f")),
)


def corrections(result: ReplayResult) -> Section:
    """Return the section with all tables of the corrections."""
    # Each distinct result, with the names of its corrections; `_OWN_MARK` follows the name of the run's own.
    rows = _rows([correction_result(correction) for correction in result.corrections])
    mark = _OWN_MARK.strip()
    legend = f" {mark} is what the run trains with." if any(_OWN_MARK in names for names, _ in rows) else ""
    details = [
        _table(
            "On the sampled tokens",
            rows,
            _SAMPLED,
            "rejected, capped, clipped (by PPO's clip): shares of tokens; responses: share without any token left; "
            "ESS: effective sample size, (sum F)^2 / (n sum F^2) of the factor F on the gradient; TV after: total "
            f"variation left after the correction, from these tokens alone.{legend}",
        ),
        _table("Weight times mask, averaged over the Bernoulli mask", rows, _WEIGHTS, ""),
    ]

    # Results that also have numbers from whole distributions. These were known in some states, the same for all.
    exact = [(names, correction) for names, correction in rows if correction.tv_after_correction is not None]
    if exact:
        details.append(
            _table(
                f"Summed over the vocabulary, in {exact[0][1].states:,} states",
                exact,
                _EXACT,
                "TV after: total variation left after the correction; ESS: of tokens, as above; bias: of the "
                "gradient's direction, 0 exact, 1 unrelated; drift: the push that every advantage gives to all "
                "tokens; variance: times that of the policy's own rollouts; states: sd / mean of their weights.",
            )
        )

    answer = result.answer.numbers()
    details += [*_rejections(rows), *generation_tables(answer)]
    tables = (judged_table(answer), *(replace(table, is_detail=True) for table in details))
    return Section(title="Corrections", intro="", items=tables)


def facts(result: ReplayResult) -> Table:
    """Return a table of the run before any correction: sizes, total variations, KL, ratios."""
    metrics = result.run

    def value(name: str) -> float:
        """Return the value of the run's metric `name`."""
        return float(metrics[name].value)

    ratio = Mean.named(metrics, "ratio")
    tokens = Mean.named(metrics, "total_variation").count  # the number of tokens in the mean
    quantiles = ", ".join(f"{ratio_quantile(metrics, 'mismatch/log_ratio', share):.3g}" for share in QUANTILES)
    divergences = ", ".join(format_number(value(f"mismatch/kl_{name}"), ".4f") for name in ("k1", "k3"))
    clips = [correction.setting.objective for correction in result.corrections[:1]]  # all have the same PPO clip

    rows = [
        ("responses, tokens", f"{int(value('responses')):,}, {int(tokens):,}"),
        ("mean length", f"{value('length'):.1f}"),
        ("policy", result.policy),
        *(("PPO's clip", f"1 - {clip.clip_low:g} to 1 + {clip.clip_high:g}") for clip in clips),
        ("total variation, rollout model and old policy", f"{value('total_variation_engine'):.2%}"),
        ("total variation, old and updated policy", f"{value('total_variation_stale'):.2%}"),
        ("total variation, rollout model and updated policy", f"{value('total_variation'):.2%}"),
        # The total variation in the first and in the last file or iteration.
        *((f"the same in {where}", f"{gap:.2%}") for where, gap in result.ends if len(result.ends) > 1),
        ("KL(rollout model || policy), k1 and k3", f"{divergences} nats"),
        # rho is p_updated_policy / p_rollout_model of a sampled token.
        ("mean of rho, must be 1", f"{float(ratio.value):.4f} +- {float(ratio.standard_error):.4f}"),
        ("rho: 1 %, median, 99 %, max", f"{quantiles}, {value('mismatch/ratio_max'):.3g}"),
        ("ESS of whole responses, by their ratio", f"{value('mismatch/sequence_ess'):.1%}"),
    ]
    if "z" in metrics:  # Z is the expected acceptance, from whole distributions
        known = float(Mean.named(metrics, "z").count / tokens)
        rows += [
            ("tokens with both distributions known", f"{known:.1%}"),
            ("mean Z at lam = 1 there", f"{value('z'):.4f}"),
        ]

    return Table(
        title=f"{result.path}: {result.format}, {result.files} files",
        columns=("", ""),
        rows=tuple(rows),
        is_detail=True,
    )


def _table(title: str, rows: Sequence[_Row], columns: _Columns, note: str) -> Table:
    """Return a table with a row for each distinct result, which names the corrections that have it."""
    return Table(
        title=title,
        columns=("correction", *(name for name, _ in columns)),
        rows=tuple((names, *(cell(correction) for _, cell in columns)) for names, correction in rows),
        note=note,
    )


def _rejections(rows: Sequence[_Row]) -> list[Table]:
    """Return a table of the shares of tokens that corrections reject, by position and entropy; none if none rejects."""
    # Each row by the shares that its corrections reject in each band; of equal shares only the first row is kept.
    distinct: dict[tuple[float, ...], _Row] = {}
    for names, correction in rows:
        if correction.accepted < 1.0 - _NOTHING:
            shares = tuple(round(share, 6) for share in correction.rejected_by_band.values())
            distinct.setdefault(shares, (names, correction))
    if not distinct:
        return []

    def cell(correction: CorrectionResult, band: str) -> str:
        """Format the share of a band's tokens that a correction rejects; empty if there is no such token."""
        return f"{correction.rejected_by_band[band]:.1%}" if band in correction.rejected_by_band else ""

    rejecting = distinct.values()
    bands = list(dict.fromkeys(band for _, correction in rejecting for band in correction.rejected_by_band))
    return [
        Table(
            title="Rejected, by position and by the policy's entropy (H, nats)",
            columns=("correction", *(band.replace("position ", "at ").replace("entropy ", "H ") for band in bands)),
            rows=tuple((names, *(cell(correction, band) for band in bands)) for names, correction in rejecting),
        )
    ]


def _rows(results: Sequence[CorrectionResult]) -> list[_Row]:
    """Return each distinct result once, in the order of the results, with the names of the corrections that have it."""
    groups: dict[tuple, list[CorrectionResult]] = {}
    for result in results:
        groups.setdefault(result.fingerprint, []).append(result)

    rows = []
    for group in groups.values():
        own_first = sorted(group, key=lambda result: not result.is_own)
        names = [result.label + (_OWN_MARK if result.is_own else "") for result in own_first]
        further = len(names) - _NAMES_IN_ROW
        rows.append((", ".join(names[:_NAMES_IN_ROW]) + (f", {further} more" if further > 0 else ""), group[0]))
    return rows
