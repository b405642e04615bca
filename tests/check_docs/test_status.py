"""What has run: the table of docs/index.md, docstrings, settings and --help say the same."""

import ast
import re
from pathlib import Path

import pytest

from helpers.paths import ROOT
from jackpot.ui.cli import app

SOURCE = ROOT / "src" / "jackpot"
SETTINGS = (ROOT / "docs" / "settings.md").read_text()
WORDS = re.compile(r"supported|experimental|never run on its target \([^()]+\)")
SAID = re.compile(rf"Status(?: of [^:]+)?: ({WORDS.pattern})[.,]")
HELP = {
    command.name or command.callback.__name__: " ".join(command.help.split()) for command in app.registered_commands
}


SECTION = (ROOT / "docs" / "index.md").read_text().partition("\n## Status\n")[2].partition("\n## ")[0]
ROWS = [line.strip("| ").split(" | ") for line in SECTION.splitlines() if line.startswith("| ")][1:]
TYPED: dict[str, set[str]] = {}  # what is typed, and the status of all rows that name it
for _, status, _, _, typed_as, _ in ROWS:
    for typed in re.findall(r"`([^`]+)`", typed_as):
        TYPED.setdefault(typed, set()).add(status)


def said_at_the_top(path: Path) -> set[str]:
    """What a file says of its status: in its docstring, or anywhere in a file of another language."""
    text = path.read_text()
    text = ast.get_docstring(ast.parse(text)) or "" if path.suffix == ".py" else text.replace("\n#", "\n")
    return set(SAID.findall(" ".join(text.split())))


def test_each_row_has_one_of_three_words_and_a_month() -> None:
    assert len(ROWS) > 20 and all(WORDS.fullmatch(status) for _, status, *_ in ROWS)
    assert all(re.fullmatch(r"20\d\d-\d\d", month) and ran for _, _, month, ran, *_ in ROWS)


def test_files_say_the_status_of_their_row() -> None:
    rows = {}
    for _, status, *_, files in ROWS:
        for name in re.findall(r"`([^`]+)`", files):
            rows[SOURCE / name if (SOURCE / name).is_file() else ROOT / name] = {status}

    assert {path: said_at_the_top(path) for path in rows} == rows

    others = set(SOURCE.rglob("*.py")) - set(rows)
    assert [str(path) for path in others if said_at_the_top(path)] == []


@pytest.mark.parametrize("typed", TYPED)
def test_settings_and_help_say_the_status_of_their_rows(typed: str) -> None:
    command = typed.removeprefix("jackpot ")
    described = re.search(rf"^[-|] `{typed}`.*", SETTINGS, re.MULTILINE)
    text = described[0] if command == typed else HELP[command]
    assert set(SAID.findall(text)) == TYPED[typed]


def test_every_command_has_a_row() -> None:
    assert {typed.removeprefix("jackpot ") for typed in TYPED if " " in typed} == set(HELP)
