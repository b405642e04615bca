"""Turns functions into commands of `jackpot`, and explains mistyped commands, options and settings."""

import functools
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

from jackpot.core.errors import ConfigError, repeated, unknown_name
from jackpot.core.process_rank import process_rank
from jackpot.ui.lazy import lazy, load
from jackpot.ui.terminal.output import print_line
from jackpot.ui.terminal.progress import status

with lazy():
    from jackpot.config import build, names, recipes
    from jackpot.config import config as settings
    from jackpot.models import hub
    from jackpot.rollout.tasks import benchmarks

# The class of the click that typer uses, which is typer's own copy since typer 0.24.
NoSuchOption = import_module(typer.BadParameter.__module__).NoSuchOption


class Command(TyperCommand):
    """A command that explains what is wrong with settings written as options, and with options given twice."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:
        """Parse the words that were typed after the command's name; return those left for subcommands.

        Raises:
            ConfigError: an option is unknown, or was given twice.
        """
        words = list(args)  # the parser empties the list that it gets
        try:
            # `parameters` has each parameter as often as it was typed; its last name, `opts[-1]`, stands in errors.
            _, _, parameters = self.make_parser(ctx).parse_args(list(args))
        except NoSuchOption as error:
            raise ConfigError(self._unknown_option(ctx, error.option_name, error.possibilities, words)) from None
        remaining = super().parse_args(ctx, args)

        options = [parameter for parameter in parameters if parameter.param_type_name == "option"]
        if twice := repeated([option.opts[-1] for option in options if not option.multiple]):
            raise ConfigError(f"{' and '.join(twice)} was given twice; give it once")
        if twice := repeated([text.partition("=")[0] for text in ctx.params.get("overrides") or []]):
            print_line(Console(stderr=True), f"{' and '.join(twice)} was given twice; the last one counts")
        return remaining

    def _unknown_option(
        self, ctx: typer.Context, option: str, possibilities: Sequence[str] | None, words: Sequence[str]
    ) -> str:
        """Say how to write the setting that an unknown option names, or which options have a similar name.

        Args:
            possibilities: options of a similar name, which the parser found.
            words: the words that were typed after the command's name.
        """
        name = option.lstrip("-").replace("-", "_")
        takes_settings = any(parameter.name == "overrides" for parameter in self.params)
        similar_settings = build.similar_settings(name, build.keys_of(settings.Config)) if takes_settings else []
        similar_options = [possible for possible in possibilities or [] if possible != "--help"]

        # An option that begins with the typed name is more likely meant than a setting of that name.
        if similar_settings and not any(possible.lstrip("-").startswith(name) for possible in similar_options):
            value = _value_of(option, words)
            forms = " or ".join(f"{key}={value}" for key in similar_settings)
            return f"no option {option}; settings are written key=value: {forms}"

        # The text ends with "jackpot COMMAND --help lists all", after the question or, without one, a semicolon.
        guess = f"; did you mean {' or '.join(similar_options)}?" if similar_options else ";"
        return f"no option {option}{guess} jackpot {ctx.info_name} --help lists all"


def _value_of(option: str, words: Sequence[str]) -> str:
    """Return the value that was typed for an option; VALUE if there is none."""
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
        if word == option and not following.startswith("--"):
            return following
    return "VALUE"


def _check(command: str, options: Mapping[str, Any]) -> None:
    """Check, before a command makes a folder, that its settings fit and its models exist.

    Args:
        command: name of the command.
        options: its arguments and options by name; several commands share some (`arguments.py`).

    Raises:
        ConfigError: settings do not fit, or an evaluation names no benchmark.
        ModelError: a model does not exist.
    """
    paths = {"model": options["model"]} if options.get("model") else {}  # of models, by their names in errors
    # False for plans, tiny runs and SLURM scripts, which need only the shapes of published models.
    needs_files = not any(options.get(name) for name in ("dry_run", "tiny", "slurm"))

    if recipe := options.get("recipe"):
        typed = options["overrides"] or []
        if "arms" in options:
            # Only `jackpot compare` has arms. One seed is enough: the models do not depend on it.
            configs = [*recipes.resolve_arms(recipe, recipes.split_names(options["arms"]), [0], typed).values()]
            folder = options["folder"] or Path("runs") / f"compare-{Path(recipe).stem}"
        else:
            configs = [recipes.resolve(recipe, options["arm"], typed)]
            folder = options.get("run") or names.run_folder(recipe, options["arm"], typed, configs[0].seed)
        if not folder.exists():  # the checkpoints of an existing folder may hold the models
            for config in configs:
                paths |= config.model_paths()

    if candidates := options.get("rollout_model"):  # they stand in for the recipe's own rollout model
        paths.pop("rollout_model", None)
        paths |= {f"--rollout-model {path}": path for path in candidates}
    if paths:
        hub.check_found(paths, needs_files)

    # Without a named benchmark, only a run folder has problems of its own to evaluate on.
    is_named = options.get("benchmarks") or any("benchmarks=" in text for text in options.get("overrides") or ())
    if command == "eval" and not is_named and not (Path(options["model"]) / "config.yaml").exists():
        raise ConfigError(benchmarks.NO_SET)


class Commands(TyperGroup):
    """The group of all commands, which answers an unknown name with the nearest one and a list of all."""

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:
        """Return the command of a name; raise ConfigError with the nearest name if there is none."""
        command = super().get_command(ctx, cmd_name)
        if command is None and not ctx.resilient_parsing:
            raise ConfigError(unknown_name("command", cmd_name, self.list_commands(ctx)))
        return command


def register(
    app: typer.Typer,
    module: ModuleType,
    name: str | None,
    on_ranks: bool,
) -> None:
    """Make the function that has the name of its module a command, whose help text is the function's docstring.

    Args:
        name: name of the command; None takes the module's name.
        on_ranks: whether several processes that torchrun started may run the command together.
    """
    own_name = module.__name__.rpartition(".")[2]
    function: Callable[..., None] = getattr(module, own_name)
    name = name or own_name

    @functools.wraps(function)
    def call(**options: Any) -> None:
        """Check the options, import what the command's file has postponed, and run the function."""
        if not on_ranks and (ranks := process_rank().size) > 1:
            raise ConfigError(f"torchrun started {ranks} processes; {name} runs in one, without it")

        _check(name, options)  # a mistake is reported before torch is imported
        with status(Console(stderr=True), f"loading jackpot {name}"):  # importing torch alone takes seconds
            load(module)
        function(**options)

    paragraphs = (function.__doc__ or "").split("\n\n")
    # Make each paragraph one line, which the terminal breaks at its own width.
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    app.command(name, cls=Command, help=text)(call)
