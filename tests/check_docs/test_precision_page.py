"""The table of the FP8 flow in docs/precision.md: beside each row that is equal stands a control that is not."""

from typing import NamedTuple

import pytest

from helpers.paths import ROOT

# Words that name the rows.
WANTED = ("after 1 ", "after 30 ", "after 300 ", "adapter", "sent their codes", "killed", "checkpointed", "split over")


class Gap(NamedTuple):
    mean: float
    largest: float
    equal: int
    tokens: int


class Row(NamedTuple):
    flow: str
    same: Gap
    control: str
    other: Gap


def section() -> str:
    """The text of the page that has the table."""
    page = (ROOT / "docs" / "precision.md").read_text()
    return page.partition("Each zero beside what is not one")[2].partition("**Gradients**")[0]


def gap_of(cells: list[str]) -> Gap:
    """Read a gap from its three cells."""
    equal, tokens = cells[2].split("/")
    return Gap(float(cells[0]), float(cells[1]), int(equal), int(tokens))


def table() -> list[Row]:
    """Read the rows of the table."""
    lines = [line for line in section().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]
    return [Row(row[0], gap_of(row[1:4]), row[4], gap_of(row[5:8])) for row in cells]


def test_each_equal_row_has_a_control_that_is_not():
    rows = table()

    assert len(rows) > 10 and len({row.flow for row in rows}) == len(rows)
    for row in rows:
        assert row.same.equal == row.same.tokens > 500, row
        assert row.same.mean < 1e-6 and row.same.largest < 1e-5, row
        assert row.control and row.other.equal < row.other.tokens, row
        assert row.other.largest > 10 * max(row.same.largest, 1e-7), row


@pytest.mark.parametrize("promise", WANTED)
def test_the_table_has_what_the_flow_promises(promise):
    assert promise in section()
