"""Turns measurements of candidate rollout models, or of a run's checkpoints, into tables and charts."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from jackpot.analysis.simulate.candidates import Candidate
from jackpot.analysis.simulate.run import CheckpointPair, PairSimulation
from jackpot.analysis.simulate.topk import TopKSummary
from jackpot.ui.charts import DASHED, Chart, Section, Series, Table, as_details, finite
from jackpot.ui.numbers import format_number
from jackpot.ui.views.advice import generation_tables
from jackpot.ui.views.simulation import view_sections

_Row = tuple[str, str, Callable[[Candidate], str]]  # short name, name, and what is read

_ACCURACIES: tuple[_Row, ...] = (
    ("right", "accuracy of its responses", lambda one: f"{one.accuracy:.1%}"),
    ("policy", "accuracy of the policy", lambda one: f"{one.policy_accuracy:.1%}"),
)
_REWARDS: tuple[_Row, ...] = (
    ("reward", "mean reward of its responses", lambda one: format_number(one.reward, ".3f")),
    ("policy", "mean reward of the policy's", lambda one: format_number(one.policy_reward, ".3f")),
)
_ROWS: tuple[_Row, ...] = (
    ("size", "parameters, of the policy's", lambda one: f"{one.size_share:.0%}"),
    (
        "KL(r||p)",
        "KL(rollout model || policy), nats per token",
        lambda one: format_number(one.kl_rollout_policy, ".4f"),
    ),
    ("KL(p||r)", "KL(policy || rollout model)", lambda one: format_number(one.kl_policy_rollout, ".4f")),
    ("after", "KL(policy || tokens accepted by OBRS), lam = 1", lambda one: format_number(one.kl_after, ".4f")),
    ("Z", "expected acceptance Z, lam = 1", lambda one: format_number(one.acceptance, ".4f")),
    ("sd", "standard deviation of Z over states", lambda one: format_number(one.acceptance_spread, ".4f")),
    ("Z < 0.5", "states where Z is below 0.5", lambda one: f"{one.low_acceptance:.1%}"),
    ("captured", "p_rollout captured by the top k", lambda one: format_number(one.captured, ".5f")),
    ("width", "width of the bounds on Z", lambda one: format_number(one.width, ".1e")),
    (
        "log ratio",
        "log p_policy / p_rollout of a whole response",
        lambda one: format_number(one.sequence_log_ratio, ".3f"),
    ),
    ("ESS", "effective share of responses under that ratio", lambda one: f"{one.sequence_ess:.1%}"),
)


def _rows(found: PairSimulation) -> tuple[_Row, ...]:
    """Return the rows of the tables; rewards stand for accuracies where the task has no verdict."""
    size, *others = _ROWS
    return size, *(_ACCURACIES if _has_verdict(found) else _REWARDS), *others


def _has_verdict(found: PairSimulation) -> bool:
    return found.candidates[0].accuracy is not None


def pair_sections(found: PairSimulation) -> dict[str, Section]:
    """Return the sections of the page by the names of their pictures; only runs have the section on training."""
    first = found.candidates[0]
    table = _over_iterations(found) if found.training else _side_by_side(found)
    advice = Table(
        title="In words",
        columns=("rollout model", "advice"),
        rows=tuple((one.name, one.answer["sentence"]) for one in found.candidates),
        is_detail=True,
        note=f"The rule of docs/replay.md.{f' The saved rollouts: {found.different}' if found.different else ''}",
    )
    ways = [
        replace(table, is_detail=True) for one in found.candidates for table in generation_tables(one.answer, one.name)
    ]
    states = ", ".join(f"{one.states:,}" for one in found.candidates)
    good = "enough right answers" if _has_verdict(found) else "high rewards"
    sections = {
        "before": Section(
            title="Before you train" if not found.training else "Over training",
            intro=f"Each rollout model generated {first.responses} responses to held-out prompts, and both models' "
            f"whole distributions were compared at these tokens ({states}). Among the models that are cheap enough, "
            f"train with the one of the smallest KL and {good}.",
            items=(table, advice) if found.training else (table, *ways, advice),
        )
    }
    details = {"training": _training_section(found)} if found.training else {}
    return sections | as_details(details | view_sections(found.views))


def _side_by_side(found: PairSimulation) -> Table:
    """Return a table with a column for each rollout model."""
    return Table(
        title="Rollout models before training",
        columns=("mean over response tokens", *(one.name for one in found.candidates)),
        rows=tuple((text, *(read(one) for one in found.candidates)) for _, text, read in _rows(found)),
        note=f"Top k and bounds at k = {found.candidates[0].k} with the fill-in; responses are sampled.",
    )


def _over_iterations(found: PairSimulation) -> Table:
    """Return a table with a row for each checkpoint; the top-k bounds have charts of their own."""
    rows = [row for row in _rows(found) if row[0] not in ("size", "captured", "width")]
    return Table(
        title="The rollout model at each checkpoint",
        columns=("iter.", *(name for name, _, _ in rows)),
        rows=tuple((str(one.iteration), *(read(one.measured) for _, _, read in rows)) for one in found.training),
        note="; ".join(f"{name}: {text}" for name, text, _ in rows) + ".",
    )


def _training_section(found: PairSimulation) -> Section:
    left_out = f" Left out: {'; '.join(found.left_out)}." if found.left_out else ""
    stages = found.training
    rows = tuple(
        (
            str(stage.iteration),
            str(row.k),
            format_number(row.z_share, ".5f"),
            format_number(row.z_share_low, ".4f"),
            format_number(row.width, ".1e"),
            format_number(row.captured, ".5f"),
            format_number(row.kappa, ".4f"),
            format_number(row.kappa_error, ".4f"),
            format_number(row.kappa_exact, ".5f"),
        )
        for stage in stages
        for row in stage.topk
        if row.fill_in
    )
    columns = ("iteration", "k", "Z_k / Z", "1 % below", "width", "captured", "kappa", "error", "Z / Z_k")
    return Section(
        title="Top-k, bounds and kappa over training",
        intro="Appendix C.3 at every checkpoint that the run kept: the rollout model of that iteration generated, and "
        f"the policy of that iteration scored.{left_out}",
        items=(
            *_model_charts(stages, _has_verdict(found)),
            *_topk_charts(stages),
            Table(title="With the fill-in", columns=columns, rows=rows),
        ),
    )


def _model_charts(stages: Sequence[CheckpointPair], has_verdict: bool) -> tuple[Chart, ...]:
    x = tuple(stage.iteration for stage in stages)

    def line(name: str, read: Callable[[Candidate], float], order: int) -> Series:
        return Series(name=name, x=x, y=finite([read(stage.measured) for stage in stages]), number=order, style="both")

    return (
        Chart(
            title="The gap over training",
            x_label="iteration",
            y_label="nats per token",
            series=(
                line("KL(policy || rollout model)", lambda one: one.kl_policy_rollout, 0),
                line("after OBRS", lambda one: one.kl_after, 1),
            ),
            note="Joint training should keep the upper line from rising.",
        ),
        Chart(
            title="Acceptance over training",
            x_label="iteration",
            y_label="share",
            series=(
                line("Z at lam = 1", lambda one: one.acceptance, 0),
                line("states with Z below 0.5", lambda one: one.low_acceptance, 1),
            ),
            note="The share of rejected tokens is 1 - Z.",
            y_range=(0.0, 1.02),
        ),
        Chart(
            title=f"{'Accuracy' if has_verdict else 'Reward'} over training",
            x_label="iteration",
            y_label="sampled accuracy" if has_verdict else "mean reward",
            series=(
                line("policy", lambda one: one.policy_accuracy if has_verdict else one.policy_reward, 0),
                line("rollout model", lambda one: one.accuracy if has_verdict else one.reward, 1),
            ),
            note="Of sampled responses to the prompts of this simulation.",
        ),
    )


_OVER_TRAINING: tuple[tuple[str, str, Callable[[TopKSummary], float], str], ...] = (
    ("Share of Z", "mean of Z_k / Z", lambda row: row.z_share, "Solid: with the fill-in; dashed: without."),
    (
        "Share of Z at the worst states",
        "Z_k / Z, 1 % of states are below",
        lambda row: row.z_share_low,
        "Which k suffices.",
    ),
    ("Width of the bounds", "upper - lower bound on Z", lambda row: row.width, "The exact Z lies in between."),
    ("Captured mass", "p_rollout with both known", lambda row: row.captured, "1 where k is the vocabulary."),
    (
        "The ratio that kappa estimates",
        "mean Z / mean Z_k",
        lambda row: row.kappa_exact,
        "1 where the top k hold all of Z.",
    ),
)


def _topk_charts(stages: Sequence[CheckpointPair]) -> tuple[Chart, ...]:
    x = tuple(stage.iteration for stage in stages)
    sizes = sorted({row.k for row in stages[0].topk})
    charts = []
    for title, label, read, note in _OVER_TRAINING:
        series = tuple(
            Series(
                name=f"k = {k}" if fill_in else f"k = {k}, no fill-in",
                x=x,
                y=finite(
                    [read(row) for stage in stages for row in stage.topk if row.k == k and row.fill_in == fill_in]
                ),
                number=order if fill_in else order + DASHED,
                style="both",
            )
            for order, k in enumerate(sizes)
            for fill_in in (True, False)
        )
        charts.append(Chart(title=title, x_label="iteration", y_label=label, series=series, note=note))
    return (*charts, _kappa_chart(stages, x, sizes))


def _kappa_chart(stages: Sequence[CheckpointPair], x: tuple[int, ...], sizes: Sequence[int]) -> Chart:
    series = []
    for order, k in enumerate(sizes):
        rows = [row for stage in stages for row in stage.topk if row.k == k and row.fill_in]
        series.append(
            Series(
                name=f"k = {k}",
                x=x,
                y=finite([row.kappa for row in rows]),
                low=finite([row.kappa - 2.0 * row.kappa_error for row in rows]),
                high=finite([row.kappa + 2.0 * row.kappa_error for row in rows]),
                number=order,
            )
        )
    return Chart(
        title="Estimated kappa",
        x_label="iteration",
        y_label="sum a / sum Z_k",
        series=tuple(series),
        note="The band is two standard errors; a line farther from 1 than its band shows what kappa corrects.",
    )
