"""The quickstart trains from the wheel alone, as from a package index: part of `make test-all`."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from helpers.paths import ROOT

pytestmark = pytest.mark.slow
SHORT = ("iterations=1", "batch.prompts=4", "evaluation.problems=8", "threads=1")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the wheel holds; built from a copy, since setuptools writes beside the sources."""
    home = tmp_path_factory.mktemp("wheel")
    source = home / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "--wheel-dir", home, source], check=True)
    [wheel] = home.glob("jackpot*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(home / "unpacked")
    return home / "unpacked"


def test_the_quickstart_trains_from_the_wheel(unpacked: Path, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(unpacked)}
    where = [sys.executable, "-c", "import jackpot; print(jackpot.__file__)"]
    found = subprocess.run(where, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).is_relative_to(unpacked)
    command = [sys.executable, "-m", "jackpot", "train", "quickstart", *SHORT, "--run", "run"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [0, 1]
    assert (tmp_path / "run" / "checkpoints" / "last" / "policy" / "model.safetensors").is_file()
