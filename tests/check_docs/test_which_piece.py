"""The lines of code on docs/frameworks.md are those of the files and pages with the code."""

import re
import sys

from helpers.paths import ROOT
from jackpot.analysis.replay.formats import FORMATS

sys.path.insert(0, str(ROOT / "benchmarks"))
from which_piece import lines


def rows() -> dict[str, list[str]]:
    """Read the table: the cells of each framework's row."""
    text = (ROOT / "docs" / "frameworks.md").read_text().split("## In your framework")[1].split("\n## ")[0]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return {row[0]: row[1:] for row in cells}


def test_the_lines_of_code_are_those_of_files_and_pages():
    page, counted = rows(), lines()
    for name in ("SkyRL", "slime", "prime-rl", "OpenRLHF", "AReaL", "a loop of yours"):
        assert int(re.match(r"\d+", page[name][1])[0]) == counted[name], name
    assert [int(re.match(r"\d+", cell)[0]) for cell in page["TRL"][1:]] == [
        counted["TRL, correction"],
        counted["TRL, correction"],
        counted["TRL, two models"],
    ]

    example = [line for line in (ROOT / "examples" / "tinker_loop.py").read_text().splitlines() if line.strip()]
    assert int(re.match(r"\d+", page["Tinker"][3])[0]) == len(example)


def test_the_lines_that_a_dump_needs_are_those_of_the_hints():
    page = rows()

    for name, form in (("TRL", "trl"), ("verl", "verl"), ("OpenRLHF", "openrlhf"), ("AReaL", "areal")):
        block: list[str] = []
        for line in FORMATS[form].how.splitlines():  # the first block of code
            if line.startswith("    "):
                block.append(line)
            elif block:
                break
        assert int(page[name][0]) == len(block), name
