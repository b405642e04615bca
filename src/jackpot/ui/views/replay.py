"""Turns a replay into tables."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from jackpot.analysis.replay.results import QUANTILES, CorrectionResult, ReplayResult, correction_result
from jackpot.analysis.replay.stats import ratio_quantile
from jackpot.core.metrics import Mean
from jackpot.ui.charts import Section, Table
from jackpot.ui.numbers import format_number
from jackpot.ui.views.advice import generation_tables, judged_table

OWN = " *"
_NOTHING = 1e-4  # largest share of rejected tokens that counts as no rejection
_NAMES_IN_ROW = 2  # names of corrections with equal results in one row; the others are counted
_Columns = tuple[tuple[str, Callable[[CorrectionResult], str]], ...]
_SAMPLED: _Columns = (
    ("rejected", lambda one: f"{1.0 - one.accepted:.1%}"),
    ("responses", lambda one: f"{one.dropped_responses:.1%}"),
    ("capped", lambda one: f"{one.capped:.2%}"),
    ("clipped", lambda one: f"{one.clipped:.1%}"),
    ("ESS", lambda one: f"{one.effective:.1%}"),
    ("TV after", lambda one: f"{one.sampled_tv_after_correction:.2%}"),
)
_WEIGHTS: _Columns = (
    ("1 %", lambda one: format_number(one.weight_p1)),
    ("median", lambda one: format_number(one.weight_p50)),
    ("99 %", lambda one: format_number(one.weight_p99)),
    ("max", lambda one: format_number(one.weight_max)),
    ("mean", lambda one: format_number(one.weight_mean, ".3f")),
)
_EXACT: _Columns = (
    ("TV after", lambda one: f"{one.tv_after_correction:.2%}"),
    ("ESS", lambda one: f"{one.exact_effective:.1%}"),
    ("bias", lambda one: format_number(one.bias, ".3f")),
    ("drift", lambda one: format_number(one.drift, ".3f")),
    ("variance", lambda one: format_number(one.variance, ".2f")),
    ("states", lambda one: format_number(one.state_spread, ".3f")),
)


def corrections(result: ReplayResult) -> Section:
    """Return the section with all tables of the corrections."""
    rows = _together([correction_result(correction) for correction in result.corrections])
    exact = [(names, one) for names, one in rows if one.tv_after_correction is not None]
    of_run = f" {OWN.strip()} is what the run trains with." if any(OWN in names for names, _ in rows) else ""
    items = [
        _table(
            "On the sampled tokens",
            rows,
            _SAMPLED,
            "rejected, capped, clipped (by PPO's clip): shares of tokens; responses: share without any token left; "
            "ESS: effective sample size, (sum F)^2 / (n sum F^2) of the factor F on the gradient; TV after: total "
            f"variation left after the correction, from these tokens alone.{of_run}",
        ),
        _table("Weight times mask, averaged over the Bernoulli mask", rows, _WEIGHTS, ""),
    ]
    if exact:
        items.append(
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
    details = (*items, *_masking(rows), *generation_tables(answer))
    tables = (judged_table(answer), *(replace(table, is_detail=True) for table in details))
    return Section(title="Corrections", intro="", items=tables)


def facts(result: ReplayResult) -> Table:
    """Return a table of the run before any correction: sizes, total variations, KL, ratios."""
    run = result.run

    def value(name: str) -> float:
        return float(run[name].value)

    ratio, tokens = Mean.named(run, "ratio"), Mean.named(run, "total_variation").count
    quantiles = ", ".join(f"{ratio_quantile(run, 'mismatch/log_ratio', share):.3g}" for share in QUANTILES)
    divergences = ", ".join(format_number(value(f"mismatch/kl_{name}"), ".4f") for name in ("k1", "k3"))
    clips = [correction.setting.objective for correction in result.corrections[:1]]  # the same for all
    rows = [
        ("responses, tokens", f"{int(value('responses')):,}, {int(tokens):,}"),
        ("mean length", f"{value('length'):.1f}"),
        ("policy", result.policy),
        *(("PPO's clip", f"1 - {clip.clip_low:g} to 1 + {clip.clip_high:g}") for clip in clips),
        ("total variation, rollout model and old policy", f"{value('total_variation_engine'):.2%}"),
        ("total variation, old and updated policy", f"{value('total_variation_stale'):.2%}"),
        ("total variation, rollout model and updated policy", f"{value('total_variation'):.2%}"),
        *((f"the same in {where}", f"{gap:.2%}") for where, gap in result.ends if len(result.ends) > 1),
        ("KL(rollout model || policy), k1 and k3", f"{divergences} nats"),
        ("mean of rho, must be 1", f"{float(ratio.value):.4f} +- {float(ratio.standard_error):.4f}"),
        ("rho: 1 %, median, 99 %, max", f"{quantiles}, {value('mismatch/ratio_max'):.3g}"),
        ("ESS of whole responses, by their ratio", f"{value('mismatch/sequence_ess'):.1%}"),
    ]
    if "z" in run:
        rows.append(("tokens with both distributions known", f"{float(Mean.named(run, 'z').count / tokens):.1%}"))
        rows.append(("mean Z at lam = 1 there", f"{value('z'):.4f}"))
    title = f"{result.path}: {result.format}, {result.files} files"
    return Table(title=title, columns=("", ""), rows=tuple(rows), is_detail=True)


def _table(title: str, rows: Sequence[tuple[str, CorrectionResult]], columns: _Columns, note: str) -> Table:
    return Table(
        title=title,
        columns=("correction", *(name for name, _ in columns)),
        rows=tuple((names, *(read(one) for _, read in columns)) for names, one in rows),
        note=note,
    )


def _masking(rows: Sequence[tuple[str, CorrectionResult]]) -> list[Table]:
    """Return a table of where each correction rejects; none where none does."""
    alike: dict[tuple[float, ...], tuple[str, CorrectionResult]] = {}  # the first of those that reject the same tokens
    for names, one in rows:
        if one.accepted < 1.0 - _NOTHING:
            alike.setdefault(tuple(round(share, 6) for share in one.rejected_by_band.values()), (names, one))
    rejecting = alike.values()
    if not rejecting:
        return []

    bands = list(dict.fromkeys(name for _, one in rejecting for name in one.rejected_by_band))

    def shares(one: CorrectionResult) -> dict[str, str]:
        return {name: f"{share:.1%}" for name, share in one.rejected_by_band.items()}

    return [
        Table(
            title="Rejected, by position and by the policy's entropy (H, nats)",
            columns=("correction", *(name.replace("position ", "at ").replace("entropy ", "H ") for name in bands)),
            rows=tuple((names, *(shares(one).get(name, "") for name in bands)) for names, one in rejecting),
        )
    ]


def _together(results: Sequence[CorrectionResult]) -> list[tuple[str, CorrectionResult]]:
    """Group corrections with equal results on this data into one row, in their order."""
    groups: dict[tuple, list[CorrectionResult]] = {}
    for one in results:
        groups.setdefault(one.fingerprint, []).append(one)
    rows = []
    for members in groups.values():
        names = [one.label + (OWN if one.is_own else "") for one in members]
        names.sort(key=lambda name: not name.endswith(OWN))
        first, rest = names[:_NAMES_IN_ROW], len(names) - _NAMES_IN_ROW
        rows.append((", ".join(first) + (f", {rest} more" if rest > 0 else ""), members[0]))
    return rows
