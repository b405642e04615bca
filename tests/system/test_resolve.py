"""The package index has a solution for every extra on other machines, found from metadata without a download.

Elsewhere PyTorch is the CUDA build, which asks for other packages than a CPU build on this machine's disk.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from helpers.paths import ROOT

pytestmark = pytest.mark.slow
CLASSIFIERS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
PYTHONS = tuple(line.rpartition(" ")[2] for line in CLASSIFIERS if line.startswith("Programming Language"))


def solve(python: str, *options: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Resolve all extras at once for Linux; their common solution is one of each."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-config", "pyproject.toml", "--all-extras"]
    target = ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28"]
    answer = subprocess.run([*command, *target, *options], cwd=folder, capture_output=True, text=True)

    if answer.returncode and "No solution found" not in answer.stderr:
        pytest.skip(f"the package index cannot be read: {answer.stderr.strip()[-300:]}")
    return answer


def test_the_classifiers_name_three_versions_of_python() -> None:
    assert PYTHONS == ("3.11", "3.12", "3.13")


@pytest.mark.parametrize("python", PYTHONS)
def test_all_extras_resolve_under_the_constraints(python: str) -> None:
    answer = solve(python, "-c", "constraints.txt")
    assert answer.returncode == 0, answer.stderr
    assert "\nnvidia-" in answer.stdout  # the CUDA build, and not one that is on this machine's disk


def test_all_extras_resolve_without_constraints() -> None:
    answer = solve(PYTHONS[-1])
    assert answer.returncode == 0, answer.stderr


def test_a_pin_that_torch_contradicts_is_noticed(tmp_path: Path) -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    (tmp_path / "constraints.txt").write_text(f"{constraints}triton==3.9.0\n")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())

    answer = solve(PYTHONS[0], "-c", "constraints.txt", folder=tmp_path)

    assert answer.returncode == 1
    assert "triton" in answer.stderr
