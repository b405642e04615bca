"""The package as users install it: the wheel of the source distribution, in clean environments, elsewhere.

Part of `make test-all`: two environments with PyTorch take a minute.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable, Iterator
from email.parser import Parser
from pathlib import Path

import pytest

from helpers.paths import ROOT

pytestmark = pytest.mark.slow
SHORT = ("iterations=1", "batch.prompts=4", "evaluation.problems=8", "threads=1")
CORRECTION = """
import torch, jackpot
p, mask = torch.full((1, 2), 0.5).log(), torch.ones(1, 2) > 0
weights, accepted, _ = jackpot.correct("tis", rollout_log_probs=p, target_log_probs=p, response_mask=mask)
print(weights.tolist(), jackpot.__version__)
jackpot.train
"""
Environment = Callable[[str], Path]  # the programs of a clean environment with the wheel, by an extra


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a program outside of the repository, with nothing of it on the path."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(list(map(str, command)), cwd=cwd, env=variables, capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution; that from a copy, since setuptools writes beside the sources."""
    home = tmp_path_factory.mktemp("wheel")
    source = home / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    backend = f"from setuptools import build_meta; build_meta.build_sdist({str(home)!r})"
    subprocess.run([sys.executable, "-c", backend], cwd=source, check=True, capture_output=True)
    [archive] = home.glob("jackpot_rl-*.tar.gz")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "--wheel-dir", home, archive], check=True)
    [wheel_file] = home.glob("jackpot_rl-*.whl")
    return wheel_file


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    """Make a clean environment with the wheel and an extra; return its folder of programs."""
    homes: list[Path] = []

    def make(extra: str) -> Path:
        home = tmp_path_factory.mktemp("environment")
        homes.append(home)
        venv.create(home)
        pip = [sys.executable, "-m", "pip", "--python", home / "bin" / "python", "install", "--quiet", "--no-compile"]
        pip += ["-c", ROOT / "constraints.txt"]
        torch_install = run(*pip, "torch==2.13.0", cwd=home)
        if torch_install.returncode:
            pytest.skip(f"PyTorch cannot be installed here: {torch_install.stderr[-300:]}")
        wheel_install = run(*pip, f"{wheel}{extra}", cwd=home)
        assert wheel_install.returncode == 0, wheel_install.stderr
        return home / "bin"

    yield make
    for home in homes:  # a gigabyte each
        shutil.rmtree(home)


def test_the_wheel_has_its_files_and_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed_names = archive.namelist()
        [metadata] = [name for name in packed_names if name.endswith(".dist-info/METADATA")]
        facts = Parser().parsestr(archive.read(metadata).decode())

    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "jackpot").rglob("*.*")}

    assert {name for name in sources if "__pycache__" not in name and "." in Path(name).name} - {*packed_names} == set()
    assert {name.split("/")[0] for name in packed_names} == {"jackpot", metadata.split("/")[0]}

    assert facts["License-Expression"] == "Apache-2.0"
    assert facts["Requires-Python"] == ">=3.11"
    assert facts["Keywords"]
    assert facts.get_all("Project-URL") == ["Paper, https://arxiv.org/abs/2602.06107"]
    assert "Typing :: Typed" in facts.get_all("Classifier")
    assert {"train", "vllm", "ray", "wandb", "lora", "dev"} <= {*facts.get_all("Provides-Extra")}


def test_an_index_renders_the_readme_with_absolute_links(wheel: Path) -> None:
    """The renderer is that of PyPI. Anchors within the page are those of headings."""
    markdown = pytest.importorskip("readme_renderer.markdown", reason="readme-renderer[md] is not installed")
    if not markdown.variants:
        pytest.skip("readme-renderer is installed without [md]")
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        facts = Parser().parsestr(archive.read(metadata).decode())

    page = markdown.render(facts.get_payload())

    assert page
    assert page.count("<table>") == 1
    assert page.count("<pre") > 4

    targets = re.findall(r'(?:href|src)="([^"]*)"', page)
    assert targets
    assert [target for target in targets if not target.startswith(("https://", "#user-content-"))] == []


def test_without_extras_commands_say_what_to_install(environment: Environment, tmp_path: Path) -> None:
    programs = environment("")

    script = run(programs / "python", "-c", CORRECTION, cwd=tmp_path)
    assert script.stdout.startswith("[[1.0, 1.0]] 0."), script.stderr  # weights, and a version

    advice = "needs the extra `train`: pip install -c constraints.txt '.[train]' in a clone of the repository"
    for process in (script, run(programs / "jackpot", "train", "quickstart", cwd=tmp_path)):
        assert process.returncode == 1
        assert advice in " ".join(process.stderr.replace("commands need", "command needs").split())


@pytest.mark.sweep
def test_the_quickstart_trains_from_the_wheel(environment: Environment, tmp_path: Path) -> None:
    programs = environment("[train]")

    process = run(programs / "jackpot", "train", "quickstart", *SHORT, "--run", "run", cwd=tmp_path)
    assert process.returncode == 0, process.stderr

    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [0, 1]
    assert (tmp_path / "run" / "checkpoints" / "last" / "policy" / "model.safetensors").is_file()

    module_path = run(programs / "python", "-c", "import jackpot; print(jackpot.__file__)", cwd=tmp_path).stdout
    assert Path(module_path.strip()).is_relative_to(programs.parent)
