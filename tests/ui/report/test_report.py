"""`jackpot report` finds the runs of folders, writes one page that loads nothing, and says what it left out."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from helpers.folders import run_folder, save_tokens
from helpers.pages import page_data
from helpers.paths import ROOT
from helpers.runs import FinishedRuns
from jackpot.core.errors import CheckpointError, DataError
from jackpot.training.run_folder.folder import run_config
from jackpot.ui import cli
from jackpot.ui.charts import Chart, Section, Series, Table
from jackpot.ui.html import write_page
from jackpot.ui.report.report import write_report
from jackpot.ui.report.runs import find_runs, read_runs

LINES = [{"obrs/acceptance": 0.9, "eval/policy_accuracy": 0.5}] * 5
# what a browser would fetch
LOADS = re.compile(
    r"""<(?:script|img|iframe|link|source)[^>]+(?:src|href)\s*=\s*["']?(?!["']?data:)|@import|url\(["']?(?!["']?data:)"""
)


def test_one_run_is_reported_in_its_folder_and_several_beside(tmp_path: Path) -> None:
    first_run = run_folder(tmp_path / "runs" / "a", LINES, "iterations=4")
    second_run = run_folder(tmp_path / "runs" / "deep" / "b", LINES, "iterations=9")

    assert write_report([first_run]).path == first_run / "report.html"

    report = write_report([first_run, second_run])
    assert report.path == tmp_path / "runs" / "report.html"
    assert report.runs == 2
    assert report.unfinished == ("deep/b",)
    assert write_report([first_run], tmp_path / "x" / "y.html").path.read_text().startswith("<!doctype html>")


def test_a_section_with_a_finding_is_open(tmp_path: Path) -> None:
    def is_folded(gap: float) -> bool:
        run_folder(tmp_path / "a", [{"eval/policy_accuracy": 0.5, "mismatch/engine_gap": gap}] * 6)
        return '"folded":true' in page_data(write_report([tmp_path / "a"]).path)

    assert is_folded(1e-9)
    assert not is_folded(0.5)  # its limit depends on the run's dtypes


def test_runs_at_any_depth_are_found_but_none_inside_a_run(tmp_path: Path) -> None:
    for name in ("top", "compare-a/none-seed1", "compare-b/deep/none-seed1"):
        run_folder(tmp_path / "runs" / name, LINES)
    for name in ("top/checkpoints/copy", ".hidden/run", "compare-a/none-seed1/other"):
        run_folder(tmp_path / "runs" / name, LINES)
    (tmp_path / "runs" / "compare-a" / "circle").symlink_to(tmp_path / "runs")

    runs = read_runs(find_runs([tmp_path / "runs"])[0])

    assert [run.name for run in runs] == ["compare-a/none-seed1", "compare-b/deep/none-seed1", "top"]
    assert write_report([tmp_path / "runs"]).runs == 3


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    save_tokens(run_folder(tmp_path, LINES), 1, [["a", "b"]])
    page = write_report([tmp_path]).path.read_text()

    assert len(page) > 20_000
    assert not LOADS.search(page)
    assert LOADS.search('<script src="https://x.org/plotly.js">')  # the pattern can find something


def test_data_cannot_end_its_element_or_fill_a_place_of_the_page(tmp_path: Path) -> None:
    hostile_text = "</script><script>alert(1)</script><!-- @@PACKS@@ @@SCRIPT@@"
    series = Series(name=hostile_text, x=[1.0], y=[2.0])
    chart = Chart(title=hostile_text, x_label=hostile_text, y_label=hostile_text, series=(series,))
    table = Table(title=hostile_text, columns=(hostile_text,), rows=((hostile_text,),))
    section = Section(title=hostile_text, intro=hostile_text, items=(chart, table))

    write_page(tmp_path / "page.html", hostile_text, [section])
    page = (tmp_path / "page.html").read_text()

    assert "<script>alert" not in page
    assert "@@PACKS@@" in page
    assert page.count("<script") == 3  # plotly, data, our code
    assert page.count("</script>") == 3


def test_a_page_without_runs_has_no_inspector(tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", "A title", [])
    assert 'id="tokens"' not in (tmp_path / "page.html").read_text()


def test_a_page_is_small_and_its_plotly_the_pinned_one(tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", "A title", [])
    assert (tmp_path / "page.html").stat().st_size < 700_000

    [version] = re.findall(r"^PLOTLY := ([\d.]+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    plotly = page_data(tmp_path / "page.html", "plotly")
    assert f"plotly.js (basic - minified) v{version}\n" in plotly[:200]
    assert "</script" not in plotly


def test_an_evaluation_beside_runs_is_left_out_with_a_word(finished_run: FinishedRuns, tmp_path: Path) -> None:
    """`jackpot eval` writes into runs/ too."""
    run, evaluation = finished_run.copy(tmp_path / "runs" / "a"), tmp_path / "runs" / "eval-a"
    command = ["eval", str(run), "--benchmarks", "own", "--out", str(evaluation), "problems=2"]
    assert CliRunner().invoke(cli.app, command).exit_code == 0

    invocation = CliRunner().invoke(cli.app, ["report", str(run.parent)], env={"COLUMNS": "400"})

    assert invocation.exit_code == 0, invocation.output
    assert "1 run" in invocation.output
    assert f"{evaluation} is left out: it is of `jackpot eval` and no run" in invocation.output
    assert "eval-a is left out" in page_data(run / "report.html")

    with pytest.raises(DataError, match=r"no run, only folders of `jackpot eval`, .*/eval-a; give"):
        write_report([evaluation])
    with pytest.raises(CheckpointError, match="eval-a is not a run folder: it is of `jackpot eval`"):
        run_config(evaluation)


def test_folders_without_a_run_or_a_metric_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a run folder"):
        write_report([tmp_path])

    run_folder(tmp_path / "a", [])
    with pytest.raises(DataError, match="has no metrics yet"):
        write_report([tmp_path / "a"])
