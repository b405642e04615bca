"""`make release` says what keeps a checkout from being a release; the rest of it is tested as `make dist` is."""

import subprocess
from pathlib import Path

from tools.release import obstacles

SETTINGS = '[project]\nversion = "1.2.0"\n[project.urls]\n'


def git(folder: Path, *command: str) -> None:
    """Run git in a folder, under a name of its own."""
    identity = ("-c", "user.name=Test", "-c", "user.email=test@example.org")
    subprocess.run(["git", *identity, *command], cwd=folder, check=True, capture_output=True)


def test_all_that_keeps_a_release_back_is_said(tmp_path: Path) -> None:
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "-m", "first")
    git(tmp_path, "tag", "v1.2.0")
    git(tmp_path, "commit", "--allow-empty", "-m", "second")
    (tmp_path / "pyproject.toml").write_text(SETTINGS)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.0, not released yet\n")

    texts = obstacles(tmp_path)

    assert [text.split(":")[0] for text in texts] == [
        "CHANGELOG.md begins with `## 1.2.0, not released yet`",
        "files are changed or new",
        "v1.2.0 is the tag of an earlier commit",
        "[project.urls] of pyproject.toml has no `Source`",
    ]

    (tmp_path / "pyproject.toml").write_text(f'{SETTINGS}Source = "https://example.org/jackpot"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 1.2.0, 2026-12-01\n\n## 1.1.0, not released yet\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "third")
    assert obstacles(tmp_path) == [texts[2]]  # the tag

    git(tmp_path, "tag", "--force", "v1.2.0")
    assert obstacles(tmp_path) == []
