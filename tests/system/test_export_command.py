"""`jackpot export` as a user types it: what it writes, what it refuses, and that `replay` reads it back."""

from pathlib import Path

from helpers.commands import jackpot
from helpers.runs import FinishedRuns


def test_a_run_is_exported_beside_its_folder_and_replayed(finished_run: FinishedRuns, tmp_path: Path):
    run = finished_run.copy(tmp_path / "a run", "rollouts.every=1", "iterations=2", "batch.prompts=8")

    export_result = jackpot("export", str(run), "--format", "verl", cwd=tmp_path)
    assert export_result.returncode == 0, export_result.stderr
    output = " ".join(export_result.stdout.split())
    assert "to 2 files in" in output
    assert "Not written, because the format verl has no column for it: top-k lists" in output
    assert f"jackpot replay '{tmp_path / 'a run-verl'}'" in export_result.stdout
    assert {path.name for path in (tmp_path / "a run-verl").iterdir()} == {"1.jsonl", "2.jsonl"}

    replay_result = jackpot("replay", "a run-verl", "--all", cwd=tmp_path)
    assert replay_result.returncode == 0
    assert "verl, 2 files" in " ".join(replay_result.stdout.split())

    second_export = jackpot("export", str(run), "--format", "verl", cwd=tmp_path)
    assert second_export.returncode == 2
    assert "is there already; give --out" in " ".join(second_export.stderr.split())

    inside_export = jackpot("export", ".", "--format", "jsonl", cwd=run)
    assert inside_export.returncode == 0, inside_export.stderr
    assert (tmp_path / "a run-jsonl").is_dir()

    formatless_export = jackpot("export", str(run), cwd=tmp_path)
    assert formatless_export.returncode == 2
    assert "--format" in formatless_export.stderr
