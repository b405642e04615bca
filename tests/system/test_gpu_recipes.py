"""Every recipe for several GPUs with `--tiny`, as its line is typed: under torchrun, and on the virtual GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.paths import ROOT
from jackpot.config.recipes import load_recipe, recipe_names, recipe_notes
from virtual_gpu import build

RECIPES = [name for name in recipe_names() if recipe_notes(name, load_recipe(name)).gpus]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "--", "jackpot"]
SITE = ROOT / "tests" / "virtual_gpu" / "site"


def train(launcher: list[str], recipe: str, folder: Path, *, seen_first: list[str]) -> str:
    """Train a recipe with --tiny and return what it printed; `seen_first` are folders in front of the module path."""
    paths = [*seen_first, str(ROOT / "tests"), str(ROOT / "src"), str(ROOT / "benchmarks")]
    command = [sys.executable, *launcher, "train", recipe, "--tiny", "threads=1", "--run", str(folder / "run")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def starts(folder: Path) -> list[dict]:
    """Return what the run of a folder notes of each of its starts."""
    return json.loads((folder / "run" / "environment.json").read_text())["starts"]


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpu_recipe_trains_tiny_under_torchrun(recipe: str, tmp_path: Path) -> None:
    train(TORCHRUN, recipe, tmp_path, seen_first=[])
    [start] = starts(tmp_path)
    assert (start["ranks"], start["cuda"]) == (2, None)


@pytest.mark.virtual_gpu
@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpu_recipe_trains_tiny_on_the_virtual_gpu(recipe: str, tmp_path: Path) -> None:
    if reason := build.obstacle():
        pytest.skip(reason)
    train(["-m", "jackpot"], recipe, tmp_path, seen_first=[str(build.build().parent), str(SITE)])
    [start] = starts(tmp_path)
    assert (start["ranks"], start["cuda"]) == (1, "Virtual H100")
