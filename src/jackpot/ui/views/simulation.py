"""Turns measurements of candidate rollout models into tables."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from jackpot.analysis.simulate.candidates import Candidate
from jackpot.ui.charts import Section, Table
from jackpot.ui.numbers import format_number
from jackpot.ui.views.advice import generation_tables

_Row = tuple[str, Callable[[Candidate], str]]  # name, and what is read

_ACCURACIES: tuple[_Row, ...] = (
    ("accuracy of its responses", lambda one: f"{one.accuracy:.1%}"),
    ("accuracy of the policy", lambda one: f"{one.policy_accuracy:.1%}"),
)
_REWARDS: tuple[_Row, ...] = (
    ("mean reward of its responses", lambda one: format_number(one.reward, ".3f")),
    ("mean reward of the policy's", lambda one: format_number(one.policy_reward, ".3f")),
)
_ROWS: tuple[_Row, ...] = (
    ("parameters, of the policy's", lambda one: f"{one.parameters / one.policy_parameters:.0%}"),
    (
        "KL(rollout model || policy), nats per token",
        lambda one: format_number(one.kl_rollout_policy, ".4f"),
    ),
    ("KL(policy || rollout model)", lambda one: format_number(one.kl_policy_rollout, ".4f")),
    ("KL(policy || tokens accepted by OBRS), lam = 1", lambda one: format_number(one.kl_after, ".4f")),
    ("expected acceptance Z, lam = 1", lambda one: format_number(one.acceptance, ".4f")),
    ("standard deviation of Z over states", lambda one: format_number(one.acceptance_spread, ".4f")),
    ("states where Z is below 0.5", lambda one: f"{one.low_acceptance:.1%}"),
    ("policy's probability cut by a cap of 3: TIS, OBRS", lambda one: f"{one.tis_cut:.2%}, {one.obrs_cut:.2%}"),
    (
        "effective share of tokens: TIS, OBRS, its expectation",
        lambda one: f"{one.tis_ess:.1%}, {one.obrs_ess:.1%}, {one.expected_ess:.1%}",
    ),
    ("cosine of TIS's weights and OBRS's in expectation", lambda one: format_number(one.agreement, ".4f")),
    (
        "log p_policy / p_rollout of a whole response",
        lambda one: format_number(one.sequence_log_ratio, ".3f"),
    ),
    ("effective share of responses under that ratio", lambda one: f"{one.sequence_ess:.1%}"),
)


def _rows(found: Sequence[Candidate]) -> tuple[_Row, ...]:
    """Return the rows of the tables; rewards stand for accuracies where the task has no verdict."""
    size, *others = _ROWS
    return size, *(_ACCURACIES if _has_verdict(found) else _REWARDS), *others


def _has_verdict(found: Sequence[Candidate]) -> bool:
    return found[0].accuracy is not None


def candidate_sections(found: Sequence[Candidate]) -> dict[str, Section]:
    """Return the sections of the page by their names."""
    first = found[0]
    advice = Table(
        title="In words",
        columns=("rollout model", "advice"),
        rows=tuple((one.name, one.answer["sentence"]) for one in found),
        is_detail=True,
        note="The rule of docs/replay.md.",
    )

    ways = [replace(table, is_detail=True) for one in found for table in generation_tables(one.answer, one.name)]
    states = ", ".join(f"{one.states:,}" for one in found)
    good = "enough right answers" if _has_verdict(found) else "high rewards"

    return {
        "before": Section(
            title="Before you train",
            intro=f"Each rollout model generated {first.responses} responses to held-out prompts, and both models' "
            f"whole distributions were compared at these tokens ({states}). Among the models that are cheap enough, "
            f"train with the one of the smallest KL and {good}.",
            items=(_side_by_side(found), *ways, advice),
        )
    }


def _side_by_side(found: Sequence[Candidate]) -> Table:
    """Return a table with a column for each rollout model."""
    return Table(
        title="Rollout models before training",
        columns=("mean over response tokens", *(one.name for one in found)),
        rows=tuple((text, *(read(one) for one in found)) for text, read in _rows(found)),
        note="Responses are sampled.",
    )
