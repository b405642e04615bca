"""Tests that start processes are found from their source, that of their fixtures, and what they call.

Those get the mark `process`.
"""

from pathlib import Path

import pytest

from helpers.processes import starts_processes

MODULE = """
import os
import subprocess

import pytest
from helpers.programs import run as typed
from helpers.runs import run

LISTED = [subprocess.run]


@pytest.fixture
def child():
    return os.fork()


def start():
    return subprocess.Popen(["true"])


def test_a_callee(tmp_path):
    assert start()


def test_a_helper():
    assert typed("print(1)")


def test_a_list():
    assert LISTED


def test_none(tmp_path):
    assert run and os.getpid()
"""


@pytest.mark.parametrize(
    ("name", "fixtures", "starts"),
    [
        ("test_a_callee", ("tmp_path",), True),
        ("test_a_helper", (), True),
        ("test_a_list", (), True),
        ("test_none", ("child",), True),  # by its fixture
        ("test_none", ("tmp_path",), False),
    ],
)
def test_a_test_that_starts_processes_is_found(
    name: str, fixtures: tuple[str, ...], starts: bool, tmp_path: Path
) -> None:
    path = tmp_path / "test_some.py"
    path.write_text(MODULE)
    assert starts_processes(path, tmp_path, name, fixtures) == starts
