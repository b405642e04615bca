"""Turns what the rule of `analysis.advice` judged into tables."""

from collections.abc import Mapping
from typing import Any

from jackpot.core.statistics import Estimate
from jackpot.ui.charts import Table

_ERRORS = ("worth", "flops")  # shown with their standard errors; `--json` has all


def judged_table(answer: Mapping[str, Any]) -> Table:
    """Return every correction with its best settings, and the recommended one, from `Recommendation.numbers`."""
    ordered = sorted(answer["candidates"], key=lambda one: -one["worth"]["value"])
    best = {one["name"]: one for one in reversed(ordered) if one["advisable"] or one["is_whole"]}
    names = ("worth", "of_tokens", "effective", "tv_after_correction", "elsewhere")

    return Table(
        title="What a rollout is worth, in rollouts of the policy's own",
        columns=("correction", "worth", "tokens", "ESS", "TV after", "states"),
        rows=tuple(
            (one["label"], *(_text(one[name], name) for name in names))
            for one in ordered
            if one is best.get(one["name"]) or one["label"] == answer["correction"]
        ),
        note="Each with its best settings, and the recommended one. worth = ESS (1 - 2 TV)^2 (1 - states)^2, with "
        "standard errors over prompts; tokens: without the last factor; ESS: effective share of tokens; states: share "
        "of those that the policy visits less often.",
    )


def generation_tables(answer: Mapping[str, Any], of: str = "") -> list[Table]:
    """Return a table of the ways to generate rollouts; none where the costs of the models are not known."""
    if not answer["generation"]:
        return []
    names = ("worth", "flops", "flops_any_state", "weights")
    return [
        Table(
            title=" ".join(filter(None, ["Who generates", of and f"({of})"])),
            columns=("", "worth", "rollout FLOPs", "every state counted", "weights read"),
            rows=tuple((one["label"], *(_text(one[name], name) for name in names)) for one in answer["generation"]),
            note=f"With {answer['correction']}. Costs are those of the same progress, over the policy's alone; weights "
            "read are what the time of decoding a small batch goes by. Drafts are exact.",
        )
    ]


def _text(found: Mapping[str, float], name: str) -> str:
    if name == "tv_after_correction":
        return f"{found['value']:.2%}"
    return Estimate(found["value"], found["error"] if name in _ERRORS else None).text
