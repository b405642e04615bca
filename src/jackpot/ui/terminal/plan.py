"""What a large run needs of GPUs and hours, as `--dry-run` shows it."""

from rich.console import Console
from rich.table import Table

from jackpot.analysis.plan.estimate import Estimate, Row
from jackpot.analysis.plan.tiny import Tiny
from jackpot.config.run import Config
from jackpot.launch.local import model_paths
from jackpot.models.load import load_config
from jackpot.models.published import is_from_table

_GB = 1e9  # as GPUs are sold
_COLUMNS = ("GPUs", "GB each", "hours", "write", "train", "eval", "rollout share", "on policy", "saved")


def show_needs(console: Console, config: Config, estimate: Estimate) -> None:
    """Memory of each GPU, hours of the run, and what both rest on."""
    table = Table(title="What it needs, by arithmetic (docs/cost.md)")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "GPUs" else "right")
    names = [_name(row) for row in estimate.rows]
    for row in estimate.rows if _name(estimate.stated) in names else (estimate.stated, *estimate.rows):
        table.add_row(_name(row), *_cells(row, is_on_policy(config)))
    console.print(table)
    for sentence in (_memory(estimate.stated), *_assumptions(config, estimate)):
        console.print(sentence, highlight=False, soft_wrap=True, markup=False)


def is_on_policy(config: Config) -> bool:
    return config.rollout_model is None and config.batch.steps_per_iteration == 1


def _name(row: Row) -> str:
    return f"{row.shard.gpus} {row.kind}"


def _cells(row: Row, on_policy: bool) -> list[str]:
    """Without hours where it does not fit: then it is the memory that one wants to see."""
    shard = row.shard
    memory = "?" if shard.training is None else f"{shard.peak / _GB:.0f}/{shard.limit / _GB:.0f}"
    if row.hours is None or row.alone is None:
        return [memory, "no room", *[""] * (len(_COLUMNS) - 3)]
    hours, alone = row.hours, row.alone
    parts = [_hours(part) for part in (hours.all, hours.writing, hours.training, hours.evaluating)]
    compared = ["", ""] if on_policy else [_hours(alone.iterations), f"{1 - hours.iterations / alone.iterations:.0%}"]
    return [memory, *parts, f"{hours.rollout_share:.0%}", *compared]


def _hours(count: float) -> str:
    return f"{count:.1f}" if count < 100 else f"{count:,.0f}"


def _memory(row: Row) -> str:
    """What a GPU of the recipe's machine holds at the worst moment."""
    shard = row.shard
    training = "activations unknown" if shard.training is None else f"activations and loss {shard.training / _GB:.1f}"
    engines = f"engines {shard.resting / _GB:.1f}, while they write {shard.writing / _GB:.1f}"
    spread = max(shard.tensor_parallel.values(), default=1)
    return (
        f"Each of {_name(row)}, in GB: weights {shard.weights / _GB:.1f}, optimizer {shard.optimizer / _GB:.1f}, "
        f"gradients {shard.gradients / _GB:.1f}, {'copies of weights' if shard.gpus == 1 else 'gathered layers'} "
        f"{shard.gathered / _GB:.1f}, {training}, {engines}"
        f"{f', each engine on {spread} GPUs' if spread > 1 else ''}."
    )


def _assumptions(config: Config, estimate: Estimate) -> list[str]:
    """What the numbers rest on and nobody has seen."""
    prompts, fewest = estimate.prompts, [f"{count} {kind}" for kind, count in estimate.fewest.items() if count]
    said = [f"It fits on {' or '.join(fewest)}." if fewest else "It fits on none of the numbers of GPUs tried."]
    if estimate.stated.shard.gpus > 1 or len(fewest) == 0:
        said[0] += " This version trains on one GPU: more are a plan with fully sharded weights."
    tokens = config.batch.rollouts * estimate.response
    said.append(
        f"Assumed: responses of {estimate.response:,.0f} tokens in the mean, {tokens:,.0f} an iteration. On-policy: "
        f"hours, without evaluations, in which the policy writes as many responses itself, one step on each batch."
    )
    if prompts.assumed:
        said.append(
            f"Assumed: prompts of {prompts.mean:,.0f} tokens, at most {prompts.longest:,}. Why: {prompts.assumed}."
        )
    from_table = [
        path for path in dict.fromkeys(model_paths(config, None).values()) if is_from_table(load_config(path))
    ]
    if from_table:
        said.append(f"Shapes of {', '.join(from_table)}: Jackpot's own table, for the hub does not answer.")
    return said


def show_tiny(console: Console, tiny: Tiny) -> None:
    """Every setting that is not the recipe's, and where the problems are from."""
    console.print(
        "--tiny: small models with random weights and few problems, to see that every part of the recipe runs here. "
        "Its numbers mean nothing. It changes",
        soft_wrap=True,
    )
    table = Table()
    for column in ("setting", "recipe", "here"):
        table.add_column(column, overflow="fold")
    for key, recipe, here in tiny.changes:
        table.add_row(key, _text(recipe), _text(here))
    console.print(table, markup=False)
    for line in tiny.data:
        console.print(line, soft_wrap=True, markup=False)


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return "null" if value is None else str(value)
