"""Write docs/study.md and its picture from the summaries of the runs: python -m research.study_page

What is prose stands in research/study_page.md; every number on the page is computed here from docs/study/*.jsonl, and
a name in braces in the prose is one of those: {close[obrs]} is an accuracy, {close[obrs-none]} a paired difference,
{close[obrs@rollout]} a cost. Panels that have not run are named so; without the panel `first` there is no page.
"""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from jackpot.analysis.compare.summary import Spent
from jackpot.analysis.plan.cost_model import GPUS, MEAN_PROMPT, Drafts, Hours
from jackpot.analysis.plan.estimate import Estimator, ShareHours
from jackpot.analysis.plan.sizes import PromptLengths, model_sizes
from jackpot.config.build import validated
from jackpot.config.config import Config
from jackpot.config.published import GpusConfig
from jackpot.config.recipes import load_recipe, resolve
from jackpot.core.files import whole_file
from jackpot.core.roles import Role
from jackpot.core.statistics import Sample
from jackpot.models.cost import forward_cost
from jackpot.models.drafts import MOST_DRAFTS
from jackpot.ui.views.comparison import spread_text as percent
from research.study import (
    ABLATION,
    ALONE,
    FIRST,
    FOREIGN,
    GAP,
    LONG,
    ON_POLICY,
    PANELS,
    ROOT,
    SEEDS,
    STALE,
    TUNING_SEED,
    Finished,
    Study,
    committed,
    filled,
    interval_of,
)
from tools.toy_models import STUDY_MODELS, ToyModelSpec, make_meta_model

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TEMPLATE = ROOT / "research" / "study_page.md"
PAGE = ROOT / "docs" / "study.md"
PICTURE = ROOT / "docs" / "pictures" / "study.png"
PRICED = "joint_8b"  # the recipe whose time the cost model gives: Qwen3-1.7B generates for Qwen3-8B
EVALUATIONS = 5  # of an arm: every twenty of 80 iterations; on_policy has more, for its curve
ALLOWED = (0.0, 0.01, 0.03)  # what an arm may be below on-policy's last accuracy, where costs are counted to it
MARGIN, HALF = -0.02, 0.5  # the target: a 95 % interval above this, at this share of on-policy's rollout FLOPs or less
NOT_RUN = "not run yet"
EXACT = "drafted"  # the arm that is on_policy in all but its cost
PAIRS = {"close": FIRST, "far": FIRST, "gap": GAP}
FAMILIES = {  # what the picture gives one color, and the color
    "rollout model alone, no correction": ("#7F7F7F", ("none",)),
    "rollout model alone, corrected": ("#0072B2", ("tis", "obrs", "expected", "prefix", "dppo_topk")),
    "annealed, no correction": ("#E69F00", ("annealed_none",)),
    "annealed, corrected": (
        "#D55E00",
        ("annealed_tis", "annealed_obrs", "annealed_expected", "annealed_half", "annealed_linear"),
    ),
    "frozen and annealed": ("#CC79A7", ("frozen_annealed",)),
    "mixed throughout": ("#009E73", ("mixed_quarter", "mixed_half")),
    "drafted": ("#56B4E9", (EXACT,)),
}
TITLES = {
    "close": "Rollout model: 6 times cheaper, close",
    "far": "Rollout model: 6 times cheaper, far",
    "gap": "Rollout model: 12 times cheaper",
}
MARKERS = "osD^v"
APART = 1.5  # percent of the cost that the points of a family are moved apart in the picture
Row = Sequence[str]


def interval_text(sample: Sample) -> str:
    """A mean difference and its 95 % interval by Student's t, in points: `-1.2 [-2.0, -0.4]`."""
    interval = interval_of(sample)
    ends = "" if interval.low is None else f" [{100 * interval.low:+.1f}, {100 * interval.high:+.1f}]"
    return f"{100 * interval.value:+.1f}{ends}"


class Arms:
    """The finished runs of one pair or panel by their arm, those of on_policy among them, and their numbers as text."""

    def __init__(self, finished: Sequence[Finished], pair: str) -> None:
        self.pair = pair
        self.runs: dict[str, dict[int, Finished]] = {}
        for one in finished:
            prefix, _, arm = one.run.arm.partition("/")
            if prefix == pair or one.run.arm == ON_POLICY.name:
                self.runs.setdefault(arm, {})[one.run.seed] = one

    def __contains__(self, arm: str) -> bool:
        return arm in self.runs

    def __getitem__(self, key: str) -> str:
        """`obrs`: its accuracy. `obrs-none`: a difference. `obrs@rollout`: a share of on_policy's cost."""
        arm, _, cost = key.partition("@")
        arm, _, other = arm.partition("-")
        if arm not in self or (other and other not in self):
            return NOT_RUN
        if cost:
            return share_text(self.share(arm, cost))
        return interval_text(self.difference(arm, other)) if other else f"{percent(self.spread(arm))} %"

    def spread(self, arm: str) -> Sample:
        """Last accuracies, by seed."""
        return Sample(tuple(one.run.last.policy_accuracy for one in self.runs[arm].values()))

    def difference(self, arm: str, other: str) -> Sample:
        """Differences of the last accuracies, paired by seed."""
        return self._paired(arm, other, lambda one, base: _accuracy(one) - _accuracy(base))

    def at_equal_cost(self, arm: str) -> Sample:
        """Differences to on_policy when that had spent as many rollout FLOPs, between its evaluations on a line."""
        return self._paired(arm, "on_policy", lambda one, base: _accuracy(one) - _between(base, one.run.last.flops))

    def share(self, arm: str, cost: str) -> float:
        """Cost of a run as a share of on_policy's with the same seed, the mean over seeds."""
        measured = {**COSTS, "evaluated": flops_with_evaluations}[cost]
        return self._paired(arm, "on_policy", lambda one, base: measured(one) / measured(base)).mean

    def _paired(self, arm: str, other: str, of: Callable[[Finished, Finished], float]) -> Sample:
        both = [seed for seed in self.runs[arm] if seed in self.runs[other]]
        return Sample(tuple(of(self.runs[arm][seed], self.runs[other][seed]) for seed in both))

    def reaching_cost(self, arm: str, cost: str, less: float) -> tuple[float, ...]:
        """Costs until an arm reaches on_policy's last accuracy with the same seed, as parts of on_policy's own.

        Seeds on which it never does are left out. on_policy, too, counts until it first reaches that accuracy.

        Args:
            less: how much lower the accuracy may be.
        """
        ratios = []
        for seed, base in self.runs["on_policy"].items():
            goal = _accuracy(base) - less
            done = self.runs[arm][seed].run.spent_until(goal) if seed in self.runs[arm] else None
            if done:
                ratios.append(_spent(self.runs[arm][seed], done, cost) / _spent(base, base.run.spent_until(goal), cost))
        return tuple(ratios)

    def collapsed(self, arm: str) -> int:
        return sum(one.run.collapse is not None for one in self.runs[arm].values())

    def reaching(self, margin: float = MARGIN) -> list[str]:
        """The arms that reach the target: their whole interval is above the margin."""
        lows = {arm: interval_of(self.difference(arm, "on_policy")).low for arm in self.cheap()}
        return [arm for arm, low in lows.items() if low is not None and low > margin]

    def cheap(self) -> list[str]:
        """The arms at half of on_policy's rollout FLOPs or less, the most accurate first."""
        arms = [arm for arm in self.runs if arm not in ("on_policy", EXACT) and self.share(arm, "rollout") <= HALF]
        return sorted(arms, key=lambda arm: -self.spread(arm).mean)


def share_text(share: float) -> str:
    return f"{100 * share:.0f} %"


def _rollouts_of_all(one: Finished) -> float:
    return one.run.last.flops / (one.run.last.flops + one.run.last.training_flops)


def _accuracy(one: Finished) -> float:
    return one.run.last.policy_accuracy


def _between(one: Finished, flops: float) -> float:
    """Accuracy of a run when it had spent this, on a line between its evaluations; the last one beyond its end."""
    for before, after in zip(one.run.points, one.run.points[1:], strict=False):
        if before.flops <= flops <= after.flops:
            part = (flops - before.flops) / (after.flops - before.flops)
            return before.policy_accuracy + part * (after.policy_accuracy - before.policy_accuracy)
    return _accuracy(one)


@cache
def _clock() -> ShareHours:
    """What the cost model needs of PRICED, on the GPUs that it names; no hub is asked how long prompts are."""
    config = resolve(PRICED, None, [])
    prompts = PromptLengths(config.task.max_prompt_tokens, MEAN_PROMPT, "as everywhere")
    gpus = GpusConfig(**load_recipe(PRICED)["gpus"])
    return Estimator(config, model_sizes(config), prompts).shares(GPUS[gpus.kind], gpus.count)


@cache
def _iterations() -> int:
    return resolve(PRICED, None, []).iterations


def hours_alone(clock: ShareHours) -> Hours:
    """The hours of the policy without a rollout model."""
    return clock.run(clock.work, clock.policy, [clock.costs["policy"]])


def hours_drafted(clock: ShareHours, acceptance: float) -> Hours:
    """The hours where the policy generates all with the fastest number of drafts a pass."""
    model = clock.costs["rollout_model"]
    tried = [clock.at(0.0, Drafts(model, number, acceptance)) for number in range(1, MOST_DRAFTS + 1)]
    return min(tried, key=lambda hours: hours.generation)


@cache
def _iteration_hours(share: float | None, acceptance: float | None, is_frozen: bool) -> float:
    """Hours of one iteration; a share of None is the policy without a rollout model."""
    clock = _clock()
    if is_frozen:
        costs = clock.costs
        clock = replace(clock, costs={**costs, "rollout_model": replace(costs["rollout_model"], trained=0)})
    if share is None:
        return hours_alone(clock).iterations / _iterations()
    hours = clock.at(share) if acceptance is None else hours_drafted(clock, acceptance)
    return hours.iterations / _iterations()


def model_hours(one: Finished, until: float | None = None) -> float:
    """Hours of as many iterations of PRICED in which each model generates the share that it had in this run.

    Args:
        until: so many iterations, the last one in part; None: all that it had.
    """
    config, until = validated(Config, filled(one.run.settings)), one.run.last.iteration if until is None else until
    model = config.rollout_model
    is_frozen = model is not None and model.optimizer is None

    hours = 0.0
    for iteration in range(1, math.ceil(until) + 1):
        share = model.share_at(iteration) if config.uses_rollout_model(iteration) else None
        part = min(1.0, until - (iteration - 1))
        hours += part * _iteration_hours(share, one.draft_acceptance, is_frozen)
    return hours


def hours_ahead(writer: Role) -> float:
    """Hours where a model generates everything ahead, the policy with drafts, as a part of on-policy's (PRICED)."""
    config = resolve(PRICED, None, [])
    prompts = PromptLengths(config.task.max_prompt_tokens, MEAN_PROMPT, "as everywhere")
    gpus = GpusConfig(**load_recipe(PRICED)["gpus"])
    ahead = Estimator(config, model_sizes(config), prompts).ahead(GPUS[gpus.kind], gpus.count, 0.0, writer)
    assert ahead is not None
    return ahead.iterations / hours_alone(_clock()).iterations


def _spent(one: Finished, spent: Spent, cost: str) -> float:
    """What a run had spent at a moment, of one of COSTS."""
    if cost == "time":
        return model_hours(one, spent.iterations)
    return {"rollout": spent.flops, "all": spent.all_flops, "cpu": spent.cpu_seconds}[cost]


def flops_with_evaluations(one: Finished) -> float:
    """FLOPs of rollouts, training and evaluations of an arm in which one model generates everything.

    An evaluation's answer costs its model what a rollout costs the writer, by their FLOPs a token.
    """
    run, pair = one.run, one.run.arm.partition("/")[0]
    policy = _policy_cost()
    writer = policy if pair == ALONE else forward_cost(make_meta_model(STUDY_MODELS[pair])).per_token
    evaluated = policy if pair == ALONE else policy + writer

    answer = run.last.flops / run.last.sequences * evaluated / writer
    return run.last.flops + run.last.training_flops + EVALUATIONS * run.problems * answer


COSTS: Mapping[str, Callable[[Finished], float]] = {
    "rollout": lambda one: one.run.last.flops,
    "all": lambda one: one.run.last.flops + one.run.last.training_flops,
    "cpu": lambda one: one.run.last.cpu_seconds,
    "time": model_hours,
}


def pair_table(arms: Arms) -> str:
    """Accuracy and costs of every arm of a pair, and what on-policy's accuracy costs there."""
    rows = []
    for arm in ("on_policy", *PAIRS[arms.pair], EXACT):
        if arm not in arms:
            continue
        costs = [share_text(arms.share(arm, cost)) for cost in COSTS]
        if arm == EXACT:
            until = f"{arms.share(arm, 'all'):.2f}"
            rows.append((f"`{arm}`", "as `on_policy`", "0, exact", *costs, "all", until))
            continue
        right = percent(arms.spread(arm)) + _fallen(arms.collapsed(arm))
        if arm == "on_policy":
            rows.append((f"`{arm}`", right, "-", *costs, "-", "-"))
            continue
        reached = "/".join(f"{len(arms.reaching_cost(arm, 'all', less))}" for less in ALLOWED)
        until = ratio_text(arms.reaching_cost(arm, "all", ALLOWED[-1]))
        rows.append((f"`{arm}`", right, interval_text(arms.difference(arm, "on_policy")), *costs, reached, until))
    columns = ("arm", "right, %", "minus `on_policy`", "rollout FLOPs", "all FLOPs", "CPU", "hours")
    return markdown((*columns, "reached", "all FLOPs until -3"), rows) if len(rows) > 1 else NOT_RUN.capitalize()


def power_table(arms: Sequence[Arms]) -> str:
    """The arms of the panel `power` that have three seeds and more on both sides."""
    rows = []
    for pair in arms:
        for arm in pair.runs:
            if arm == "on_policy" or len(pair.runs[arm].keys() & pair.runs.get("on_policy", {}).keys()) < 3:
                continue
            difference = pair.difference(arm, "on_policy")
            reached = pair.reaching_cost(arm, "all", ALLOWED[-1])
            seeds = len(difference.values)
            cells = share_text(pair.share(arm, "rollout")), share_text(pair.share(arm, "all"))
            until = f"{ratio_text(reached)} ({len(reached)} of {seeds})"
            rows.append((pair.pair, f"`{arm}`", str(seeds), interval_text(difference), *cells, until))
    columns = ("pair", "arm", "seeds", "minus `on_policy`", "rollout FLOPs", "all FLOPs", "all FLOPs until -3")
    return markdown(columns, rows) if rows else NOT_RUN.capitalize()


def predicted_table(study: Study) -> str:
    """What `jackpot simulate` says of each pair before it trains (research/predict.py)."""
    path = study.results / "predicted.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    rows = [
        (
            line["label"].replace("_", " "),
            f"{line['kl_policy_rollout']:.3f}",
            f"{line['acceptance']:.3f} ± {line['acceptance_spread']:.2f}",
            f"{100 * line['tis_cut']:.1f}, {100 * line['obrs_cut']:.1f} %",
            f"{100 * line['tis_ess']:.0f}, {100 * line['obrs_ess']:.0f}, {100 * line['expected_ess']:.0f} %",
            f"{line['agreement']:.3f}",
        )
        for line in lines
    ]
    columns = ("pair", "KL", "Z ± spread", "cut by the cap: TIS, OBRS", "effective tokens: TIS, OBRS, expected")
    return markdown((*columns, "cosine"), rows) if rows else NOT_RUN.capitalize()


def ratio_text(ratios: Sequence[float]) -> str:
    """The geometric mean of ratios and, of three and more, its 95 % interval by Student's t: `1.34 [1.20, 1.50]`."""
    if not ratios:
        return "-"
    interval = interval_of(Sample(tuple(math.log(ratio) for ratio in ratios)))
    ends = f" [{math.exp(interval.low):.2f}, {math.exp(interval.high):.2f}]" if len(ratios) > 2 else ""
    return f"{math.exp(interval.value):.2f}{ends}"


def stale_table(arms: Arms) -> str:
    """Every correction at both staleness, at the tuned rate and at twice that."""
    rows = []
    for staleness in (64, 128):
        for name in STALE:
            arm, clip = f"stale_{staleness}_{name}", f"stale_{staleness}_clip"
            if f"{arm} x2" in arms and f"{clip} x2" in arms:
                cells = [
                    cell for times in ("", " x2") for cell in _both(arms, arm + times, clip + times, name == "clip")
                ]
                rows.append((str(staleness), f"`{name}`", *cells))
    columns = ("staleness", "arm", "right, %", "minus `clip`", "at twice the rate, %", "minus `clip`")
    return markdown((*columns, "cosine"), rows) if rows else NOT_RUN.capitalize()


def foreign_table(arms: Arms) -> str:
    """A rollout model that never learns, at the tuned rate and at twice that."""
    rows = []
    for arm in FOREIGN:
        if f"{arm} x2" in arms and "foreign_none x2" in arms:
            base = "foreign_none"
            rows.append(
                (f"`{arm}`", *_both(arms, arm, base, arm == base), *_both(arms, f"{arm} x2", f"{base} x2", arm == base))
            )
    columns = ("arm", "right, %", "minus `foreign_none`", "at twice the rate, %", "minus `foreign_none`")
    return markdown(columns, rows) if rows else NOT_RUN.capitalize()


def _both(arms: Arms, arm: str, base: str, is_base: bool) -> tuple[str, str]:
    """Accuracy, and difference to a base, of one arm."""
    right = percent(arms.spread(arm)) + _fallen(arms.collapsed(arm))
    return right, "-" if is_base else interval_text(arms.difference(arm, base))


def ablation_text(arms: Arms) -> str:
    """The setting of OBRS that made the largest difference to `obrs`, on the seeds of both."""
    tried = [arm for arm in ABLATION if arm in arms and "obrs" in arms]
    if not tried:
        return NOT_RUN
    largest = max(tried, key=lambda arm: abs(arms.difference(arm, "obrs").mean))
    return f"`{largest}`, {interval_text(arms.difference(largest, 'obrs'))}"


def long_text(arms: Arms) -> str:
    """The arm that trained for 1,000 updates beside `none`."""
    none = f"none {LONG}"
    stretched = [arm for arm in arms.runs if arm.endswith(f" {LONG}") and arm != none]
    if none not in arms or not stretched:
        return NOT_RUN
    return f"`{stretched[0].partition(' ')[0]}` minus `none` is {interval_text(arms.difference(stretched[0], none))}"


def _fallen(count: int) -> str:
    return f" ({count} collapsed)" if count else ""


def models_table(finished: Sequence[Finished]) -> str:
    """Size, cost and distance from the policy of each rollout model, over the first twenty iterations of `expected`."""
    rows = []
    for name, spec in STUDY_MODELS.items():
        cost = forward_cost(make_meta_model(spec)).per_token
        shape = (f"`{name}`", f"{parameters(spec):,}", f"{cost:,}", f"{_policy_cost() / cost:.1f}")
        rows.append((*shape, *_at_the_start(name, finished)))
    columns = ("model", "parameters", "FLOPs a token", "times fewer", "right at the start, %")
    return markdown((*columns, "KL(it ‖ policy), nats", "acceptance"), rows)


def _policy_cost() -> int:
    return forward_cost(make_meta_model(STUDY_MODELS["policy"])).per_token


def parameters(spec: ToyModelSpec) -> int:
    return sum(parameter.numel() for parameter in make_meta_model(spec).parameters())


def _at_the_start(name: str, finished: Sequence[Finished]) -> Row:
    arm = ON_POLICY.name if name == "policy" else f"{name}/expected"
    runs = [one.run for one in finished if one.run.arm == arm]
    if not runs:
        return NOT_RUN, "-", "-"
    if name == "policy":
        return percent(Sample(tuple(run.points[0].policy_accuracy for run in runs))), "0", "1"
    right = Sample(tuple(run.points[0].rollout_model_accuracy for run in runs))
    return percent(right), *(
        f"{fmean(getattr(run.points[1], what) for run in runs):.3f}" for what in ("kl", "acceptance")
    )


def target_text(pairs: Sequence[Arms], margin: float = MARGIN) -> str:
    """Say which arms reach the target on which pair."""
    return "; ".join(
        f"{arms.pair}: " + (", ".join(f"`{arm}`" for arm in arms.reaching(margin)) or "none") for arms in pairs
    )


def best_text(pairs: Sequence[Arms]) -> str:
    """Say which arm is the most accurate at half of the rollout FLOPs or less, a line a pair."""
    parts = []
    for arms in pairs:
        if best := next(iter(arms.cheap()), None):
            apart, equal = interval_text(arms.difference(best, "on_policy")), interval_text(arms.at_equal_cost(best))
            parts.append(
                f"   - {arms.pair}: `{best}`, {apart} points to `on_policy` at {arms[f'{best}@rollout']}, and {equal} "
                f"to `on_policy` that had spent as much"
            )
    return "\n".join(parts) or f"   - {NOT_RUN}"


def markdown(columns: Row, rows: Sequence[Row]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def page(study: Study) -> str:
    """The whole document. Refuses a panel `first` that is not complete."""
    done = [panel for panel in PANELS if study.is_complete(panel)]
    if "first" not in done:
        raise SystemExit(
            f"the page needs the whole panel `first`, and {study.results / 'first.jsonl'} has "
            f"{len(study.read('first'))} runs of it; run python -m research.study --panel first"
        )
    panels = {panel: study.read(panel) if panel in done else [] for panel in PANELS if panel not in ("power", "hard")}
    reported, tuning = [one for runs in panels.values() for one in runs], study.read("tuning")
    power = study.read("power")  # as far as it is
    pairs = {name: Arms([*panels["first"], *panels["gap"]], name) for name in PAIRS}
    shown = [arms for arms in pairs.values() if len(arms.runs) > 1]
    every = {"stale": ALONE, "foreign": "far", "ablation": "far", "long": "far"}
    others = {name: Arms([*panels["first"], *panels[name]], pair) for name, pair in every.items()}
    environment = reported[0].run.environment
    return TEMPLATE.read_text().format(
        **pairs,
        **{name: others[name] for name in ("stale", "foreign")},
        **{f"{name}_table": pair_table(arms) for name, arms in pairs.items()},
        ahead=share_text(hours_ahead("policy")),
        writer_ahead=share_text(hours_ahead("rollout_model")),
        stale_table=stale_table(others["stale"]),
        foreign_table=foreign_table(others["foreign"]),
        ablation=ablation_text(others["ablation"]),
        long=long_text(others["long"]),
        power_table=power_table([Arms(power, name) for name in ("close", "far")]),
        predicted_table=predicted_table(study),
        rollouts=share_text(fmean(_rollouts_of_all(one) for one in pairs["close"].runs["on_policy"].values())),
        evaluations=EVALUATIONS,
        problems=f"{reported[0].run.problems:,}",
        apart=f"{APART:g}",
        target=target_text(shown),
        nearer=target_text(shown, MARGIN / 2),
        best=best_text(shown),
        models=models_table(reported),
        power_seeds=len({one.run.seed for one in power}),
        reported_runs=len(reported),
        tuning_runs=len(tuning),
        tuning_seed=TUNING_SEED,
        seeds=f"{SEEDS[0]} to {SEEDS[-1]}",
        source=reported[0].source[:12],
        versions=", ".join(f"{name} {environment[name]}" for name in ("python", "torch", "transformers")),
        hours=f"{sum(one.run.last.cpu_seconds for one in [*tuning, *reported]) / 3600:.1f}",
    )


def draw(path: Path, pairs: Sequence[Arms]) -> None:
    """Draw where each arm ends, accuracy over rollout FLOPs, beside the course of on_policy; one chart a pair."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(pairs) + 2.6, 4.8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(pairs), squeeze=False, sharey=True)[0]
    lowest = [_draw_pair(panel, arms) for panel, arms in zip(panels, pairs, strict=True)]
    panels[0].set_ylim(min(lowest) - 4, None)
    panels[0].set_ylabel("policy's right answers after equal training, %", fontsize=9)
    entries = {}
    for panel in panels:
        entries |= {label: handle for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(entries.values(), entries.keys(), loc="outside right center", fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as partial:
        figure.savefig(partial, format="png")


def _draw_pair(panel: "Axes", arms: Arms) -> float:
    """Draw one pair, and return the lowest end of a bar."""
    steps = list(zip(*(one.run.points for one in arms.runs["on_policy"].values()), strict=True))
    whole, end = fmean(point.flops for point in steps[-1]), 100 * arms.spread("on_policy").mean
    x = [100 * fmean(point.flops for point in step) / whole for step in steps]
    y = [100 * fmean(point.policy_accuracy for point in step) for step in steps]
    panel.plot(x, y, color="black", label="policy generates all (on-policy), in the course of its training")
    panel.fill_between([0, 100 * HALF], end + 100 * MARGIN, end + 2, color="#009E73", alpha=0.12, linewidth=0)
    panel.text(1, end + 1.8, "target: half of the cost,\nat most 2 points lost", fontsize=7, va="top", color="#006B4E")
    lowest = end
    for family, (color, names) in FAMILIES.items():
        for place, (name, marker) in enumerate(zip(names, MARKERS, strict=False)):
            if name not in arms:
                continue
            right = interval_of(arms.spread("on_policy" if name == EXACT else name))
            at = 100 * arms.share(name, "rollout") + APART * (place - (len(names) - 1) / 2)
            label = family if len(names) == 1 else f"{family}: {name}"
            bar = 0.0 if right.high is None else 100 * (right.high - right.value)
            look = {"color": color, "marker": marker, "markersize": 6, "capsize": 2, "linestyle": "none"}
            panel.errorbar(at, 100 * right.value, bar, label=label, linewidth=0.8, **look)
            lowest = min(lowest, 100 * right.value - bar)
    panel.set_title(TITLES[arms.pair], fontsize=10)
    panel.set_xlabel("FLOPs of generating the rollouts, % of on-policy's", fontsize=9)
    panel.set_xlim(0, None)
    panel.grid(alpha=0.25, linewidth=0.5)
    return lowest


def main() -> None:
    os.chdir(ROOT)  # settings of the runs name their models from there
    study = committed()
    PAGE.write_text(page(study))
    finished = [one for panel in ("first", "gap") if study.is_complete(panel) for one in study.read(panel)]
    draw(PICTURE, [arms for arms in (Arms(finished, name) for name in PAIRS) if len(arms.runs) > 1])
    print(f"{PAGE} and {PICTURE}")


if __name__ == "__main__":
    main()
