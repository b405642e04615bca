"""The table of what corrections are worth: which settings have a row, and that it fits a terminal."""

import io

from rich.console import Console

from jackpot.ui.terminal.output import show_table
from jackpot.ui.views.advice import judged_table


def candidate_of(label: str, worth: float) -> dict:
    """A correction with its measured worth."""
    numbers = {key: {"value": worth, "error": 0.01} for key in ("worth", "of_tokens", "effective", "elsewhere")}
    tv = {"value": 0.1234, "error": 0.01}
    name = label.split()[0]
    return {"label": label, "name": name, "advisable": True, "is_whole": False, "tv_after_correction": tv, **numbers}


def test_the_advised_setting_has_a_row_and_fits_a_terminal() -> None:
    worths = {"tis cap=2": 0.52, "tis": 0.51, "tis cap=4": 0.4, "obrs expected target=proximal c1=2": 0.3}
    table = judged_table({"correction": "tis", "candidates": [candidate_of(*pair) for pair in worths.items()]})

    assert [row[0] for row in table.rows] == ["tis cap=2", "tis", "obrs expected target=proximal c1=2"]

    console = Console(file=io.StringIO(), width=80)
    show_table(console, table.title, table.columns, table.rows, table.columns[1:])
    text = console.file.getvalue()

    assert text.count("worth") == 2
    assert max(map(len, text.splitlines())) <= 80  # one table and its title
