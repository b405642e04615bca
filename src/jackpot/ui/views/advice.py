"""Tables of the advice on corrections and rollout models, for `jackpot replay` and `jackpot simulate`."""

from collections.abc import Mapping
from typing import Any

from jackpot.core.statistics import Estimate
from jackpot.ui.charts import Table

_WITH_ERRORS = ("worth", "flops")  # numbers that the tables show with a standard error; `--json` has all errors


def judged_table(answer: Mapping[str, Any]) -> Table:
    """Return a table of each correction with its best settings, and of the recommended correction.

    Args:
        answer: what `Recommendation.numbers` returns.
    """
    candidates = sorted(answer["candidates"], key=lambda candidate: -candidate["worth"]["value"])
    # Corrections that weigh whole responses (`is_whole`) are shown too, though the rule does not recommend them.
    eligible = [candidate for candidate in candidates if candidate["advisable"] or candidate["is_whole"]]
    # Each correction's candidate that is worth most: the candidates are reversed, so it comes last and stays.
    best = {candidate["name"]: candidate for candidate in reversed(eligible)}
    # Keys of a candidate's numbers, in the order of the columns after the first; `elsewhere` is that of "states".
    names = ("worth", "of_tokens", "effective", "tv_after_correction", "elsewhere")

    return Table(
        title="What a rollout is worth, in rollouts of the policy's own",
        columns=("correction", "worth", "tokens", "ESS", "TV after", "states"),
        rows=tuple(
            (candidate["label"], *(_text(candidate[name], name) for name in names))
            for candidate in candidates
            if candidate is best.get(candidate["name"]) or candidate["label"] == answer["correction"]
        ),
        note="Each correction with its best settings, and the recommended one. worth: how many rollouts of the policy "
        "one rollout replaces, ESS (1 - 2 TV)^2 (1 - states)^2, ± standard error over prompts; tokens: the same "
        "without the factor of states; ESS: effective share of tokens; TV after: total variation left after the "
        "correction; states: share of the states that the policy visits less often.",
    )


def generation_tables(answer: Mapping[str, Any], model: str = "") -> list[Table]:
    """Return a table of ways to generate rollouts, such as the policy alone; none if the models' costs are unknown.

    Args:
        answer: what `Recommendation.numbers` returns.
        model: name of the rollout model, for the title.
    """
    if not answer["generation"]:
        return []
    names = ("worth", "flops", "flops_any_state", "weights")  # keys of the numbers of a way to generate, by column
    return [
        Table(
            title=" ".join(filter(None, ["Who generates", model and f"({model})"])),
            columns=("", "worth", "rollout FLOPs", "every state counted", "weights read"),
            rows=tuple((way["label"], *(_text(way[name], name) for name in names)) for way in answer["generation"]),
            note=f"With {answer['correction']}. Costs are those of equal progress, as multiples of the policy's cost "
            "when it generates alone. every state counted: rollout FLOPs if states that the policy rarely visits count "
            "fully; weights read: decides how long decoding a small batch takes. Drafts are exact.",
        )
    ]


def _text(estimate: Mapping[str, float], name: str) -> str:
    """Format a number of the advice for a table, in percent or with its standard error, as its key `name` requires."""
    if name == "tv_after_correction":
        return f"{estimate['value']:.2%}"
    return Estimate(estimate["value"], estimate["error"] if name in _WITH_ERRORS else None).text
