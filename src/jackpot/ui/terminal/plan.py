"""Prints what a run would do and need: the plan of `--dry-run` and the changes of `--tiny`."""

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from jackpot.analysis.plan.cost_model import HEAD_ACCEPTANCE, HEAD_DRAFTS
from jackpot.analysis.plan.estimate import CostEstimate, MachineEstimate
from jackpot.analysis.plan.memory import MemoryPlan
from jackpot.analysis.plan.sizes import ModelSize, PromptLengths
from jackpot.analysis.plan.tiny import TinyRun
from jackpot.config.config import Config
from jackpot.config.engines import EngineConfig, ServerEngineConfig
from jackpot.core.process_rank import process_rank
from jackpot.core.roles import Role
from jackpot.models.load import load_config
from jackpot.models.published import is_from_table
from jackpot.ui.terminal.output import print_lines, show_table

GB = 1e9  # bytes; the memory of GPUs is given in GB, not GiB
_COLUMNS = ("GPUs", "GB each", "hours", "rollout", "train", "eval", "rollout share", "on policy", "saved")


def show_plan(
    console: Console,
    config: Config,
    sizes: Mapping[Role, ModelSize],
    memory: MemoryPlan | None,
    prompts: PromptLengths,
    folder: Path,
) -> None:
    """Print what a run would do.

    Args:
        config: settings of the run.
        sizes: parameters of each model.
        memory: memory of a run in one process; None for several ranks, and for a large run (`show_needs`).
        prompts: lengths of the task's prompts.
        folder: the run folder.
    """
    batch = config.batch
    correction = config.objective.correction

    rows = {
        "policy": f"{config.policy.path}, {sizes['policy'].parameters:,} parameters",
        "rollout model": "the policy itself"
        if config.rollout_model is None
        else f"{config.rollout_model.path}, {sizes['rollout_model'].parameters:,} parameters"
        + ("" if config.rollout_model.optimizer else ", frozen"),
        "trained": _trained(config, sizes),
        **({"memory": _peak(memory)} if memory else {}),
        "iterations": f"{config.iterations}",
        "rollout batch": f"{batch.prompts} prompts x {batch.group_size} = {batch.rollouts} sequences",
        "optimizer steps": f"{batch.steps_per_iteration} per rollout batch (its staleness), "
        f"{config.iterations * batch.steps_per_iteration} in all",
        "response tokens": f"at most {batch.rollouts * config.sampling.max_new_tokens:,} per iteration",
        **({"left out": prompts.left_out} if prompts.left_out else {}),
        "correction": ", ".join(
            [correction.name, *(f"{key} {value}" for key, value in correction.model_dump().items() if key != "name")]
        ),
        "objective": _objective(config),
        "engine": _engine(config),
        "evaluation": _evaluation(config),
        "processes": _processes(config),
        "run folder": str(folder),
    }
    show_table(console, "The plan (nothing was run)", ("", ""), rows.items(), show_header=False)


def _peak(memory: MemoryPlan) -> str:
    """Say how many bytes the run holds at its peak, at least if the activations are unknown, and what they are for."""
    # The fields of a plan, without `sleeping`, which is a part of `engines`.
    items = ", ".join(
        f"{name} {_bytes(getattr(memory, name) or 0)}" for name in MemoryPlan.__slots__ if name != "sleeping"
    )
    if memory.sleeping:
        items += f" (engines release {_bytes(memory.sleeping)} while the learner trains)"
    if memory.training is None:
        return f"more than {_bytes(memory.peak)}: {items}; the activations depend on values and are not known"
    return f"{_bytes(memory.peak)} at the peak, with all responses of full length: {items}"


def _bytes(count: int) -> str:
    """Format a number of bytes in GiB or MiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _engine(config: Config) -> str:
    """Say which engine generates, in which precision, with drafts or ahead of training, and which one evaluates."""
    engine = config.engine
    head = ", output layers in fp32" if config.head_dtype else ""
    facts = [f"{_precision(engine)}, training in {config.precision}{head}"]
    if isinstance(engine, ServerEngineConfig):
        facts.append(f"servers {', '.join(engine.urls)}")
    if config.draft:
        facts.append(f"the rollout model drafts for the policy, tokens {config.draft.tokens}, lam {config.draft.lam:g}")
    if config.batch.ahead:
        facts.append(f"up to {config.batch.ahead} rollout batches ahead")
    if config.evaluation.engine:
        facts.append(f"evaluation of the policy with {_precision(config.evaluation.engine)}")
    return "; ".join(facts)


def _processes(config: Config) -> str:
    """Say how many processes train, as torchrun started or Ray will start them, and how many more generate."""
    placement = config.placement
    ranks = process_rank().size
    shared = ", on the ranks' GPUs, asleep while these train" if config.shares_gpus else ""
    if placement.launcher == "ray":
        return (
            f"Ray places {placement.ranks} ranks and {placement.engine_processes} engines, each in its process{shared}"
        )

    engines = f"; {placement.engine_processes} engine processes{shared}" if placement.engine_processes else ""
    if ranks == 1:
        return (
            f"1, which has one GPU; torchrun --nproc-per-node N -m jackpot train shares the training out to N{engines}"
        )
    return f"{ranks} ranks; rank 0 generates, evaluates and writes, all of them train{engines}"


def _precision(engine: EngineConfig) -> str:
    """Name an engine and the precision of its weights, linear layers and cache."""
    settings = engine.model_dump()  # a mapping, as not every engine has all of the settings below
    labels = {"head_dtype": "output layer in", "quantization": "linear layers", "kv_cache_dtype": "keys and values"}
    facts = [f"{engine.name} in {engine.dtype}"]
    facts += [f"{label} {settings[name]}" for name, label in labels.items() if settings.get(name)]
    facts += ["eager attention"] if settings.get("attn_implementation") == "eager" else []
    return ", ".join(facts)


def _evaluation(config: Config) -> str:
    """Say which problems an evaluation has, how many answers to each, and how often it runs."""
    settings = config.evaluation
    sets = ", ".join([f"up to {settings.problems} problems of the task", *settings.benchmark_names])
    answers = f", {settings.k} answers to each" if settings.k > 1 else ""
    return f"{sets}{answers}, {config.evaluation_sampling.described}, every {settings.every} iterations"


def _objective(config: Config) -> str:
    """Name the advantage, the aggregation of the loss, and each further term of the loss."""
    objective = config.objective
    terms = [f"advantage {objective.advantage}", f"{objective.loss_agg_mode} over {objective.count} tokens"]

    # The terms that only some runs have.
    if config.critic:
        terms.append(f"critic from {config.critic.path or config.policy.path}")
    if reference := objective.reference:
        path = reference.path or config.policy.path
        terms.append(f"{reference.kl_loss_coef:g} x KL to {path} ({reference.kl_loss_type})")
    if objective.entropy_coeff:
        terms.append(f"{objective.entropy_coeff:g} x entropy")
    if buffer := objective.overlong_buffer:
        terms.append(f"up to -{buffer.penalty_factor:g} for the last {buffer.len} tokens")
    if config.batch.filter_groups:
        terms.append(f"groups filtered, at most {config.batch.filter_groups.max_num_gen_batches} generation batches")

    return "; ".join(terms)


def _trained(config: Config, sizes: Mapping[Role, ModelSize]) -> str:
    """Say how many parameters of each model are trained."""
    counts = []
    for role, size in sizes.items():
        adapter = getattr(getattr(config, role), "lora", None)
        count = f"{role.replace('_', ' ')} {size.trained:,}"
        counts.append(count if adapter is None else f"{count} (LoRA of rank {adapter.rank})")
    return f"{', '.join(counts)} parameters"


def show_needs(console: Console, config: Config, estimate: CostEstimate) -> None:
    """Print the memory of each GPU and the hours of the run for several machines, with the assumptions behind both."""
    names = [_name(row) for row in estimate.rows]
    machines = estimate.rows if _name(estimate.stated) in names else (estimate.stated, *estimate.rows)
    rows = [(_name(row), *_cells(row, is_on_policy(config))) for row in machines]
    show_table(console, "GPUs and hours by arithmetic (docs/cost.md)", _COLUMNS, rows, _COLUMNS[1:])
    print_lines(console, (_memory(estimate.stated), *unpriced(config), *_assumptions(config, estimate)))


def is_on_policy(config: Config) -> bool:
    """Return whether the policy generates its own rollouts and takes one step on each batch of them."""
    return config.rollout_model is None and config.batch.steps_per_iteration == 1


def _name(row: MachineEstimate) -> str:
    """Name a machine by the number and kind of its GPUs: 4 H100."""
    return f"{row.shard.gpus} {row.kind}"


def _cells(row: MachineEstimate, on_policy: bool) -> list[str]:
    """Format one machine's cells of `_COLUMNS` after the first; if the run does not fit its memory, hours are `-`."""
    shard = row.shard
    memory = "?" if shard.training is None else f"{shard.peak / GB:.0f}/{shard.limit / GB:.0f}"
    if row.hours is None or row.alone is None:
        return [memory, "-", *[""] * (len(_COLUMNS) - 3)]  # memory and `-`; the other columns are empty
    hours, alone = row.hours, row.alone  # hours of the run, and of a run of the policy alone
    phases = [_hours(phase) for phase in (hours.all, hours.generation, hours.training, hours.evaluating)]
    # The on-policy hours and the share of them that the run saves.
    compared = ["", ""] if on_policy else [_hours(alone.all), f"{1 - hours.all / alone.all:.0%}"]
    return [memory, *phases, f"{hours.rollout_share:.0%}", *compared]


def _hours(hours: float) -> str:
    """Format hours, with one decimal if they are below 100."""
    return f"{hours:.1f}" if hours < 100 else f"{hours:,.0f}"


def _memory(row: MachineEstimate) -> str:
    """Say in words what each GPU of a machine holds when its memory is fullest."""
    shard = row.shard
    training = "activations unknown" if shard.training is None else f"activations and loss {shard.training / GB:.1f}"
    engines = f"engines {shard.resting / GB:.1f}, while they generate {shard.generation / GB:.1f}"
    engine_gpus = max(shard.tensor_parallel.values(), default=1)
    return (
        f"Each of {_name(row)}, in GB: weights {shard.weights / GB:.1f}, optimizer {shard.optimizer / GB:.1f}, "
        f"gradients {shard.gradients / GB:.1f}, {'copies of weights' if shard.gpus == 1 else 'gathered layers'} "
        f"{shard.gathered / GB:.1f}, {training}, {engines}"
        f"{f', each engine on {engine_gpus} GPUs' if engine_gpus > 1 else ''}."
    )


def _assumptions(config: Config, estimate: CostEstimate) -> list[str]:
    """List the smallest machine on which the run fits and the assumptions behind the numbers."""
    sentences = [fitting(estimate)]
    # Say this where the run is planned for several GPUs, or fits on no number of GPUs that was tried.
    if estimate.stated.shard.gpus > 1 or not any(estimate.fewest.values()):
        sentences[0] += " More than one GPU are ranks of torchrun, which have run on CPUs only (docs/distributed.md)."

    tokens, limit = config.batch.rollouts * estimate.response, config.sampling.max_new_tokens
    sentences.append(
        f"Assumed: responses of {estimate.response:,.0f} tokens in the mean, {tokens:,.0f} an iteration. This guess "
        f"from sampling.max_new_tokens ({limit:,}) decides the hours, which grow about in proportion; the metric "
        "response/tokens of a run has the true mean. On-policy: hours if the policy generates as many "
        "responses itself and takes one step on each batch, with as many evaluations."
    )

    sentences += _costs(config, estimate)
    prompts = estimate.prompts
    if prompts.assumed:
        sentences.append(
            f"Assumed: prompts of {prompts.mean:,.0f} tokens, at most {prompts.longest:,}. Why: {prompts.assumed}."
        )
    from_table = [path for path in dict.fromkeys(config.model_paths().values()) if is_from_table(load_config(path))]
    if from_table:
        sentences.append(f"Shapes of {', '.join(from_table)}: Jackpot's own table, because the hub cannot be reached.")
    return sentences


def fitting(estimate: CostEstimate) -> str:
    """Say on how many GPUs of each kind a run fits."""
    fewest = [f"{count}x{kind}" for kind, count in estimate.fewest.items() if count]
    return f"It fits on {' or '.join(fewest)}." if fewest else "It fits on none of the numbers of GPUs tried."


def unpriced(config: Config) -> list[str]:
    """Return a warning if the run's precision is slower than the bf16 peak that the hours assume; else nothing."""
    if config.precision != "int8":
        return []
    return [
        "These hours do not hold for precision int8: they count products at the GPU's bf16 peak, but training "
        "multiplies INT8 codes in float64 on a GPU (docs/precision.md)."
    ]


def _costs(config: Config, estimate: CostEstimate) -> list[str]:
    """Say what the run costs compared with a run of the policy alone: rollout FLOPs, all FLOPs, and hours.

    The list is empty if the run fits none of the machines that were tried.
    """
    # The first machine on which the run fits: the recipe's own, if it does.
    row = next((row for row in (estimate.stated, *estimate.rows) if row.hours), None)
    if row is None or row.hours is None or row.alone is None:
        return []

    hours, alone = row.hours, row.alone  # hours of the run, and of a run of the policy alone
    sentences = [
        f"On {_name(row)} evaluations, one every {config.evaluation.every} iterations, take "
        f"{hours.evaluating / hours.all:.0%} of the hours; all columns but rollout share count them."
    ]

    if not is_on_policy(config):
        sentences.append(
            f"Modelled cost beside the policy alone: {estimate.flops.rollouts:.0%} of its rollout FLOPs, "
            f"{estimate.flops.all:.0%} of all FLOPs (rollouts, training of every model, evaluations), "
            f"{hours.all / alone.all:.0%} of its hours ({hours.iterations / alone.iterations:.0%} without evaluations)."
        )

    if row.ahead:  # hours if the policy alone generates each batch while it trains on an earlier one
        sentences.append(
            f"Beside a policy alone that generates ahead, on the best split of these GPUs, with {HEAD_DRAFTS} drafts a "
            f"pass by a head of one layer ({HEAD_ACCEPTANCE:.0%} accepted) where they pay: "
            f"{hours.all / row.ahead.all:.0%} of its {_hours(row.ahead.all)} hours "
            f"({hours.iterations / row.ahead.iterations:.0%} without evaluations)."
        )

    return sentences


def show_tiny(console: Console, tiny: TinyRun) -> None:
    """Print every setting that `--tiny` replaces, and the source of the tiny run's problems."""
    title = (
        "--tiny: small models with random weights and few problems, to see that every part of the recipe runs here. "
        "Its numbers mean nothing. It changes"
    )
    rows = [(key, _text(before), _text(after)) for key, before, after in tiny.changes]
    show_table(console, title, ("setting", "recipe", "here"), rows)
    print_lines(console, tiny.data)


def _text(value: object) -> str:
    """Format the value of a setting for the table of `--tiny`."""
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return "null" if value is None else str(value)
