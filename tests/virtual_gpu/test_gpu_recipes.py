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


def train(launcher: list[str], recipe: str, folder: Path, *settings: str, modules: list[str]) -> dict:
    """Train a recipe with --tiny and return what its run notes of the start; `modules` are seen first by imports."""
    paths = [*modules, str(ROOT / "tests"), str(ROOT / "src"), str(ROOT / "benchmarks")]
    command = [sys.executable, *launcher, "train", recipe, "--tiny", "threads=1", *settings]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [*command, "--run", "run"], capture_output=True, text=True, timeout=900, env=environment, cwd=folder
    )
    assert process.returncode == 0, process.stdout + process.stderr
    [start] = json.loads((folder / "run" / "environment.json").read_text())["starts"]
    return start


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpu_recipe_trains_tiny_under_torchrun(recipe: str, tmp_path: Path) -> None:
    start = train(TORCHRUN, recipe, tmp_path, modules=[])
    assert start["ranks"] == 2
    assert start["cuda"] is None


@pytest.mark.virtual_gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gpu_recipe_trains_tiny_on_the_virtual_gpu(recipe: str, tmp_path: Path) -> None:
    if reason := build.obstacle():
        pytest.skip(reason)

    modules = [str(build.build().parent), str(SITE)]
    # Triton's interpreter would take minutes for each recipe; `PART=runs` has runs with its kernels.
    start = train(["-m", "jackpot"], recipe, tmp_path, "head_kernel=eager", modules=modules)

    assert start["ranks"] == 1
    assert start["cuda"] == "Virtual H100"
