"""What a person sees: the plan, live progress, the table at the end."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from jackpot.analysis.diagnose.diagnose import Diagnosis, Finding
from jackpot.analysis.evaluate.sample import Answer
from jackpot.analysis.plan.memory import Memory
from jackpot.analysis.plan.sizes import Size
from jackpot.config.engines import EngineConfig, VLLMServerEngineConfig
from jackpot.config.run import Config
from jackpot.core.types import Prompt, Role
from jackpot.training.trainer import MetricsLine, OnMetrics
from jackpot.ui.report.report import Report

_SHOWN = {  # column: metric and its format
    "reward": ("reward/mean", "{:.3f}"),
    "policy": ("eval/policy_accuracy", "{:.1%}"),
    "rollout model": ("eval/rollout_model_accuracy", "{:.1%}"),
    "acceptance": ("obrs/acceptance", "{:.3f}"),
    "KL": ("mismatch/kl_rollout_policy", "{:.4f}"),
    "tokens/s": ("speed/tokens_per_second", "{:,.0f}"),
}


@contextmanager
def live_progress(console: Console, config: Config) -> Iterator[OnMetrics]:
    """A listener that shows iteration, the numbers above and the time left: a live line in a terminal, else plain
    lines."""
    if not console.is_terminal:
        yield _PlainProgress(console, config.iterations)
        return
    bar = Progress(
        TextColumn("iteration {task.completed}/{task.total}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
        console=console,
    )
    task = bar.add_task("train", total=config.iterations)
    latest: MetricsLine = {}

    def listen(line: MetricsLine) -> None:
        latest.update({key: value for key, value in line.items() if value is not None})
        bar.update(task, completed=line["iteration"])
        live.update(_frame(bar, latest))

    with Live(_frame(bar, latest), console=console, refresh_per_second=4) as live:
        yield listen


def _frame(bar: Progress, latest: MetricsLine) -> Table:
    numbers = Table.grid(padding=(0, 2))
    numbers.add_row(*(f"[dim]{name}[/] {_format(latest, *shown)}" for name, shown in _SHOWN.items()))
    frame = Table.grid()
    frame.add_row(bar)
    frame.add_row(numbers)
    return frame


class _PlainProgress:
    """One line now and then, for logs: at most one every five seconds, and every evaluation."""

    def __init__(self, console: Console, iterations: int) -> None:
        self._console, self._iterations = console, iterations
        self._started, self._last, self._first_iteration = time.monotonic(), 0.0, None

    def __call__(self, line: MetricsLine) -> None:
        now, done = time.monotonic(), line["iteration"]
        self._first_iteration = done if self._first_iteration is None else self._first_iteration
        if now - self._last < 5.0 and "eval/policy_accuracy" not in line:
            return
        self._last = now
        fresh = done - self._first_iteration
        left = f"{(now - self._started) / fresh * (self._iterations - done):.0f} s left" if fresh else ""
        numbers = "  ".join(f"{name} {_format(line, *shown)}" for name, shown in _SHOWN.items() if shown[0] in line)
        self._console.print(f"iteration {done}/{self._iterations}  {numbers}  {left}", highlight=False, soft_wrap=True)


def _format(line: Mapping[str, Any], metric: str, form: str) -> str:
    value = line.get(metric)
    return "-" if value is None else form.format(value)


def show_result(console: Console, config: Config, lines: Sequence[MetricsLine], folder: Path, finished: bool) -> None:
    """Accuracy of both models before and after, and where everything is."""
    evaluated = [line for line in lines if line.get("eval/policy_accuracy") is not None]
    table = Table(title=f"Sampled accuracy on {config.evaluation.problems} held-out problems")
    for column in ("model", "before", f"after {evaluated[-1]['iteration']} iterations", "change"):
        table.add_column(column, justify="left" if column == "model" else "right")
    roles = ["policy"] if config.rollout_model is None else ["policy", "rollout_model"]
    shown = {role.replace("_", " "): f"eval/{role}_accuracy" for role in roles}
    shown |= {f"policy on {name}": f"eval/{name}/mean_at_k" for name in config.evaluation.benchmarks}
    for name, metric in shown.items():
        before, after = evaluated[0][metric], evaluated[-1][metric]
        table.add_row(name, f"{before:.1%}", f"{after:.1%}", f"{100 * (after - before):+.1f} points")
    console.print(table)
    console.print(f"Run folder: {folder}", soft_wrap=True)
    if not finished:
        console.print("Stopped before the end; the same command continues.", soft_wrap=True)


def show_answers(console: Console, problems: Sequence[tuple[Prompt, Sequence[Answer]]]) -> None:
    """A table for every problem: who answered what, before and after."""
    for prompt, answers in problems:
        title = Text(f"{prompt.text} (answer: {prompt.answer})")
        table = Table(title=title, title_justify="left", min_width=60)
        for column in ("model", "training", "response", ""):
            table.add_column(column)
        for answer in answers:
            verdict = "[green]right[/]" if answer.correct else "[red]wrong[/]"
            when = "after" if answer.after else "before"
            table.add_row(answer.role.replace("_", " "), when, Text(answer.response), verdict)
        console.print(table)


def show_report(console: Console, report: Report) -> None:
    """Where the page is, how large, and what it lacks."""
    size = report.path.stat().st_size / 2**20
    going = f", {len(report.unfinished)} of them not finished" if report.unfinished else ""
    runs = "1 run" if report.runs == 1 else f"{report.runs} runs"
    console.print(f"Wrote {report.path} ({size:.1f} MiB): {runs}{going}", soft_wrap=True, highlight=False, markup=False)
    for sentence in report.unreadable:
        console.print(sentence, soft_wrap=True, highlight=False, markup=False)


def show_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    """The summary, and a table of the findings if there are any."""
    console.print(Text(diagnosis.summary), highlight=False)
    if not diagnosis.findings:
        return
    table = Table(title="Causes before their symptoms", title_justify="left")
    for column in ("metric", "since", "then", "now", "limit"):
        table.add_column(column, justify="left" if column in ("metric", "limit") else "right", overflow="fold")
    for finding in diagnosis.findings:
        numbers = (str(finding.since), f"{finding.then:.3g}", f"{finding.now:.3g}", _limit(finding))
        table.add_row(*map(Text, (finding.metric, *numbers)))
    console.print(table)
    for finding in diagnosis.findings:
        console.print(Text(f"{finding.metric}: {finding.means}. Try: {finding.tries}."), highlight=False)


def _limit(finding: Finding) -> str:
    return f"{'at most' if finding.side == 'above' else 'at least'} {finding.limit:.3g}"


@contextmanager
def starter_progress(console: Console) -> Iterator[Callable[[str, int, int, float], None]]:
    """A callback for `make_starters` that shows one bar for each starter."""
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), console=console) as bar:
        tasks: dict[str, TaskID] = {}

        def show(name: str, done: int, total: int, loss: float) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=done, description=f"{name}  loss {loss:.3f} nats/token")

        yield show


def show_plan(
    console: Console, config: Config, sizes: Mapping[Role, Size], memory: Memory | None, folder: Path
) -> None:
    """What a run would do; what it needs of GPUs has a table of its own, and then there is no `memory` here."""
    batch = config.batch
    correction = config.objective.correction
    rows = {
        "policy": f"{config.policy.path}, {sizes['policy'].parameters:,} parameters",
        "rollout model": "the policy itself"
        if config.rollout_model is None
        else f"{config.rollout_model.path}, {sizes['rollout_model'].parameters:,} parameters"
        + ("" if config.rollout_model.optimizer else ", frozen"),
        "trained": _trained(config, sizes),
        **({"memory": _memory(memory)} if memory else {}),
        "iterations": f"{config.iterations}",
        "rollout batch": f"{batch.prompts} prompts x {batch.group_size} = {batch.rollouts} sequences",
        "optimizer steps": f"{batch.steps_per_iteration} per rollout batch (its staleness), "
        f"{config.iterations * batch.steps_per_iteration} in all",
        "response tokens": f"at most {batch.rollouts * config.sampling.max_new_tokens:,} per iteration",
        "correction": ", ".join(
            [correction.name, *(f"{key} {value}" for key, value in correction.model_dump().items() if key != "name")]
        ),
        "objective": _objective(config),
        "engine": _engine(config),
        "evaluation": _evaluation(config),
        "run folder": str(folder),
    }
    table = Table(title="The plan (nothing was run)", show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)


def _memory(memory: Memory) -> str:
    """The peak and what it is made of."""
    parts = ", ".join(f"{name} {_size_of(getattr(memory, name) or 0)}" for name in Memory.__slots__)
    if memory.training is None:
        return f"more than {_size_of(memory.peak)}: {parts}; its activations depend on values and are not known"
    return f"{_size_of(memory.peak)} at the peak, with all responses of full length: {parts}"


def _size_of(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def _engine(config: Config) -> str:
    """Who writes, in which precision, and who else answers for the policy in evaluations."""
    settings, other = config.engine, config.evaluation.engine
    parts = [f"{_numbers(settings)}, training in {config.precision}"]
    if isinstance(settings, VLLMServerEngineConfig):
        parts.append(f"servers {', '.join(settings.urls)}")
    if config.batch.ahead:
        parts.append("writing one rollout batch ahead")
    if other:
        parts.append(f"evaluation of the policy with {_numbers(other)}")
    return "; ".join(parts)


def _numbers(engine: EngineConfig) -> str:
    """An engine, and what it computes with."""
    settings, parts = engine.model_dump(), [f"{engine.name} in {engine.dtype}"]
    if settings.get("quantization"):
        parts.append(f"linear layers {engine.quantization}")
    if settings.get("kv_cache_dtype"):
        parts.append(f"keys and values {engine.kv_cache_dtype}")
    if settings.get("attn_implementation") == "eager":
        parts.append("eager attention")
    return ", ".join(parts)


def _evaluation(config: Config) -> str:
    """Which problems, how many answers to each, how often."""
    settings = config.evaluation
    sets = ", ".join([f"{settings.problems} problems of the task", *settings.benchmarks])
    answers = f", {settings.k} answers to each" if settings.k > 1 else ""
    return f"{sets}{answers}, every {settings.every} iterations"


def _objective(config: Config) -> str:
    """Advantage and aggregate, and what else pulls on the policy."""
    objective = config.objective
    parts = [f"advantage {objective.advantage}", f"{objective.loss_agg_mode} over {objective.count} tokens"]
    if config.critic:
        parts.append(f"critic from {config.critic.path or config.policy.path}")
    if objective.reference:
        path, weight = objective.reference.path or config.policy.path, objective.reference.kl_loss_coef
        parts.append(f"{weight:g} x KL to {path} ({objective.reference.kl_loss_type})")
    if objective.entropy_coeff:
        parts.append(f"{objective.entropy_coeff:g} x entropy")
    if objective.overlong_buffer:
        parts.append(
            f"up to -{objective.overlong_buffer.penalty_factor:g} for the last {objective.overlong_buffer.len} tokens"
        )
    if config.batch.filter_groups:
        parts.append(f"dynamic sampling, at most {config.batch.filter_groups.max_num_gen_batches} rounds")
    return "; ".join(parts)


def _trained(config: Config, sizes: Mapping[Role, Size]) -> str:
    """How many parameters of each model learn."""
    adapters = {role: getattr(getattr(config, role), "lora", None) for role in sizes}
    counts = [
        f"{role.replace('_', ' ')} {size.trained:,}"
        + (f" (LoRA of rank {adapters[role].rank})" if adapters[role] else "")
        for role, size in sizes.items()
    ]
    return f"{', '.join(counts)} parameters"
