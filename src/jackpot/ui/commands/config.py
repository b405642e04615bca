"""Implements `jackpot config`, which explains settings."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding

from jackpot.ui.lazy import lazy
from jackpot.ui.terminal.output import plain, print_line, print_lines, show_next, show_table

with lazy():
    from jackpot.config import reference


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingGroup:
    """A group of settings that are shown together: all settings of a block, or those that one command alone has."""

    title: str
    meaning: str
    blocks: "list[reference.Block]"  # the blocks that the settings are in, the outermost first
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
    console = Console()
    if key:
        show_setting(console, key)
        return

    groups = list(setting_groups())
    if show_all:
        for group in groups:
            print_line(console, f"{group.title}: {group.meaning}")
            _show_list(console, group.settings)
    else:
        rows = [(group.title, str(len(group.settings)), group.meaning.partition(". ")[0]) for group in groups]
        show_table(console, "", ("block", "settings", "what"), rows, numbers=("settings",), box=SIMPLE_HEAD)

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
    blocks, settings = reference.find(key)
    if blocks:
        for meaning in dict.fromkeys(block.meaning for block in blocks):
            users = ", ".join(f"jackpot {block.command}" for block in blocks if block.meaning == meaning)
            print_line(console, f"{blocks[0].key} ({users}): {meaning}")
        print_lines(console, notes_on(blocks), "  ")
        _show_list(console, settings)
        return

    setting, *below = settings  # the setting of this key, and settings below it where its value can be a block
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
    if below:
        _show_list(console, below)


def setting_groups() -> Iterator[SettingGroup]:
    """Yield the single settings of a run, then its blocks of settings, then the own settings of each other command."""
    run_blocks = reference.blocks("train")
    run_settings = reference.settings("train")
    single = [setting for key, setting in run_settings.items() if "." not in key]
    # The block with an empty key stands for all settings of a command.
    yield SettingGroup(title="jackpot train", meaning=run_blocks[""].meaning, blocks=[], settings=single)

    for key in (key for key in run_blocks if key and "." not in key):
        # The block `key`, and the blocks and settings inside it.
        blocks = [block for name, block in run_blocks.items() if f"{name}.".startswith(f"{key}.")]
        settings = [setting for name, setting in run_settings.items() if name.startswith(f"{key}.")]
        yield SettingGroup(title=key, meaning=run_blocks[key].meaning, blocks=blocks, settings=settings)

    for command in list(reference.COMMANDS)[1:]:  # all but train, whose settings stand above
        settings, shared = reference.own_settings(command)
        also = f"Its blocks {', '.join(shared)} have the settings of task, engine and sampling above."
        meaning = f"{reference.blocks(command)[''].meaning} {also}"
        yield SettingGroup(title=f"jackpot {command}", meaning=meaning, blocks=[], settings=settings)


def notes_on(blocks: "Sequence[reference.Block]") -> list[str]:
    """Return lines that explain the blocks: one for each name that a block can have, as `engine=vllm`, and its meaning.

    A block that lies inside another one and is null by default gets a line with its own meaning, too.
    """
    lines = {}
    for block in blocks:
        lines |= {f"`{block.key}={name}`": meaning for name, meaning in block.variants}
        if block.default == "null" and "." in block.key:
            lines[f"`{block.key}`, default null"] = block.meaning
    return [f"{name}: {meaning}" for name, meaning in lines.items()]


def _show_list(console: Console, settings: "Sequence[reference.Setting]") -> None:
    """Print two lines for each setting: its key with values and default, and its meaning."""
    for setting in settings:
        choice = f", with {setting.variants}" if setting.variants else ""
        head = f"  {setting.key}: {setting.summary('values')}; default {setting.summary('default')}{choice}"
        # A setting that must be given has the default `required`.
        print_line(console, head.replace("; default required", "; required"))
        meaning = setting.uses[0].meaning.partition(". ")[0].rstrip(".")  # first sentence, of the first use
        console.print(Padding(plain(meaning), (0, 0, 0, 6), expand=False), highlight=False)
    print_line(console, "")
