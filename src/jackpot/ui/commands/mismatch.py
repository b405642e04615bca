"""Implements `jackpot mismatch`, which measures how far samplers and learners of one model are apart."""

from dataclasses import asdict
from pathlib import Path
from shlex import quote
from typing import Annotated

import typer
from rich.console import Console

from jackpot.ui.arguments import Overrides, ShowAll
from jackpot.ui.lazy import lazy
from jackpot.ui.terminal.output import show_answer
from jackpot.ui.terminal.progress import status

with lazy():
    from jackpot.analysis.mismatch import mismatch as measuring
    from jackpot.analysis.mismatch import sides
    from jackpot.config import recipes
    from jackpot.ui import results
    from jackpot.ui.views import mismatch as views


def mismatch(
    model: Annotated[
        str,
        typer.Argument(
            help="A model folder, a hub name, starter:NAME, or a run folder, whose engine and policy are taken."
        ),
    ],
    overrides: Overrides = None,
    sampler: Annotated[
        list[str] | None,
        typer.Option(help="Settings of the engine that generates: name=vllm,dtype=bf16; repeat it for more samplers."),
    ] = None,
    learner: Annotated[
        list[str] | None,
        typer.Option(
            help="Settings of the model that scores the responses: dtype=bf16,attn_implementation=eager,path=OTHER; "
            "repeat it for more learners."
        ),
    ] = None,
    benchmarks: Annotated[
        str, typer.Option(help="Prompts by the names of jackpot eval, separated by commas; default arithmetic.")
    ] = "",
    responses: Annotated[
        int | None, typer.Option(min=1, help="Responses that each sampler generates; default 256.")
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of a response; default 256.")] = None,
    reread: Annotated[
        bool, typer.Option("--reread", help="Score the samplers' probabilities by a forward pass, as learners do.")
    ] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of all random draws; default 0.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder; default runs/mismatch-MODEL.")] = None,
    show_all: ShowAll = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print only JSON.")] = False,
) -> None:
    """Measure how far two ways to compute a model are apart: engine, dtype, attention, quantization, weights.

    Samplers generate responses and learners score them: |p - q| of every response, KL, ratios, by length, position and
    entropy. docs/mismatch.md explains each number.

    Status: supported. Not yet run on a GPU, nor with tensor-parallel engines.
    """
    console = Console(stderr=as_json)
    options = {
        "responses": responses,
        "reread": reread or None,
        "seed": seed,
        "sampling": None if max_new_tokens is None else {"max_new_tokens": max_new_tokens},
        "benchmarks": recipes.split_names(benchmarks) or None,
    }
    changes = [{key: value} for key, value in options.items() if value is not None]
    changes += map(recipes.parse_override, overrides or [])
    samplers = list(map(recipes.parse_overrides, sampler or []))
    learners = list(map(recipes.parse_overrides, learner or []))

    with status(console, "starting") as listen:
        config = sides.mismatch_config(model, samplers=samplers, learners=learners, changes=changes)
        result = measuring.measure_mismatch(config, listen)

    folder = out or results.default_folder("mismatch", model)
    sections = views.mismatch_sections(result)
    files = results.write_results(folder, "mismatch", f"jackpot mismatch {model}", sections, asdict(result))
    if as_json:
        typer.echo(files[-1].read_text(), nl=False)  # the page is the first file, the JSON the last
        return

    is_run = (Path(model) / "config.yaml").is_file()
    commands = {f"jackpot replay {quote(model)}": "what the run's mismatch does to training"} if is_run else {}
    show_answer(console, views.verdicts(result), sections.values(), show_all, files, commands)
