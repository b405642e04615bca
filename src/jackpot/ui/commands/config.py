"""Implements `jackpot config`, which explains settings."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding

from jackpot.ui.lazy import lazy
from jackpot.ui.terminal.output import plain, print_line, show_next, show_table

with lazy():
    from jackpot.config import reference


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingGroup:
    """Holds the settings that are shown together."""

    title: str
    meaning: str
    blocks: "list[reference.Block]"  # the blocks of the group, the outermost first
    settings: "list[reference.Setting]"


def config(
    key: Annotated[
        str | None,
        typer.Argument(help="A setting, such as objective.clip_low, or a block, such as engine; default all."),
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Print all settings.")] = False,
) -> None:
    """Explain settings: allowed values, default, meaning, and which command or choice uses each.

    Status: supported.
    """
    if key:
        show_setting(Console(), key)
    else:
        show_settings(Console(), show_all)


def show_settings(console: Console, show_all: bool) -> None:
    """Print every block of settings, with `show_all` with the settings in it."""
    groups = list(setting_groups())
    if show_all:
        for group in groups:
            print_line(console, f"{group.title}: {group.meaning}")
            _show_list(console, group.settings)
    else:
        rows = [(group.title, str(len(group.settings)), group.meaning.partition(". ")[0]) for group in groups]
        show_table(console, "", ("block", "settings", "what"), rows, ("settings",), box=SIMPLE_HEAD)

    show_next(
        console,
        {
            "jackpot config engine": "the settings of a block",
            "jackpot config objective.clip_low": "one setting",
            **({} if show_all else {"jackpot config --all": "all of them"}),
        },
    )


def show_setting(console: Console, key: str) -> None:
    """Print the values, default and meaning of a setting, or of a block and the settings below it.

    Raises:
        ConfigError: the key does not exist; the error names the nearest ones.
    """
    found, below = reference.find(key)
    if found:
        for meaning in dict.fromkeys(block.meaning for block in found):
            users = ", ".join(f"jackpot {block.command}" for block in found if block.meaning == meaning)
            print_line(console, f"{found[0].key} ({users}): {meaning}")
        for line in notes_on(found):
            print_line(console, f"  {line}")
        _show_list(console, below)
        return

    setting, *in_block = below
    print_line(console, setting.key)
    lines = {
        "values": setting.summary("values"),
        "default": setting.summary("default"),
        "used by": setting.users,
        "resume": setting.resume,
    }
    for title, text in lines.items():
        if text:
            print_line(console, f"  {title:<9}{text}")
    print_line(console, f"  {setting.summary('meaning')}")
    if in_block:
        _show_list(console, in_block)


def setting_groups() -> Iterator[SettingGroup]:
    """Yield the single settings of a run, then every block of them, then what the other commands have in addition."""
    of_run, known = reference.blocks("train"), reference.settings("train")
    single = [setting for key, setting in known.items() if "." not in key]
    yield SettingGroup(title="jackpot train", meaning=of_run[""].meaning, blocks=[], settings=single)
    for key, block in of_run.items():
        if key and "." not in key:
            inside = [one for name, one in of_run.items() if f"{name}.".startswith(f"{key}.")]
            below = [one for name, one in known.items() if name.startswith(f"{key}.")]
            yield SettingGroup(title=key, meaning=block.meaning, blocks=inside, settings=below)
    for command in list(reference.COMMANDS)[1:]:
        own, shared = reference.own_settings(command)
        also = f"Its blocks {', '.join(shared)} have the settings of task, engine and sampling above."
        meaning = f"{reference.blocks(command)[''].meaning} {also}"
        yield SettingGroup(title=f"jackpot {command}", meaning=meaning, blocks=[], settings=own)


def notes_on(found: "Sequence[reference.Block]") -> list[str]:
    """Return a line for each choice of these blocks, and for each block inside them that need not be there."""
    lines = {}
    for block in found:
        lines |= {f"`{block.key}={name}`": meaning for name, meaning in block.variants}
        if block.default == "null" and "." in block.key:
            lines[f"`{block.key}`, default null"] = block.meaning
    return [f"{name}: {meaning}" for name, meaning in lines.items()]


def _show_list(console: Console, rows: "Sequence[reference.Setting]") -> None:
    """Print two lines for each setting: its key with values and default, and what it means."""
    for setting in rows:
        choice = f", with {setting.variants}" if setting.variants else ""
        head = f"  {setting.key}: {setting.summary('values')}; default {setting.summary('default')}{choice}"
        print_line(console, head.replace("; default required", "; required"))
        meaning = setting.uses[0].meaning.partition(". ")[0].rstrip(".")
        console.print(Padding(plain(meaning), (0, 0, 0, 6), expand=False), highlight=False)
    print_line(console, "")
