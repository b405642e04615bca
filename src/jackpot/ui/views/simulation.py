"""Tables of candidate rollout models, for `jackpot simulate`."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from jackpot.analysis.simulate.candidates import Candidate
from jackpot.ui.charts import Section, Table
from jackpot.ui.numbers import format_number
from jackpot.ui.views.advice import generation_tables

_Row = tuple[str, Callable[[Candidate], str]]  # label, and the text of a candidate's cell

_ACCURACIES: tuple[_Row, ...] = (
    ("accuracy of its responses", lambda candidate: f"{candidate.accuracy:.1%}"),
    ("accuracy of the policy", lambda candidate: f"{candidate.policy_accuracy:.1%}"),
)
_REWARDS: tuple[_Row, ...] = (
    ("mean reward of its responses", lambda candidate: format_number(candidate.reward, ".3f")),
    ("mean reward of the policy's", lambda candidate: format_number(candidate.policy_reward, ".3f")),
)
_SIZE: _Row = (
    "parameters, of the policy's",
    lambda candidate: f"{candidate.parameters / candidate.policy_parameters:.0%}",
)
_ROWS: tuple[_Row, ...] = (
    (
        "KL(rollout model || policy), nats per token",
        lambda candidate: format_number(candidate.kl_rollout_policy, ".4f"),
    ),
    ("KL(policy || rollout model)", lambda candidate: format_number(candidate.kl_policy_rollout, ".4f")),
    ("KL(policy || tokens accepted by OBRS), lam = 1", lambda candidate: format_number(candidate.kl_after, ".4f")),
    ("expected acceptance Z, lam = 1", lambda candidate: format_number(candidate.acceptance, ".4f")),
    ("standard deviation of Z over states", lambda candidate: format_number(candidate.acceptance_spread, ".4f")),
    ("states where Z is below 0.5", lambda candidate: f"{candidate.low_acceptance:.1%}"),
    (
        "policy's probability cut by a cap of 3: TIS, OBRS",
        lambda candidate: f"{candidate.tis_cut:.2%}, {candidate.obrs_cut:.2%}",
    ),
    (
        "effective share of tokens: TIS, OBRS, its expectation",
        lambda candidate: f"{candidate.tis_ess:.1%}, {candidate.obrs_ess:.1%}, {candidate.expected_ess:.1%}",
    ),
    ("cosine of TIS's weights and OBRS's in expectation", lambda candidate: format_number(candidate.agreement, ".4f")),
    (
        "log p_policy / p_rollout of a whole response",
        lambda candidate: format_number(candidate.sequence_log_ratio, ".3f"),
    ),
    ("effective share of responses under that ratio", lambda candidate: f"{candidate.sequence_ess:.1%}"),
)


def candidate_sections(candidates: Sequence[Candidate]) -> dict[str, Section]:
    """Return the one section of the page of `jackpot simulate`, by its name, `before`."""
    first = candidates[0]
    has_verdict = first.accuracy is not None  # else the task has rewards, but no right answers

    # The models' sizes stand first, then their accuracies or rewards, then all other rows.
    rows = (_SIZE, *(_ACCURACIES if has_verdict else _REWARDS), *_ROWS)
    numbers = Table(
        title="Rollout models before training",
        columns=("mean over response tokens", *(candidate.name for candidate in candidates)),
        rows=tuple((label, *(cell(candidate) for candidate in candidates)) for label, cell in rows),
        note="Responses are sampled.",
    )

    advice = Table(
        title="In words",
        columns=("rollout model", "advice"),
        rows=tuple((candidate.name, candidate.answer["sentence"]) for candidate in candidates),
        is_detail=True,
        note="The rule of docs/replay.md.",
    )

    details = [
        replace(table, is_detail=True)
        for candidate in candidates
        for table in generation_tables(candidate.answer, candidate.name)
    ]
    states = ", ".join(f"{candidate.states:,}" for candidate in candidates)
    good = "enough right answers" if has_verdict else "high rewards"

    return {
        "before": Section(
            title="Before you train",
            intro=f"Each rollout model generated {first.responses} responses to held-out prompts, and both models' "
            f"whole distributions were compared at these tokens ({states}). Among the models that are cheap enough, "
            f"train with the one of the smallest KL and {good}.",
            items=(numbers, *details, advice),
        )
    }
