"""The commands that look at runs, rollouts and models, and train nothing. Layer 7: parse, call, show."""

import json
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from jackpot.console import show_diagnosis, show_report
from jackpot.console_mismatch import mismatch_progress, show_mismatch
from jackpot.console_replay import replay_progress, show_replay
from jackpot.console_tables import show_files, show_tables
from jackpot.errors import ConfigError
from jackpot.lab.diagnose import diagnose as diagnosis_of
from jackpot.lab.mismatch.run import measure_mismatch
from jackpot.lab.mismatch.sides import mismatch_config
from jackpot.lab.replay.formats import AUTO, FORMATS
from jackpot.lab.replay.numbers import as_numbers
from jackpot.lab.replay.replay import replay as replay_rollouts
from jackpot.lab.simulate.models import simulate_candidates, simulate_run
from jackpot.lab.simulate.pairs import PROMPTS
from jackpot.lab.simulate.simulation import simulate_families
from jackpot.recipes import parse_override, parse_overrides, resolve, split_names
from jackpot.report.build import watch as watch_runs
from jackpot.report.build import write_report
from jackpot.report.folder import plain, write_folder
from jackpot.report.mismatch import mismatch_sections
from jackpot.report.simulation import view_sections
from jackpot.report.simulation_pairs import pair_sections
from jackpot.report.tokens import MAX_TOKENS
from jackpot.telemetry import RunFolder, run_config


def folder_about(command: str, model: str) -> Path:
    """Where a command writes about a model, which may be a path, a hub name or starter:NAME, if nobody says."""
    return Path("runs") / f"{command}-{model.strip('/.').replace('/', '-').replace(':', '-')}"


def diagnose(
    run: Annotated[Path, typer.Argument(help="The folder of a run, finished or still going.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say whether a run is healthy, or what is wrong, since when, which metric says so and what to try.

    Exit code 0: healthy, or too early to say; 1: sick; 2: no run there.
    """
    config, folder = run_config(run), RunFolder(run)
    found = diagnosis_of(folder.read("metrics.jsonl"), folder.read("events.jsonl"), config)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
    else:
        show_diagnosis(Console(), found)
    if found.verdict == "sick":
        raise typer.Exit(1)


def replay(
    path: Annotated[Path, typer.Argument(help="The folder of a run, or a file or folder of saved rollouts.")],
    form: Annotated[str, typer.Option("--format", help=f"{', '.join([AUTO, *FORMATS])}.")] = AUTO,
    model: Annotated[
        str | None,
        typer.Option(help="Scores the policy's log-probs, where the file lacks them: a model, or the folder of a run."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=1e-6, help="Of the sampling, with --model; default the run's, or 1.")
    ] = None,
    corrections: Annotated[str, typer.Option(help="Names, with commas between them; default all.")] = "",
    every: Annotated[int, typer.Option(min=1, help="Of so many responses of a file replay one.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Put saved rollouts through every correction, without training, and say which one to use on this run.

    Rollouts of verl, TRL, OpenRLHF and slime are read too, and bare JSONL: docs/replay.md.

    --model is not yet run on a GPU.
    """
    console = Console(stderr=as_json)
    with replay_progress(console) as listen:
        found = replay_rollouts(path, form, split_names(corrections), model, temperature, every, listen)
    if as_json:
        typer.echo(json.dumps(plain(as_numbers(found)), indent=2, allow_nan=False))
    else:
        show_replay(console, found)


def mismatch(
    model: Annotated[
        str, typer.Argument(help="A folder, a hub name, starter:NAME, or the folder of a run: its engine, its policy.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings as key=value, e.g. sampling.temperature=0.6.")
    ] = None,
    sampler: Annotated[
        list[str] | None, typer.Option(help="What writes: name=vllm,dtype=bf16; again for each further one.")
    ] = None,
    learner: Annotated[
        list[str] | None, typer.Option(help="What reads: dtype=bf16,attention=eager,path=OTHER; again for more.")
    ] = None,
    benchmarks: Annotated[str, typer.Option(help="Sets of prompts as in jackpot eval; default made-up sums.")] = "",
    responses: Annotated[int | None, typer.Option(min=1, help="That each sampler writes; default 256.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Of a response; default 256.")] = None,
    short: Annotated[
        int | None, typer.Option(min=2, help="Also so many responses of a so much lower limit, to compare with.")
    ] = None,
    reread: Annotated[bool, typer.Option("--reread", help="Samplers too are measured by reading.")] = False,
    seed: Annotated[int | None, typer.Option(min=0, help="Of everything that is drawn; default 0.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder; default runs/mismatch-MODEL.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON alone.")] = False,
) -> None:
    """Measure how far two descriptions of a model are apart: engine, dtype, attention, quantisation, weights.

    Samplers write responses, learners read them: |p - q| of every response, KL, ratios, by length, position and
    entropy. docs/mismatch.md says what each number means.

    Not yet run on a GPU, nor with tensor-parallel engines.
    """
    console = Console(stderr=as_json)
    given = {"responses": responses, "short": short, "reread": reread or None, "seed": seed}
    given |= {"benchmarks": split_names(benchmarks) or None, "sampling": {"max_new_tokens": max_new_tokens}}
    if max_new_tokens is None:
        del given["sampling"]
    changes = [{key: value} for key, value in given.items() if value is not None]
    sides = [[parse_overrides(text) for text in texts or []] for texts in (sampler, learner)]
    config = mismatch_config(model, *sides, [*changes, *map(parse_override, overrides or [])])
    with mismatch_progress(console) as listen:
        found = measure_mismatch(config, listen)
    folder = out or folder_about("mismatch", model)
    sections = mismatch_sections(found)
    files = write_folder(folder, "mismatch", f"jackpot mismatch {model}", sections, asdict(found))
    if as_json:
        typer.echo(files[-1].read_text(), nl=False)
        return
    show_mismatch(console, found, sections)
    show_files(console, files)


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold some.")],
    out: Annotated[
        Path | None, typer.Option(help="The file; default report.html in or beside the run folders.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=0, help="Saved tokens in the page.")] = MAX_TOKENS,
    watch: Annotated[bool, typer.Option("--watch", help="Write it again while a run goes on; Ctrl-C ends.")] = False,
    every: Annotated[float, typer.Option(min=1.0, help="With --watch: seconds between two looks.")] = 10.0,
) -> None:
    """Write one HTML file about runs, finished or going on: every metric with arms overlaid, and every saved token."""
    tell = partial(show_report, Console())
    if not watch:
        tell(write_report(runs, out, max_tokens))
        return
    with suppress(KeyboardInterrupt):
        watch_runs(runs, out, max_tokens, every, tell)


def simulate(
    recipe: Annotated[
        str | None, typer.Argument(help="A recipe, whose two models are measured; none: made-up distributions.")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings as key=value.")] = None,
    arm: Annotated[str | None, typer.Option(help="One of the recipe's arms.")] = None,
    rollout_model: Annotated[
        list[str] | None,
        typer.Option(help="A candidate in place of rollout_model.path; give it again for each further one."),
    ] = None,
    run: Annotated[Path | None, typer.Option(help="A run in place of a recipe: measured at every checkpoint.")] = None,
    prompts: Annotated[
        int, typer.Option(min=1, help="Held-out prompts that each real rollout model answers.")
    ] = PROMPTS,
    seed: Annotated[int, typer.Option(min=0, help="Of everything that is drawn.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Default runs/simulate, runs/simulate-RECIPE-ARM, RUN/simulate.")
    ] = None,
) -> None:
    """Show what OBRS does to a gap between two models, without training.

    Three views of the paper's Figure 2, both theorems, Z from the top k, and, of real models, how far apart they are:
    that is how to choose a rollout model.
    """
    if run and (recipe or rollout_model or arm):
        raise ConfigError("--run measures the models of a run; leave out the recipe, its arm and --rollout-model")
    if not recipe and (rollout_model or arm):
        raise ConfigError("--rollout-model and --arm need a recipe, whose policy and task are taken")
    console = Console()
    if recipe or run:
        with console.status("measuring both models"):
            if run:
                found = simulate_run(run, prompts, seed)
            else:
                found = simulate_candidates(resolve(recipe, arm, overrides or []), rollout_model or [], prompts, seed)
        sections = pair_sections(found)
    else:
        with console.status("simulating"):
            found = simulate_families(seed)
        sections = view_sections(found)
    name = "-".join(filter(None, ["simulate", recipe and Path(recipe).stem, arm]))
    folder = out or (run / "simulate" if run else Path("runs") / name)
    title = " ".join(filter(None, ["jackpot simulate", recipe, arm, run and str(run)]))
    files = write_folder(folder, "simulate", title, sections, asdict(found))
    show_tables(console, sections.values())
    show_files(console, files)
