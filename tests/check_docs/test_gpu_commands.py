"""Every published command that starts a recipe for GPUs passes the checks of a start, and fits these GPUs."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from helpers.commands import jackpot
from helpers.hub import without_hub
from helpers.paths import ROOT
from jackpot.analysis.plan.estimate import Estimator
from jackpot.analysis.plan.sizes import model_sizes, prompt_lengths
from jackpot.config.config import Config
from jackpot.config.recipes import load_recipe, recipe_names, recipe_notes, resolve
from jackpot.config.recipes.listing import list_recipe
from jackpot.launch.checks import check_start
from jackpot.ui.commands.train import train

# The recipes for GPUs, each with the GPUs that it is for; and the published commands that start them.
GPUS = {name: gpus for name in recipe_names() if (gpus := recipe_notes(name, load_recipe(name)).gpus)}
PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src/jackpot/config/recipes").glob("*.yaml")]
TYPED = re.compile(rf"(?:torchrun [^`\n]*)?jackpot (?:train|compare|launch) (?:{'|'.join(GPUS)})\b[^`\n#>]*")
COMMANDS = sorted({command.strip() for page in PAGES for command in TYPED.findall(page.read_text())})
STARTS = [command for command in COMMANDS if "--tiny" not in command and "--dry-run" not in command]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No Hugging Face Hub can be reached."""
    without_hub(monkeypatch, tmp_path)


def started(command: str, cwd: Path) -> tuple[Config, str, int]:
    """The settings that a command trains with, its recipe, and how many ranks it starts."""
    if "jackpot launch" in command:  # what the printed script types
        script = jackpot(*shlex.split(command)[1:], cwd=cwd).stdout
        nodes, ranks = re.search(r"torchrun --nnodes=(\d+) --nproc-per-node=(\d+)", script).groups()
        command = f"--nnodes={nodes} --nproc-per-node={ranks} " + re.search(r"jackpot train .*(?= &)", script)[0]
        command = command.replace("$run", "runs/one")

    launcher, _, words = command.partition("jackpot train ")
    [recipe, *words] = shlex.split(words)
    arm = words[words.index("--arm") + 1] if "--arm" in words else None
    config = resolve(recipe, arm, [word for word in words if re.match(r"[a-z_.]+=", word)])

    ranks = config.placement.ranks
    for count in re.findall(r"--(?:nnodes|nproc-per-node)[ =](\d+)", launcher):
        ranks *= int(count)

    return config, recipe, ranks


def kubernetes() -> str:
    """The command of the pods of examples/cluster/kubernetes.yaml."""
    job = next(yaml.safe_load_all((ROOT / "examples" / "cluster" / "kubernetes.yaml").read_text()))
    return shlex.join(job["spec"]["template"]["spec"]["containers"][0]["command"])


def test_the_pages_have_commands_that_start_gpu_recipes() -> None:
    assert {shlex.split(command.partition("jackpot ")[2])[0] for command in STARTS} == {"train", "launch"}, STARTS


@pytest.mark.parametrize("command", [*STARTS, kubernetes()])
def test_a_published_command_starts_on_enough_gpus(command: str, tmp_path: Path) -> None:
    config, recipe, ranks = started(command, tmp_path)
    assert ranks >= GPUS[recipe].count
    check_start(config, config.model_paths(), ranks)


@pytest.mark.slow  # tracing a step takes seconds
@pytest.mark.parametrize(
    "command", [STARTS[0], *(pytest.param(command, marks=pytest.mark.sweep) for command in STARTS[1:]), kubernetes()]
)
def test_a_published_command_fits_the_gpus_of_its_recipe(command: str, tmp_path: Path) -> None:
    config, recipe, ranks = started(command, tmp_path)
    memory = Estimator(config, model_sizes(config), prompt_lengths(config)).shard(GPUS[recipe].kind, ranks)
    assert memory.fits, f"{memory.peak / 1e9:.0f} of {memory.limit / 1e9:.0f} GB"


@pytest.mark.slow
@pytest.mark.parametrize(
    "arm",
    [
        pytest.param(arm, marks=[] if arm in ("obrs", "on_policy", "lora") else pytest.mark.sweep)
        for arm in list_recipe("one_gpu").arms
    ],
)
def test_one_gpu_takes_every_arm(arm: str, capsys: pytest.CaptureFixture[str]) -> None:
    gpus = "1x4090" if arm.startswith("lora") else None  # else that of the recipe
    train("one_gpu", [], arm, run=None, dry_run=True, gpus=gpus, tiny=False)
    assert (
        f"  jackpot train one_gpu --arm {arm}  # train, on 1 {'4090' if gpus else 'H100'}\n" in capsys.readouterr().out
    )
