"""examples/first_look.ipynb runs from top to bottom, and shows what its text says."""

import ast
import json
import re
import resource

import pytest

from helpers.paths import ROOT

NOTEBOOK = ROOT / "examples" / "first_look.ipynb"
PACKAGES = ("nbformat", "nbclient", "ipykernel")
RESULT_LINE = r"^(no correction|OBRS) +(\d+)% right before, (\d+)% after$"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]


def test_the_notebook_is_stored_without_outputs() -> None:
    code = [cell for cell in CELLS if cell["cell_type"] == "code"]

    assert len(code) > 8
    assert [cell for cell in code if cell["outputs"] or cell["execution_count"]] == []


def test_the_cells_of_the_notebook_are_short_and_parse() -> None:
    code = [cell for cell in CELLS if cell["cell_type"] == "code"]

    assert all(ast.parse("".join(cell["source"])) for cell in code)
    assert max(len(cell["source"]) for cell in code) <= 20  # lines


def test_the_links_of_the_notebook_lead_somewhere() -> None:
    text = "".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown")
    targets = re.findall(r"\]\(([^)]+)\)", text)

    assert targets
    assert [target for target in targets if not (NOTEBOOK.parent / target).exists()] == []


@pytest.mark.slow
def test_the_notebook_runs_in_five_minutes_and_obrs_ends_ahead() -> None:
    nbformat, nbclient, _ = (pytest.importorskip(name, reason="make test-all installs it") for name in PACKAGES)
    start_usage = resource.getrusage(resource.RUSAGE_CHILDREN)

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()

    end_usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = end_usage.ru_utime + end_usage.ru_stime - start_usage.ru_utime - start_usage.ru_stime
    assert cpu_seconds < 300  # of one core

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    pictures = [output for output in outputs if "image/png" in output.get("data", ())]
    printed = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    assert len(pictures) == 3
    assert "the same characters, the same weights" in printed

    percents = {arm: tuple(map(int, digits)) for arm, *digits in re.findall(RESULT_LINE, printed, re.MULTILINE)}
    plain_start, plain_end = percents["no correction"]
    obrs_start, obrs_end = percents["OBRS"]
    assert plain_start == obrs_start
    assert obrs_end > obrs_start + 8
    assert obrs_end > plain_end + 8
