"""Declares every command of the command line with its arguments, options and help texts.

The code of a command is in `jackpot.ui.commands.NAME`, which is imported when the command is called. So `--help`, a
typo and commands that compute nothing start without torch and transformers.
"""

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from jackpot.config.build import similar_settings
from jackpot.config.recipes import recipe_names, resolve
from jackpot.config.run import Config
from jackpot.core.errors import ConfigError, JackpotError, unknown_name
from jackpot.core.package import version
from jackpot.core.place import place
from jackpot.rollout.tasks.benchmarks import SETS
from jackpot.ui.command_page import commands_page
from jackpot.ui.terminal.progress import print_line, status
from jackpot.ui.terminal.text import PrintableFormatter, plain

# click's class; typer has a copy of click of its own since 0.24
NoSuchOption = import_module(typer.BadParameter.__module__).NoSuchOption


class Command(TyperCommand):
    """Words the mistakes of those who know other tools: settings written as options, and things said twice."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """Parse what was typed behind the command's name.

        Raises:
            ConfigError: an unknown option, or one that was given twice.
        """
        given = list(args)  # parsing empties `args`
        try:
            _, _, order = self.make_parser(ctx).parse_args(list(args))
        except NoSuchOption as error:
            raise ConfigError(self._unknown_option(ctx, error, given)) from None
        single = [one.opts[-1] for one in order if one.param_type_name == "option" and not one.multiple]
        rest = super().parse_args(ctx, args)
        if twice := _repeated(single):
            raise ConfigError(f"{' and '.join(twice)} was given twice; give it once")
        if twice := _repeated([text.partition("=")[0] for text in ctx.params.get("overrides") or []]):
            print_line(Console(stderr=True), f"{' and '.join(twice)} was given twice; the last one counts")
        return rest

    def _unknown_option(self, ctx: typer.Context, error: NoSuchOption, given: Sequence[str]) -> str:
        """Say how the setting of this name is written, or name the options that are like it."""
        name = error.option_name.lstrip("-").replace("-", "_")
        settings = similar_settings(name, Config) if any(one.name == "overrides" for one in self.params) else []
        like = [option for option in error.possibilities or [] if option != "--help"]
        if settings and not any(option.lstrip("-").startswith(name) for option in like):
            value = _value_of(error.option_name, given)
            forms = " or ".join(f"{key}={value}" for key in settings)
            return f"no option {error.option_name}; settings are written key=value: {forms}"
        guess = f"; did you mean {' or '.join(like)}?" if like else ";"
        return f"no option {error.option_name}{guess} jackpot {ctx.info_name} --help lists all"


def _repeated(names: Sequence[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if names.count(name) > 1]


def _value_of(option: str, given: Sequence[str]) -> str:
    """Return the value that was typed for an option; VALUE where there is none."""
    for text, following in zip(given, [*given[1:], "--"], strict=True):
        if text.startswith(f"{option}="):
            return text.partition("=")[2]
        if text == option and not following.startswith("--"):
            return following
    return "VALUE"


class Commands(TyperGroup):
    """Reports an unknown command with the nearest name and a list of all commands."""

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        if found is None and not ctx.resilient_parsing:
            raise ConfigError(unknown_name("command", cmd_name, self.list_commands(ctx)))
        return found


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    help="Train a large language model by reinforcement learning on the rollouts of a smaller, cheaper model.",
)


def command(name: str | None = None, on_ranks: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a command. The decorated function declares its options and help text.

    Its body, where it has one, refuses options that do not fit each other.

    Calling the command imports `jackpot.ui.commands.FUNCTION` and calls the function of the same name there.

    Args:
        name: what the user types, where that is not the function's name.
        on_ranks: several processes that torchrun started may run the command together.
    """

    def register(declaration: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(declaration)
        def call(**options: Any) -> None:
            function = declaration.__name__
            if not on_ranks and (ranks := place().size) > 1:
                raise ConfigError(f"torchrun started {ranks} processes; {name or function} runs in one, without it")
            if options.get("recipe") and "arm" in options:  # a mistake is reported before torch is imported
                resolve(options["recipe"], options["arm"], options["overrides"] or [])
            declaration(**options)
            with status(Console(stderr=True), f"loading jackpot {name or function}"):  # torch alone takes seconds
                module = import_module(f"jackpot.ui.commands.{function}")
            getattr(module, function)(**options)

        paragraphs = (declaration.__doc__ or "").split("\n\n")
        text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)  # as wide as the terminal
        return app.command(name, cls=Command, help=text)(call)

    return register


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"jackpot {version()}")
        raise typer.Exit


def _print_page(is_asked: bool) -> None:
    if is_asked:
        typer.echo(commands_page(app), nl=False)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", callback=_print_page, is_eager=True, help="Print docs/commands.md and exit.")
    ] = False,
) -> None:
    """Declare the options that stand before the command's name."""


def _complete_recipe(incomplete: str) -> list[str]:
    return [name for name in recipe_names() if name.startswith(incomplete)]


Recipe = Annotated[
    str,
    typer.Argument(
        help=f"Name of a recipe ({', '.join(recipe_names())}) or path of a .yaml file.",
        autocompletion=_complete_recipe,
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings as key=value, for example sampling.temperature=0.6.")
]
ShowAll = Annotated[bool, typer.Option("--all", help="Print all tables, not only the main one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@command(on_ranks=True)
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    arm: Annotated[str | None, typer.Option(help="Arm of the recipe; default none of them.")] = None,
    run: Annotated[Path | None, typer.Option(help="Run folder; default runs/RECIPE-ARM-OVERRIDES-seedN.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan, which is experimental, and train nothing.")
    ] = False,
    tiny: Annotated[
        bool,
        typer.Option(
            "--tiny",
            help="Run 2 iterations with small random models of the same architecture, without GPU or downloads, and "
            "print each setting that this replaces. key=value changes the recipe first.",
        ),
    ] = False,
) -> None:
    """Train a recipe, or continue the run in its folder from the newest intact checkpoint.

    Ctrl-C, SIGTERM or a closed terminal stops after the current iteration and saves a checkpoint; a second signal stops
    at once. A kill costs at most the iterations since the last checkpoint. Settings that decide no number computed
    before, such as iterations, may change when a run continues: `jackpot config KEY` says so.

    For example `jackpot train quickstart iterations=20 seed=3 objective.correction=tis`; `jackpot config` explains the
    settings, and `jackpot recipes` lists the recipes.

    `torchrun --nproc-per-node N -m jackpot train RECIPE` trains with N processes: docs/distributed.md.

    Status: supported. On CPUs alone: nothing has run on a GPU yet. docs/index.md says what of it is experimental.
    """


@command()
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    arm: Annotated[str | None, typer.Option(help="Arm of the recipe; default none of them.")] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Number of GPUs; default those that the recipe names, or 8.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="A6000, A100, H100 or H200; default what the recipe names, or H100.")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(help="Run folder whose responses give the mean length, and its drafts their acceptance."),
    ] = None,
    response_length: Annotated[
        float | None, typer.Option(help="Mean length of responses in tokens, in place of --run.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare placements on a number of GPUs: how many generate, how many train, and which is cheapest.

    Counts the hours of every placement that fits the memory, with several values of batch.ahead, by the arithmetic of
    --dry-run (docs/cost.md). Nothing is loaded or run.

    Status: experimental. Its hours were never compared with a run of ours on GPUs.
    """
    if (run is None) == (response_length is None):
        raise ConfigError(
            "the plan needs the mean length of responses, which decides its numbers; give one of --run FOLDER, whose "
            "metrics have it, and --response-length TOKENS. jackpot train RECIPE --dry-run guesses it from "
            "sampling.max_new_tokens"
        )


@command()
def launch(
    recipe: Recipe,
    overrides: Overrides = None,
    arm: Annotated[str | None, typer.Option(help="Arm of the recipe; default none of them.")] = None,
    run: Annotated[
        Path | None, typer.Option(help="Run folder, on a disk that all nodes see; default that of jackpot train.")
    ] = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Print a batch script for SLURM's sbatch.")] = False,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes that train.")] = 1,
    servers: Annotated[
        int, typer.Option(min=0, help="Further nodes, with a vLLM server on each GPU, which generate the rollouts.")
    ] = 0,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of each node; 0: CPUs only.")] = 8,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks on each node that trains; default one for each GPU.")
    ] = None,
    time: Annotated[str, typer.Option(help="Time limit of the job: hours:minutes:seconds.")] = "24:00:00",
) -> None:
    """Print the batch script that trains a recipe on a SLURM cluster, with torchrun and vLLM servers.

    `jackpot launch RECIPE --slurm > job.sh; sbatch job.sh`. The same script continues the run; options of sbatch, such
    as --partition, are given to it: docs/distributed.md.

    Status: never run on its target (a SLURM cluster).
    """


@command()
def compare(
    recipe: Recipe,
    overrides: Overrides = None,
    arms: Annotated[
        str, typer.Option(help="Names of arms, separated by commas; default all that answer the same problems.")
    ] = "",
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds for each arm.")] = 3,
    first_seed: Annotated[int, typer.Option(min=0, help="Lowest seed.")] = 1,
    jobs: Annotated[int | None, typer.Option(min=1, help="Runs at the same time; default one per free core.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Folder of all runs; default runs/compare-RECIPE.")] = None,
    budget: Annotated[
        float | None, typer.Option(help="Budget of each run, in --unit; default all iterations of the recipe.")
    ] = None,
    unit: Annotated[str, typer.Option(help="Unit of the budget: sequences, tokens or flops.")] = "sequences",
    accuracy: Annotated[
        float | None,
        typer.Option(help="Accuracy to which costs are counted; default one that all rising runs reach."),
    ] = None,
    baseline: Annotated[str | None, typer.Option(help="Arm that the others are compared with; default the first.")] = (
        None
    ),
    keep_collapsed: Annotated[bool, typer.Option("--keep-collapsed", help="Do not stop collapsed runs.")] = False,
) -> None:
    """Train several arms of a recipe on the same prompts with the same budget, and compare them in tables and charts.

    Existing runs are continued, so the same command continues after Ctrl-C. A run has collapsed when two evaluations
    in a row are below half of its best accuracy; it is stopped, and the table says when.

    Status: supported. Not yet run on a GPU.
    """


@command("eval")
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
        typer.Option(
            help="transformers (default); vllm or vllm_server, which are experimental; or sglang_server, never run on "
            "its target."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of all answers; default runs/eval-MODEL.")] = None,
) -> None:
    """Measure a model on benchmarks: mean@k, pass@k with intervals, truncation, and every answer as parquet.

    The same command continues after Ctrl-C or a kill; no answer is generated twice. More benchmarks can be added to
    the folder later.

    Status: supported. Not yet run on a GPU.
    """


@command()
def recipes(
    name: Annotated[
        str | None,
        typer.Argument(help="Recipe to print in full; default a list of all.", autocompletion=_complete_recipe),
    ] = None,
    show_all: ShowAll = False,
    as_json: AsJson = False,
) -> None:
    """List the recipes; with NAME or --all their arms, which row of which paper's table each is, and the published
    numbers.

    docs/reproducing.md says what the papers leave open, where they contradict themselves, and what we chose.

    Status of recipes for the papers' tables: never run on its target (the papers' models), but with --tiny.
    """


@command()
def config(
    key: Annotated[
        str | None,
        typer.Argument(help="A setting, such as objective.clip_low, or a block, such as engine; default all."),
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Print all settings.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/settings.md.")] = False,
) -> None:
    """Explain settings: allowed values, default, meaning, and which command or choice uses each.

    Status: supported.
    """


@command()
def sample(
    run: Annotated[Path, typer.Argument(help="Run folder with a checkpoint.")],
    problems: Annotated[int, typer.Option(min=1, help="Number of held-out problems.")] = 5,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
) -> None:
    """Print the answers of both models to held-out problems, before and after training.

    Status: supported.
    """


@command()
def starter(
    folder: Annotated[Path, typer.Argument(help="Folder in which each model gets a folder.")],
    text: Annotated[bool, typer.Option("--text", help="Copy the pair that reads text, for word problems.")] = False,
) -> None:
    """Copy the two starter models of the package into a folder: the pair that adds numbers, or with --text the other.

    Status: supported.
    """


@command()
def diagnose(
    run: Annotated[Path, typer.Argument(help="Run folder, of a finished run or of one that is still training.")],
    as_json: AsJson = False,
) -> None:
    """Look for signs that a run is unhealthy: what is wrong, since when, which metric shows it and what to try.

    Without a finding it says which signs it looked at. Exit code 0: no finding; 1: unhealthy; 2: no run there.

    Status: supported.
    """


@command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders that contain run folders.")],
    out: Annotated[
        Path | None,
        typer.Option(help="The file; default report.html in the run folder, or in that of several runs."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=0, help="Saved tokens that the page carries; default 100,000.")
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Write the page again while the runs train; Ctrl-C ends it.")
    ] = False,
    every: Annotated[float, typer.Option(min=1.0, help="Seconds between two checks with --watch.")] = 10.0,
) -> None:
    """Write one HTML page about runs: every metric with the arms overlaid, and every saved token.

    Status: supported.
    """


@command()
def replay(
    path: Annotated[Path, typer.Argument(help="Run folder, or a file or folder of saved rollouts.")],
    form: Annotated[
        str,
        typer.Option(
            "--format",
            help="Format of the rollouts: auto, jackpot, verl, trl, prime_rl, areal, jsonl, openrlhf, slime or skyrl.",
        ),
    ] = "auto",
    model: Annotated[
        str | None,
        typer.Option(help="Model or run folder that scores the policy's log-probs, where the file lacks them."),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=1e-6, help="Sampling temperature, with --model; default the run's, or 1.")
    ] = None,
    corrections: Annotated[str, typer.Option(help="Names of corrections, separated by commas; default all.")] = "",
    every: Annotated[int, typer.Option(min=1, help="Replay one of every so many responses of a file.")] = 1,
    max_response_tokens: Annotated[
        int | None, typer.Option(min=1, help="Leave out responses with more tokens; default 1,000,000.")
    ] = None,
    max_file_gb: Annotated[
        float | None, typer.Option(min=0.001, max=1e9, help="Leave out files that take more, unpacked; default 2 GB.")
    ] = None,
    show_all: ShowAll = False,
    as_json: AsJson = False,
) -> None:
    """Apply every correction to saved rollouts, without training, and recommend one for this run.

    Says what a rollout is then worth, and what a share of the rollout model or its drafts would save. Reads rollouts
    of Jackpot, verl, TRL, SkyRL, slime, prime-rl, OpenRLHF and AReaL, and plain JSONL: docs/replay.md.

    Status: supported. Status of what it says of worth and savings: experimental. --model is not yet run on a GPU.
    """


@command()
def export(
    run: Annotated[Path, typer.Argument(help="Run folder with saved rollouts.")],
    form: Annotated[str, typer.Option("--format", help="Format to write: jsonl, prime_rl, slime, trl or verl.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder, empty or not there yet; default that of the run with -FORMAT."),
    ] = None,
) -> None:
    """Write the saved rollouts of a run in the format of another trainer, a file for each iteration.

    `jackpot replay` reads them back; docs/replay.md says what each format is, and what of ours it does not have.

    Status: supported.
    """


@command()
def simulate(
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="Recipe whose two models are measured; default synthetic distributions.",
            autocompletion=_complete_recipe,
        ),
    ] = None,
    overrides: Overrides = None,
    arm: Annotated[str | None, typer.Option(help="Arm of the recipe.")] = None,
    rollout_model: Annotated[
        list[str] | None,
        typer.Option(help="Candidate to measure in place of rollout_model.path; repeat it for more candidates."),
    ] = None,
    prompts: Annotated[
        int | None, typer.Option(min=1, help="Held-out prompts that each rollout model answers; default 256.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random draws.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder; default runs/simulate or runs/simulate-RECIPE-ARM.")] = None,
    show_all: ShowAll = False,
) -> None:
    """Show what OBRS does to the mismatch between two models, without training.

    Three views of the paper's Figure 2, Z from the top k, and for real models how large their mismatch is, which
    correction jackpot replay would advise, and what rollouts are then worth: that is how to choose a rollout model.

    Status: supported. Status of what it says of worth and savings: experimental.
    """


@command()
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
    short: Annotated[
        int | None,
        typer.Option(min=2, help="Compare each response with this many responses of max_new_tokens / this number."),
    ] = None,
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


def main() -> None:
    """Run the typed command; print a user's error without a traceback and exit with code 2."""
    if logging.lastResort:  # prints the warnings of the package
        logging.lastResort.setFormatter(PrintableFormatter())
    try:
        app()
    except JackpotError as error:
        console = Console(stderr=True)
        mark, text = plain("error:", style="bold red"), plain(str(error))
        console.print(mark, text, soft_wrap=not console.is_terminal, highlight=False)
        sys.exit(2)
