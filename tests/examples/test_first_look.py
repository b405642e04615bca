"""examples/first_look.ipynb runs from top to bottom, and shows what its text says."""

import ast
import json
import re
import resource

import pytest

from helpers.paths import ROOT

NOTEBOOK = ROOT / "examples" / "first_look.ipynb"
NEEDED = ("nbformat", "nbclient", "ipykernel")
ENDS = r"^(no correction|OBRS) +(\d+)% right before, (\d+)% after$"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]


def test_the_notebook_is_stored_without_outputs() -> None:
    code = [cell for cell in CELLS if cell["cell_type"] == "code"]
    assert len(code) > 8 and all(ast.parse("".join(cell["source"])) for cell in code)
    assert [cell for cell in code if cell["outputs"] or cell["execution_count"]] == []
    assert max(len(cell["source"]) for cell in code) <= 20


def test_the_links_of_the_notebook_lead_somewhere() -> None:
    text = "".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown")
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert targets and [target for target in targets if not (NOTEBOOK.parent / target).exists()] == []


@pytest.mark.slow
def test_the_notebook_runs_in_five_minutes_of_a_core() -> None:
    nbformat, nbclient, _ = (pytest.importorskip(name, reason="make test-all installs it") for name in NEEDED)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 300

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    pictures = [output for output in outputs if "image/png" in output.get("data", ())]
    printed = "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")
    assert len(pictures) == 3 and "the same characters, the same weights" in printed
    percents = {arm: tuple(map(int, found)) for arm, *found in re.findall(ENDS, printed, re.MULTILINE)}
    (start, without), (same_start, corrected) = percents["no correction"], percents["OBRS"]
    assert start == same_start and corrected > start + 8 and corrected > without + 8
