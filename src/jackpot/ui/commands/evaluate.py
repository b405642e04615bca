"""Implements `jackpot eval`, which measures one model on benchmarks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console

from jackpot.core.statistics import CONFIDENCE, Interval
from jackpot.rollout.tasks.benchmarks import SETS
from jackpot.ui.arguments import Overrides
from jackpot.ui.lazy import lazy
from jackpot.ui.terminal.output import print_line, print_lines, show_next, show_table
from jackpot.ui.terminal.progress import progress

with lazy():
    from jackpot.analysis.evaluate import evaluate as evaluating
    from jackpot.config import recipes
    from jackpot.rollout import pass_at_k
    from jackpot.ui import results as saving


def evaluate(
    model: Annotated[
        str,
        typer.Argument(help="A model folder, a hub name, starter:NAME, or a run folder, whose best policy is taken."),
    ],
    overrides: Overrides = None,
    benchmarks: Annotated[
        str,
        typer.Option(help=f"Separated by commas: {', '.join(SETS)}, own (the held-out problems of a run), or files."),
    ] = "",
    k: Annotated[int | None, typer.Option(min=1, help="Sampled answers to each problem; default 1.")] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="transformers (default); vllm, vllm_server or sglang_server, which are experimental."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of all answers; default runs/eval-MODEL.")] = None,
) -> None:
    """Measure a model on benchmarks: mean@k, pass@k with intervals, truncation, and every answer as parquet.

    The same command continues after Ctrl-C or a kill; no answer is generated twice. More benchmarks can be added to
    the folder later.

    Status: supported. Not yet run on a GPU.
    """
    console = Console()
    options = {"benchmarks": recipes.split_names(benchmarks), "k": k, "engine": engine}
    changes = [{key: value} for key, value in options.items() if value]
    config = evaluating.evaluation_config(model, [*changes, *map(recipes.parse_override, overrides or [])])
    folder = out or saving.default_folder("eval", model)

    try:
        with _listener(console) as listen:
            results = evaluating.evaluate_model(config, folder, listen)
    except KeyboardInterrupt:
        print_line(console, "Stopped; the same command goes on from here.")
        raise typer.Exit(130) from None

    show_results(console, results, folder, config.sampling.described)
    if results[0].summary.k == 1:
        # Show the command that was typed, with k=16 and another folder.
        typed = [model, *(text for text in overrides or [] if not text.startswith("k="))]
        typed += ["--benchmarks", benchmarks] if benchmarks else []
        typed += ["--engine", engine] if engine else []
        command = " ".join(map(quote, ["jackpot", "eval", *typed, "--k", "16", "--out", f"{folder}-k16"]))
        show_next(console, {command: "pass@k, from more answers to each problem"})


@contextmanager
def _listener(console: Console) -> Iterator["evaluating.ProgressListener"]:
    """Yield a listener that shows the answers, the speed and the remaining time of each benchmark.

    It shows no accuracy, which would be that of short answers alone: they end first.
    """
    with progress(console) as counts:

        def listen(news: "evaluating.EvaluationProgress") -> None:
            """Show how many answers to a benchmark are complete, and the speed; `fresh` ones are of this process."""
            counts.update(
                news.benchmark,
                news.done,
                news.total,
                {"tokens/s": f"{news.tokens / news.seconds:,.0f}"},
                noun=" answers",
                start=news.done - news.fresh,  # answers of earlier processes, which say nothing about the speed
                is_due=news.done == news.total,
            )

        yield listen


def show_results(
    console: Console, results: Sequence["evaluating.BenchmarkResult"], folder: Path, sampling: str
) -> None:
    """Print a row of results for each benchmark, how many answers failed and why, and the folder of all answers.

    The rows have mean rewards too, if some benchmark cannot say which answers are right.
    """
    if all(result.was_done for result in results):
        print_line(console, "This evaluation was finished before; nothing was generated.")

    k = results[0].summary.k  # equal for all benchmarks
    shows_rewards = any(result.summary.mean_at_k is None for result in results)
    rows = []
    for result in results:
        summary = result.summary
        row = {"benchmark": result.benchmark, "problems": f"{summary.problems:,}"}
        row[f"mean@{k}"] = _percent(summary.mean_at_k)
        if k > 1:
            row[f"pass@{k}"] = _percent(summary.pass_at_k.get(k))
        if shows_rewards:
            row["mean reward"] = f"{summary.reward:.4g}"
        rows.append(row | {"truncated": f"{100 * summary.truncated:.1f}", "tokens": f"{summary.tokens:,.0f}"})

    title = f"{k} {'answer' if k == 1 else 'answers'} to each problem, {sampling}, percent"
    columns = list(rows[0])
    show_table(console, title, columns, [tuple(row.values()) for row in rows], numbers=columns[1:], box=SIMPLE_HEAD)

    for result in results:
        print_lines(console, _sentences(result.summary), f"{result.benchmark}: ")
    print_line(console, f"In brackets: {100 * CONFIDENCE:g} % confidence intervals. All answers: {folder}")


def _percent(estimate: Interval | None) -> str:
    """Format a share in percent, with its interval if it has one; a missing share becomes `-`."""
    if estimate is None:
        return "-"
    percent = f"{100 * estimate.value:.1f}"
    if estimate.low is None or estimate.high is None:
        return percent
    return f"{percent} ({100 * estimate.low:.1f}-{100 * estimate.high:.1f})"


def _sentences(summary: "pass_at_k.EvaluationSummary") -> Iterator[str]:
    """Yield a sentence with pass@k for every k, and one for each kind of failure that makes answers count as wrong."""
    # Up to k = 2 the table of results shows every pass@k: mean@k is pass@1.
    if summary.k > 2 and summary.pass_at_k:
        yield ", ".join(f"pass@{k} {100 * estimate.value:.1f}" for k, estimate in summary.pass_at_k.items())

    answers = summary.problems * summary.k
    failures = {
        "were aborted by the engine": summary.aborted,
        "could not be scored in time": summary.reward_timeouts,
        "crashed the verifier": summary.reward_crashes,
    }
    for failure, share in failures.items():
        if share:
            yield f"{round(share * answers):,} of {answers:,} answers {failure}; they count as wrong"
