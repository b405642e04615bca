"""What a plan says to type passes the checks of a start, for as many processes as it names."""

import re
import shlex
from pathlib import Path

import pytest
from transformers import CTRLConfig

from helpers.hub import without_hub
from helpers.runs import SMALL, FinishedRuns, small_config
from jackpot.analysis.plan.cost_model import GPUS
from jackpot.analysis.plan.estimate import CostEstimate, FlopShares, MachineEstimate
from jackpot.analysis.plan.sharding import Shard
from jackpot.analysis.plan.sizes import PromptLengths
from jackpot.analysis.plan.start import machine, start
from jackpot.config.config import Config
from jackpot.config.published import GpusConfig
from jackpot.config.recipes import load_recipe, recipe_names, recipe_notes, resolve
from jackpot.core.errors import CheckpointError, ConfigError, EngineError, JackpotError, ModelError
from jackpot.launch.checks import check_start
from jackpot.ui.commands.train import train

STATED = {name: recipe_notes(name, load_recipe(name)).gpus for name in recipe_names()}
ON_GPUS = [name for name, gpus in STATED.items() if gpus]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_hub(monkeypatch, tmp_path)


def typed(command: str) -> tuple[Config, int]:
    """The settings of a command that trains, and how many processes it starts."""
    launcher, _, words = command.partition("jackpot train ")
    words, _, run = words.partition(" --run ")
    recipe, *overrides = shlex.split(words)
    config = resolve(recipe, None, overrides)
    assert run == (f"runs/{recipe}-seed0" if "placement" in words else "")
    found = re.fullmatch(r"torchrun --nproc-per-node (\d+) -m -- ", launcher)
    assert found or not launcher
    return config, int(found[1]) if found else config.placement.ranks


def needs(gpus: GpusConfig, fits: bool = True, **fewest: int) -> CostEstimate:
    """An estimate as of a run that fits these GPUs, and that many of each kind."""
    parts = dict.fromkeys(("weights", "optimizer", "gradients", "gathered", "training", "resting", "generation"), 0.0)
    shard = Shard(gpus=gpus.count, limit=1.0 if fits else -1.0, tensor_parallel={}, **parts)
    row = MachineEstimate(gpus.kind, shard, None, None)
    return CostEstimate(PromptLengths(1024, 120, ""), 2048, [], row, fewest, [], FlopShares(1.0, 1.0))


def test_what_is_printed_for_every_gpu_recipe_starts() -> None:
    assert len(ON_GPUS) == 15
    for name in ON_GPUS:
        gpus, paths = STATED[name], resolve(name, None, []).model_paths()
        found = start(name, None, [], None, gpus.count)
        config, ranks = typed(found.command)
        check_start(config, paths, ranks)
        assert (ranks, config.placement.engines) == (gpus.count, gpus.count), found
        with pytest.raises(ConfigError, match=r"torch\.distributed") as refused:
            check_start(resolve(name, None, []), paths, gpus.count)
        assert found.refusal == str(refused.value)


def test_a_run_starts_on_the_gpus_of_its_recipe_or_the_fewest() -> None:
    config, eight = resolve("joint_8b", None, []), GpusConfig(kind="H100", count=8)
    assert machine(config, needs(eight, H100=4)) == eight
    assert machine(config, needs(eight, fits=False, H100=0, H200=4)) == GpusConfig(kind="H200", count=4)
    assert machine(config, needs(eight, fits=False, H100=0)) is None


def test_an_engine_that_one_gpu_does_not_hold_starts_nowhere() -> None:
    gpus = STATED["tis_dapo_32b"]
    assert machine(resolve("tis_dapo_32b", None, []), needs(gpus, H100=32, H200=8)) is None
    more = resolve("tis_dapo_32b", None, ["engine.gpu_memory_utilization=0.6"])
    assert machine(more, needs(gpus, H100=32, H200=8)) == GpusConfig(kind="H200", count=8)
    assert GPUS["H100"].memory * 0.6 < 65e9 < GPUS["H200"].memory * 0.6  # of weights


def test_one_gpu_needs_no_launcher_and_what_was_typed_stays(tmp_path: Path) -> None:
    assert start("quickstart", "tis", ["seed=1"], tmp_path / "a b", 1).command == shlex.join(
        ["jackpot", "train", "quickstart", "--arm", "tis", "seed=1", "--run", str(tmp_path / "a b")]
    )
    chosen = ["placement.engines=2", "engine.enable_sleep_mode=true"]
    assert start("joint_8b", None, chosen, None, 4).command.endswith(f"jackpot train joint_8b {' '.join(chosen)}")
    awake = typed(start("stale_4b", None, [], None, 16).command)[0]
    assert awake.engine.enable_sleep_mode and awake.shares_gpus  # Ray has other engines on GPUs of their own


@pytest.mark.parametrize(
    ("overrides", "error", "expected"),
    [
        (["policy.path=Qwen/Qwen2.5-7B", "rollout_model.path=Qwen/Qwen2.5-1.5B"], ModelError, "152064.* 151936"),
        (["objective.reference.path=Qwen/Qwen2.5-7B"], ModelError, "'reference': 152064"),
        (["objective.correction.normalizer=exact"], EngineError, "computes in bf16"),
        (["sampling.num_top_log_probs=200000"], ConfigError, "returns at most 151936"),
        (["sampling.max_new_tokens=9216"], ConfigError, "leaves no room for a prompt"),
        (["placement.launcher=ray", "placement.ranks=8"], ConfigError, "torch.distributed"),
    ],
)
def test_a_dry_run_refuses_what_a_start_refuses(
    overrides: list[str], error: type[JackpotError], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=expected):
        train("joint_8b", overrides, None, tmp_path, dry_run=True, tiny=False)


def test_a_dry_run_of_ranks_refuses_what_these_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "8")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(ConfigError, match=r"placement\.engines=8"):
        train("joint_8b", [], None, None, dry_run=True, tiny=False)


def test_a_dry_run_refuses_the_folder_of_other_settings(finished_run: FinishedRuns) -> None:
    with pytest.raises(CheckpointError, match="seed: 0 in the folder, 9 now"):
        train("quickstart", [*SMALL, "seed=9"], None, finished_run(), dry_run=True, tiny=False)


def test_ranks_refuse_a_model_that_cannot_be_sharded(tmp_path: Path) -> None:
    CTRLConfig(n_embd=8, n_layer=1, n_head=1, dff=8, vocab_size=32, architectures=[]).save_pretrained(tmp_path)
    config, paths = small_config("rollout_model=null", "sampling.num_top_log_probs=4"), {"policy": str(tmp_path)}
    check_start(config, paths, 1)
    with pytest.raises(ModelError, match="the policy, CTRLLMHeadModel, has no layers"):
        check_start(config, paths, 2)
