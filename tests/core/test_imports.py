"""Classes of the user are found in the current folder, and what cannot be imported says why."""

import re

import pytest

from jackpot.core.errors import ConfigError
from jackpot.core.imports import import_object


def test_a_class_is_found_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "mine_alone.py").write_text("class Task:\n    pass\n\nNUMBER = 3\n")
    monkeypatch.setattr("sys.path", ["nowhere"])
    monkeypatch.chdir(tmp_path)

    assert import_object("mine_alone:Task", "task").__name__ == "Task"
    with pytest.raises(ConfigError, match=r"the task 'mine_alone:NUMBER' is a int; name a class or a function"):
        import_object("mine_alone:NUMBER", "task")


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("no_such_module:Task", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("math:Task", "AttributeError: module 'math' has no attribute 'Task'"),
    ],
)
def test_what_cannot_be_imported_says_why_and_where(path, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = f"the correction {path!r} cannot be imported: {why}. Its file must lie in the current folder ({tmp_path})"
    with pytest.raises(ConfigError, match=re.escape(text)):
        import_object(path, "correction")
