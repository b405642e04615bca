"""research/unified.py keeps results of different commits of src/ apart, and has none of files without a commit."""

import json
import sys
from pathlib import Path

import pytest

from research import unified


def main(monkeypatch: pytest.MonkeyPatch, results: Path, commit: str, *arguments: str) -> None:
    """Run the script as if src/ were at this commit."""
    monkeypatch.setattr(unified, "source", lambda: commit)
    monkeypatch.setattr(sys, "argv", ["unified.py", "--results", str(results), *arguments])
    unified.main()


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A file with one arm at two commits."""
    same = {"model": "outliers", "arm": "unified", "seed": 101, "settings": [], "copy": 0.5}
    same |= {"gap, mean": 1e-8, "gap, largest": 1e-7, "updates compared": 12}
    lines = [same | {"source": source, "accuracy": accuracy} for source, accuracy in (("old", 0.25), ("new", 0.75))]
    (path := tmp_path / "unified.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_each_commit_has_a_table_of_its_own(monkeypatch, results, capsys) -> None:
    main(monkeypatch, results, "new", "--table")
    _, old, new = capsys.readouterr().out.split("src/ of ")
    assert old.startswith("old\n") and "| 1 | 25.0 |" in old and "75.0" not in old
    assert new.startswith("new\n") and "| 1 | 75.0 |" in new and "updates compared |" in new and "| 12 |" in new


CHOSEN = ("--only", "outliers", "--arms", "unified", "--seeds", "101")


@pytest.mark.parametrize(("commit", "answer"), [("new", "is finished"), ("old", "is finished"), ("newer", "runs")])
def test_a_run_is_finished_at_the_commits_that_have_its_result(commit, answer, monkeypatch, results, capsys) -> None:
    main(monkeypatch, results, commit, "--plan", *CHOSEN)
    assert capsys.readouterr().out.split("101")[1].strip() == answer


def test_a_source_that_is_in_no_commit_is_refused(monkeypatch, results) -> None:
    with pytest.raises(SystemExit, match="not in a commit"):
        main(monkeypatch, results, "newer+", *CHOSEN)
