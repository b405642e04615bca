"""The table of the FP8 flow: beside each row that is equal stands a control that is not."""

from typing import NamedTuple

import pytest

from helpers.paths import ROOT

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
    page = (ROOT / "docs" / "precision.md").read_text()
    return page.partition("Each zero beside what is not one")[2].partition("**Gradients**")[0]


def gap_of(cells: list[str]) -> Gap:
    equal, tokens = cells[2].split("/")
    return Gap(float(cells[0]), float(cells[1]), int(equal), int(tokens))


def table() -> list[Row]:
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


@pytest.mark.parametrize("what", WANTED)
def test_the_table_has_what_the_flow_promises(what):
    assert what in section()


def test_the_cost_of_quantization_is_that_of_a_qwen3_layer():
    page, hidden, wide = (ROOT / "docs" / "precision.md").read_text(), 4096, 12_288
    flop = 2 * (2 * hidden * hidden + 2 * 1024 * hidden + 3 * hidden * wide)
    bf16, fp8 = (1e6 * flop / (0.5 * peak * 1e12) for peak in (989, 1979))
    costs = [(3 * hidden + wide) * size / 4.8e6 for size in (39, 3)]
    costs.append(costs[1] - 2 * hidden * 4 / 4.8e6)  # both norms write and read again what they give, in bf16
    rows = [line.split("|")[3:5] for line in page.splitlines() if line.startswith(("| as it is, a", "| one kernel"))]
    for (cost, faster), wanted in zip(rows, costs, strict=True):
        assert float(cost) == pytest.approx(wanted, abs=5e-4) and float(faster) == round(bf16 / (fp8 + wanted), 2)
    fused = (fp8 + costs[1]) / (fp8 + costs[2])
    assert f": {fused:.2f}, **not worth it**" in page and f"gain {(fp8 + costs[0]) / (fp8 + costs[1]):.2f}," in page
