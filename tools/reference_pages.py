"""Writes docs/commands.md from the declarations of the commands, and docs/settings.md from the classes of settings.

`python -m tools.reference_pages` after a change of either; tests/check_docs holds the pages to the code.
"""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import typer

from jackpot.config.reference import Setting
from jackpot.ui.cli import app
from jackpot.ui.commands.config import notes_on, setting_groups

DOCS = Path(__file__).parents[1] / "docs"
_COMMANDS = """\
# Commands

Every command of `jackpot` with its arguments and options. Settings are written `key=value`, without dashes:
[settings.md](settings.md). `jackpot COMMAND --help` prints the same, and `python -m tools.reference_pages`
made this page.
"""
_SETTINGS = """\
# Settings

Every setting of `jackpot train`, then what `jackpot eval` and `jackpot mismatch` have in addition. A recipe sets them
as YAML, the command line as `key=value`. `jackpot config KEY` explains one. "May change": a run or an evaluation that
continues may have another value; all others decide numbers that were computed before. `python -m tools.reference_pages`
made this page from the docstrings in `src/jackpot/config`.
"""
_COLUMNS = ("setting", "values", "default", "meaning")
_VALUES = {int: "N", float: "NUMBER", Path: "PATH"}  # what stands for a value of this type; TEXT for others


def commands_page() -> str:
    """Return the text of docs/commands.md."""
    commands = sorted((one.name or one.callback.__name__, one) for one in app.registered_commands)
    rows = [f"| [`jackpot {name}`](#jackpot-{name}) | {_paragraphs(one)[0]} |" for name, one in commands]
    parts = [_COMMANDS, "\n".join(["| command | what it does |", "|---|---|", *rows]) + "\n"]
    parts += ["\n".join(_section(name, command)) + "\n" for name, command in commands]
    return "\n".join(parts)


def _section(name: str, command: Any) -> Iterator[str]:
    """Yield the lines on one command: how it is typed, what it does, its arguments and options."""
    declared = inspect.signature(command.callback).parameters.values()
    forms = {one.name: (_form(one), _meaning(one)) for one in declared}
    arguments = [forms[one.name][0] for one in declared if _is_argument(one)]
    yield from (f"## jackpot {name}", "", "```", " ".join([f"jackpot {name}", *arguments, "[OPTIONS]"]), "```")
    for paragraph in _paragraphs(command):
        yield from ("", paragraph)
    yield from ("", "| argument, option | meaning |", "|---|---|")
    yield from (f"| `{form}` | {text} |" for form, text in forms.values())


def _paragraphs(command: Any) -> list[str]:
    return [" ".join(paragraph.split()) for paragraph in command.help.split("\n\n")]


def _is_argument(parameter: inspect.Parameter) -> bool:
    return isinstance(parameter.annotation.__metadata__[0], typer.models.ArgumentInfo)


def _meaning(parameter: inspect.Parameter) -> str:
    """Return the help of an argument or option with its default, where it has one that the help does not say."""
    text, default = parameter.annotation.__metadata__[0].help, parameter.default
    if default in (None, "", inspect.Parameter.empty) or isinstance(default, bool) or "default" in text:
        return text
    return f"{text} Default {f'{default:g}' if isinstance(default, float) else default}."


def _form(parameter: inspect.Parameter) -> str:
    """Return how an argument or option is typed: RECIPE, [KEY=VALUE...], --seeds N."""
    kind = parameter.annotation.__origin__  # str, list[Path], or one of them | None
    kinds = [kind] if get_origin(kind) is list else (get_args(kind) or [kind])
    if _is_argument(parameter):
        many = any(get_origin(one) is list for one in kinds)
        name = "KEY=VALUE" if parameter.name == "overrides" else parameter.name.upper()
        form = name + "..." * many
        return form if parameter.default is inspect.Parameter.empty else f"[{form}]"
    declared = parameter.annotation.__metadata__[0]
    first, *_ = [*(declared.param_decls or ()), declared.default]  # within Annotated typer keeps the name as default
    option = first if isinstance(first, str) else f"--{parameter.name.replace('_', '-')}"
    if bool in kinds:
        return option
    return f"{option} {next((_VALUES[one] for one in kinds if one in _VALUES), 'TEXT')}"


def settings_page() -> str:
    """Return the text of docs/settings.md."""
    parts = [_SETTINGS]
    for group in setting_groups():
        lines = [f"## {group.title}", "", group.meaning, "", f"| {' | '.join(_COLUMNS)} |", "|---|---|---|---|"]
        lines += [f"| {' | '.join(_cells(setting))} |" for setting in group.settings]
        if notes := notes_on(group.blocks):
            lines += ["", *(f"- {note}" for note in notes)]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _cells(setting: Setting) -> list[str]:
    """Return a setting's row of the page."""
    choice = f" Only with {setting.variants}." if setting.variants else ""
    default = setting.summary("default")
    return [
        f"`{setting.key}`",
        setting.summary("values"),
        default if default == "required" else f"`{default}`",
        setting.summary("meaning") + choice + (" May change." if setting.resume == "may change" else ""),
    ]


if __name__ == "__main__":
    (DOCS / "commands.md").write_text(commands_page())
    (DOCS / "settings.md").write_text(settings_page())
