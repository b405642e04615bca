"""Implements `jackpot mismatch`, which measures how far samplers and learners of one model are apart."""

from dataclasses import asdict
from pathlib import Path
from shlex import quote

import typer
from rich.console import Console

from jackpot.analysis.mismatch.run import measure_mismatch
from jackpot.analysis.mismatch.sides import mismatch_config
from jackpot.config.recipes import parse_override, parse_overrides, split_names
from jackpot.ui.results import default_folder, write_results
from jackpot.ui.terminal.answer import show_answer
from jackpot.ui.terminal.progress import status
from jackpot.ui.views.mismatch import mismatch_sections


def mismatch(
    model: str,
    overrides: list[str] | None,
    sampler: list[str] | None,
    learner: list[str] | None,
    benchmarks: str,
    responses: int | None,
    max_new_tokens: int | None,
    short: int | None,
    reread: bool,
    seed: int | None,
    out: Path | None,
    show_all: bool,
    as_json: bool,
) -> None:
    """Measure every pair of a sampler and a learner; write the results and print their tables, or JSON."""
    console = Console(stderr=as_json)
    given = {"responses": responses, "short": short, "reread": reread or None, "seed": seed}
    given |= {"benchmarks": split_names(benchmarks) or None, "sampling": {"max_new_tokens": max_new_tokens}}
    if max_new_tokens is None:
        del given["sampling"]
    changes = [{key: value} for key, value in given.items() if value is not None]
    sides = [[parse_overrides(text) for text in texts or []] for texts in (sampler, learner)]
    config = mismatch_config(model, *sides, [*changes, *map(parse_override, overrides or [])])
    with status(console, "starting") as listen:
        found = measure_mismatch(config, listen)
    folder = out or default_folder("mismatch", model)
    sections = mismatch_sections(found)
    files = write_results(folder, "mismatch", f"jackpot mismatch {model}", sections, asdict(found))
    if as_json:
        typer.echo(files[-1].read_text(), nl=False)
        return
    several = len(found.pairs) > 1
    verdicts = [f"{pair.sampler} | {pair.learner}: " * several + pair.verdict for pair in found.pairs]
    is_run = (Path(model) / "config.yaml").is_file()
    commands = {f"jackpot replay {quote(model)}": "what the run's mismatch does to training"} if is_run else {}
    show_answer(console, verdicts, sections.values(), show_all, files, commands)
