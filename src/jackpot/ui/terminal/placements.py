"""Prints the placements that `jackpot plan` simulated, and gives their numbers as JSON."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from jackpot.analysis.plan.placement import AHEAD, IN_FLIGHT, ClusterPlan, PlacedRun
from jackpot.analysis.plan.sharding import ENGINES_SHARE
from jackpot.analysis.plan.sizes import PromptLengths
from jackpot.config.run import Config
from jackpot.ui.charts import Section, Table
from jackpot.ui.terminal.output import print_line, show_answer
from jackpot.ui.terminal.plan import unpriced

_GB = 1e9  # bytes


def show_placements(
    console: Console,
    config: Config,
    plan: ClusterPlan,
    prompts: PromptLengths,
    sources: Mapping[str, str],
    show_all: bool,
) -> None:
    """Print the cheapest placement, a table of all, what is assumed, and with `show_all` what ahead and deaths change.

    Args:
        sources: where the mean length of responses and the acceptance of drafts are from.
    """
    cheapest, *assumed = _sentences(config, plan, prompts, sources)
    show_answer(console, [cheapest], [Section(title="", intro="", items=_tables(plan))], show_all)
    for sentence in assumed:
        print_line(console, sentence)


def _tables(plan: ClusterPlan) -> tuple[Table, ...]:
    """Return a table of all placements, and as details what `batch.ahead` buys and what deaths of engines cost."""
    machine = f"{plan.runs[0].placement.gpus} {plan.kind}"
    heads = ("generate + train", "GB each", *(f"ahead {ahead}" for ahead in AHEAD), "eval h", "hours")
    placements = [_placement(run) for run in plan.runs]
    placements += [[str(placement), "OOM", *["-"] * (len(heads) - 2)] for placement in plan.no_room]
    whole = plan.deaths[max(plan.deaths)]
    deaths = [
        (
            "never" if between == max(plan.deaths) else f"{between / 60:,.0f} min",
            f"{one.seconds:.1f}",
            f"{one.seconds / whole.seconds - 1:+.0%}",
            f"{one.lost_tokens:,.0f}",
        )
        for between, one in plan.deaths.items()
    ]
    ahead = [_ahead(plan, ahead) for ahead in AHEAD if any(ahead in run.by_ahead for run in plan.runs)]
    return (
        Table(
            title=f"Seconds an iteration on {machine}, simulated (docs/cost.md)",
            columns=heads,
            rows=tuple(map(tuple, placements)),
            note="-: shared GPUs generate nothing ahead, and models that do not fit cannot run",
        ),
        Table(
            title="What batch.ahead buys",
            columns=(
                *("batch.ahead", "fastest", "seconds", "learner busy", "engines busy", "mean lag"),
                *("hours", "in flight"),
            ),
            rows=tuple(map(tuple, ahead)),
            is_detail=True,
        ),
        Table(
            title=f"What deaths of engines cost on {_name(*plan.fastest())}",
            columns=("an engine dies every", "seconds", "more", "tokens lost an iteration"),
            rows=tuple(deaths),
            is_detail=True,
        ),
    )


def _name(run: PlacedRun, ahead: int) -> str:
    """Name a placement and its batch.ahead in words."""
    place = run.placement
    if place.is_shared:
        return f"{place.gpus} GPUs that generate, then train"
    return f"{place.generating} GPUs that generate and {place.training} that train, batch.ahead {ahead}"


def _placement(run: PlacedRun) -> list[str]:
    best = min(run.hours(ahead) for ahead in run.by_ahead)
    memory = [f"{shard.peak / _GB:.0f}" for shard in (run.generating, run.training)]
    each = memory[0] if run.placement.is_shared else " + ".join(memory)
    seconds = [f"{run.by_ahead[ahead].seconds:.1f}" if ahead in run.by_ahead else "-" for ahead in AHEAD]
    return [str(run.placement), each, *seconds, f"{run.evaluating:.1f}", f"{best:.1f}"]


def _ahead(plan: ClusterPlan, ahead: int) -> list[str]:
    run, _ = plan.fastest([ahead])
    found = run.by_ahead[ahead]
    in_flight = "-"
    if ahead in IN_FLIGHT:
        other, _ = plan.fastest([ahead], in_flight=True)
        in_flight = f"{other.in_flight[ahead].seconds:.1f} on {other.placement}"
    cheapest, _ = plan.cheapest([ahead])
    shares = [f"{found.learner_busy:.0%}", f"{found.engines_busy:.0%}", f"{found.lag:.1f}"]
    hours = f"{cheapest.hours(ahead):.1f} on {cheapest.placement}"
    return [str(ahead), str(run.placement), f"{found.seconds:.1f}", *shares, hours, in_flight]


def _sentences(config: Config, plan: ClusterPlan, prompts: PromptLengths, sources: Mapping[str, str]) -> list[str]:
    """Say which placement is cheapest, what evaluations take, and what is assumed."""
    best, ahead = plan.cheapest()
    hours, gpus = best.hours(ahead), best.placement.gpus
    said = [
        f"Cheapest: {_name(best, ahead)}: {hours:.1f} hours, {gpus * hours:,.0f} GPU hours. Evaluations, one every "
        f"{config.evaluation.every} iterations, take {best.evaluating / hours:.0%} of them; only the GPUs that "
        "generate answer them, and nothing else is done meanwhile."
    ]
    if (now := config.batch.ahead) != ahead and any(now in run.by_ahead for run in plan.runs):
        here, _ = plan.cheapest([now])
        said[0] += f" With the recipe's batch.ahead {now}: {_name(here, now)}, {here.hours(now):.1f} hours."
    shared = next((run for run in plan.runs if run.placement.is_shared), None)
    if shared and plan.arithmetic:
        seconds = plan.arithmetic.iterations * 3600 / config.iterations
        said.append(
            f"Shared GPUs take {seconds:.1f} s an iteration by the arithmetic of --dry-run with this mean response, in "
            f"which all engines end at once, and {shared.by_ahead[0].seconds:.1f} s simulated, where the last one "
            "decides."
        )
    said.append(
        f"Responses of {plan.lengths.mean:,.0f} tokens in the mean: {sources['response']}. "
        f"Prompts of {prompts.mean:,.0f} tokens"
        + (f", assumed: {prompts.assumed}." if prompts.assumed else ", counted.")
    )
    if plan.drafts:
        said.append(
            f"{plan.drafts.tokens} drafts for each pass of the policy, of which each is accepted with the chance "
            f"{plan.drafts.acceptance:.2f} where those before it were: {sources['acceptance']}."
        )
    said.append(
        f"An optimizer step has {plan.micro_batches:,} full micro-batches: more GPUs than that are counted as if they "
        f"did not train faster. Engines on GPUs of their own take {ENGINES_SHARE:.0%} of the memory. In flight: if "
        "engines took weights while they generate, which nothing does today."
    )
    return [*said, *unpriced(config)]


def plan_numbers(plan: ClusterPlan, sources: Mapping[str, str]) -> dict[str, Any]:
    """Return every number of a plan, for JSON."""
    best, ahead = plan.cheapest()
    return {
        "gpu": plan.kind,
        "gpus": best.placement.gpus,
        "response": {"mean": plan.lengths.mean, "limit": plan.lengths.limit, "source": sources["response"]},
        "drafts": plan.drafts
        and {
            "tokens": plan.drafts.tokens,
            "acceptance": plan.drafts.acceptance,
            "source": sources["acceptance"],
        },
        "prompt": plan.lengths.prompt,
        "micro_batches": plan.micro_batches,
        "cheapest": {"placement": str(best.placement), "ahead": ahead, "hours": best.hours(ahead)},
        "arithmetic_hours": plan.arithmetic and plan.arithmetic._asdict(),
        "placements": [_numbers(run) for run in plan.runs],
        "no_room": list(map(str, plan.no_room)),
        "deaths": [
            {"seconds_between": between, **found._asdict()} for between, found in plan.deaths.items()
        ],  # null: never
    }


def _numbers(run: PlacedRun) -> dict[str, Any]:
    return {
        "placement": str(run.placement),
        "generating_gpus": run.placement.generating,
        "training_gpus": run.placement.training,
        "shared": run.placement.is_shared,
        "generating_bytes": run.generating.peak,
        "training_bytes": run.training.peak,
        "evaluation_hours": run.evaluating,
        "by_ahead": {
            str(ahead): found._asdict() | {"hours": run.hours(ahead)} for ahead, found in run.by_ahead.items()
        },
        "in_flight": {str(ahead): found._asdict() for ahead, found in run.in_flight.items()},
    }
