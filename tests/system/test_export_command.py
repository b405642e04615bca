"""`jackpot export` as a user types it, and its way back."""

from pathlib import Path

from helpers.commands import jackpot
from helpers.runs import FinishedRuns


def test_a_run_is_exported_beside_its_folder_and_replayed(finished_run: FinishedRuns, tmp_path: Path):
    run = finished_run.copy(tmp_path / "a run", "rollouts.every=1", "iterations=2", "batch.prompts=8")
    done = jackpot("export", str(run), "--format", "verl", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    printed = " ".join(done.stdout.split())
    assert (
        "to 2 files in" in printed
        and "Not written, because the format verl has no column for it: top-k lists" in printed
    )
    assert f"jackpot replay '{tmp_path / 'a run-verl'}'" in done.stdout
    assert {path.name for path in (tmp_path / "a run-verl").iterdir()} == {"1.jsonl", "2.jsonl"}
    again = jackpot("replay", "a run-verl", "--all", cwd=tmp_path)
    assert again.returncode == 0 and "verl, 2 files" in " ".join(again.stdout.split())
    twice = jackpot("export", str(run), "--format", "verl", cwd=tmp_path)
    assert twice.returncode == 2 and "is there already; give --out" in " ".join(twice.stderr.split())
    inside = jackpot("export", ".", "--format", "jsonl", cwd=run)
    assert inside.returncode == 0 and (tmp_path / "a run-jsonl").is_dir(), inside.stderr
    missing = jackpot("export", str(run), cwd=tmp_path)
    assert missing.returncode == 2 and "--format" in missing.stderr
