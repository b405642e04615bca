"""Prints the placements that `jackpot plan` compared, and gives their numbers as JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from jackpot.analysis.plan.estimate import Estimator
from jackpot.analysis.plan.placement import AHEAD, PlacedRun, cheapest
from jackpot.analysis.plan.sharding import ENGINES_SHARE
from jackpot.analysis.plan.sizes import PromptLengths
from jackpot.config.config import Config
from jackpot.ui.terminal.output import print_line, show_table
from jackpot.ui.terminal.plan import GB, unpriced

_COLUMNS = ("generate + train", "GB each", *(f"ahead {ahead}" for ahead in AHEAD), "eval h", "hours")


def show_placements(
    console: Console,
    config: Config,
    plan: Estimator,
    kind: str,
    runs: Sequence[PlacedRun],
    prompts: PromptLengths,
    sources: Mapping[str, str],
) -> None:
    """Print the cheapest placement, a table of all, and what is assumed.

    Args:
        sources: where the mean length of responses and the acceptance of drafts are from.
    """
    print_line(console, _answer(config, runs))
    title = f"Seconds an iteration on {runs[0].placement.gpus} {kind}, by arithmetic (docs/cost.md)"
    show_table(console, title, _COLUMNS, [_row(config, run) for run in runs], _COLUMNS[1:])
    for sentence in (*_assumptions(plan, prompts, sources), *unpriced(config)):
        print_line(console, sentence)


def _answer(config: Config, runs: Sequence[PlacedRun]) -> str:
    """Say which placement is cheapest, also with the recipe's `batch.ahead`, and what evaluations take."""
    run, ahead = cheapest(runs)
    hours = run.by_ahead[ahead]
    text = (
        f"Cheapest: {_name(run, ahead)}: {hours.all:.1f} hours, {run.placement.gpus * hours.all:,.0f} GPU hours. "
        f"Evaluations, one every {config.evaluation.every} iterations, take {hours.evaluating / hours.all:.0%} of "
        "them; only the GPUs that generate answer them, and nothing else is done meanwhile."
    )
    now = config.batch.ahead
    if now != ahead and any(now in run.by_ahead for run in runs):
        here, _ = cheapest(runs, [now])
        text += f" With the recipe's batch.ahead {now}: {_name(here, now)}, {here.by_ahead[now].all:.1f} hours."
    return text


def _name(run: PlacedRun, ahead: int) -> str:
    """Name a placement and its batch.ahead in words."""
    gpus = run.placement
    if gpus.is_shared:
        return f"{gpus.gpus} GPUs that generate, then train"
    return f"{gpus.generating} GPUs that generate and {gpus.training} that train, batch.ahead {ahead}"


def _row(config: Config, run: PlacedRun) -> list[str]:
    if not run.by_ahead:
        return [str(run.placement), "OOM", *["-"] * (len(_COLUMNS) - 2)]
    memory = [f"{shard.peak / GB:.0f}" for shard in (run.generating, run.training)]
    each = memory[0] if run.placement.is_shared else " + ".join(memory)
    seconds = [
        f"{run.by_ahead[ahead].iterations * 3600 / config.iterations:.1f}" if ahead in run.by_ahead else "-"
        for ahead in AHEAD
    ]
    best = min(run.by_ahead.values(), key=lambda hours: hours.all)
    return [str(run.placement), each, *seconds, f"{best.evaluating:.1f}", f"{best.all:.1f}"]


def _assumptions(plan: Estimator, prompts: PromptLengths, sources: Mapping[str, str]) -> list[str]:
    said = [
        f"Responses of {plan.lengths.mean:,.0f} tokens in the mean: {sources['response']}. "
        f"Prompts of {prompts.mean:,.0f} tokens"
        + (f", assumed: {prompts.assumed}." if prompts.assumed else ", counted.")
    ]
    if plan.drafts:
        said.append(
            f"{plan.drafts.tokens} drafts for each pass of the policy, of which each is accepted with the chance "
            f"{plan.drafts.acceptance:.2f} where those before it were: {sources['acceptance']}."
        )
    said.append(
        f"An optimizer step has {plan.work().micro_batches:,} full micro-batches: more GPUs than that are counted as "
        f"if they did not train faster. Engines on GPUs of their own take {ENGINES_SHARE:.0%} of the memory. All "
        "engines are counted as if they had equal responses. Shared GPUs generate nothing ahead."
    )
    return said


def plan_numbers(plan: Estimator, kind: str, runs: Sequence[PlacedRun], sources: Mapping[str, str]) -> dict[str, Any]:
    """Return every number of a plan, for JSON."""
    best, ahead = cheapest(runs)
    drafts = plan.drafts
    return {
        "gpu": kind,
        "gpus": best.placement.gpus,
        "response": {"mean": plan.lengths.mean, "limit": plan.lengths.limit, "source": sources["response"]},
        "drafts": drafts
        and {"tokens": drafts.tokens, "acceptance": drafts.acceptance, "source": sources["acceptance"]},
        "prompt": plan.lengths.prompt,
        "micro_batches": plan.work().micro_batches,
        "cheapest": {"placement": str(best.placement), "ahead": ahead, "hours": best.by_ahead[ahead].all},
        "placements": [_numbers(run) for run in runs if run.by_ahead],
        "no_room": [str(run.placement) for run in runs if not run.by_ahead],
    }


def _numbers(run: PlacedRun) -> dict[str, Any]:
    gpus = run.placement
    return {
        "placement": str(gpus),
        "generating_gpus": gpus.generating,
        "training_gpus": gpus.training,
        "shared": gpus.is_shared,
        "generating_bytes": run.generating.peak,
        "training_bytes": run.training.peak,
        "by_ahead": {str(ahead): hours._asdict() | {"hours": hours.all} for ahead, hours in run.by_ahead.items()},
    }
