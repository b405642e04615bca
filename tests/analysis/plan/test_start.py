"""What a plan says to type passes the checks of a start, for as many processes as it names."""

import re
import shlex
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import CTRLConfig

from helpers.hub import without_hub
from helpers.runs import SMALL, FinishedRuns, small_config
from jackpot.analysis.plan.cost_model import GPUS
from jackpot.analysis.plan.estimate import CostEstimate, FlopShares, MachineEstimate, gpus_here
from jackpot.analysis.plan.sharding import Shard
from jackpot.analysis.plan.sizes import PromptLengths
from jackpot.analysis.plan.start import downloads, machines, start
from jackpot.config.config import Config
from jackpot.config.processes import place_engines
from jackpot.config.published import GpusConfig
from jackpot.config.recipes import load_recipe, recipe_names, recipe_notes, resolve
from jackpot.core.errors import CheckpointError, ConfigError, EngineError, JackpotError, ModelError
from jackpot.launch import checks
from jackpot.launch.checks import check_start
from jackpot.models.load import load_meta_model
from jackpot.ui.commands import train as train_command
from jackpot.ui.commands.train import train

STATED = {name: recipe_notes(name, load_recipe(name)).gpus for name in recipe_names()}
ON_GPUS = [name for name, gpus in STATED.items() if gpus]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is fetched from the hub, nor found in its cache."""
    without_hub(monkeypatch, tmp_path)


def typed(command: str) -> tuple[Config, int]:
    """The settings of a command that trains, and how many processes it starts."""
    launcher, _, words = command.partition("jackpot train ")
    words, _, run = words.partition(" --run ")
    recipe, *overrides = shlex.split(words)
    config = resolve(recipe, None, overrides)
    assert run == (f"runs/{recipe}-seed0" if "placement.launcher" in words else "")
    match = re.fullmatch(r"torchrun --nproc-per-node (\d+) -m -- ", launcher)
    assert match or not launcher
    return config, int(match[1]) if match else config.placement.ranks


def needs(gpus: GpusConfig, fits: bool = True, **fewest: int) -> CostEstimate:
    """An estimate as of a run that fits these GPUs, and that many of each kind."""
    parts = dict.fromkeys(("weights", "optimizer", "gradients", "gathered", "training", "resting", "generation"), 0.0)
    shard = Shard(gpus=gpus.count, limit=1.0 if fits else -1.0, tensor_parallel={}, **parts)
    row = MachineEstimate(gpus.kind, shard, hours=None, alone=None)
    return CostEstimate(PromptLengths(1024, 120, ""), 2048, [], row, [], fewest, FlopShares(1.0, 1.0))


def test_what_is_printed_for_every_gpu_recipe_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "load_meta_model", cache(load_meta_model))  # many recipes have the same models

    assert len(ON_GPUS) == 16

    for name in ON_GPUS:
        gpus, paths = STATED[name], resolve(name, None, []).model_paths()
        config, ranks = typed(start(name, arm=None, overrides=[], run=None, gpus=gpus.count))
        assert ranks == gpus.count and config.placement.engines == "auto"
        placed = place_engines(config, ranks, on_gpu=True)
        check_start(placed, paths, ranks)
        assert placed.placement.engines == (gpus.count if gpus.count > 1 else 0)
        assert placed.shares_gpus == (gpus.count > 1)


def test_a_run_starts_on_the_gpus_of_its_recipe_or_the_fewest() -> None:
    config, eight = resolve("joint_8b", None, []), GpusConfig(kind="H100", count=8)

    assert machines(config, needs(eight, H100=4), is_asked=False) == [eight]

    four = GpusConfig(kind="H200", count=4)
    assert machines(config, needs(eight, fits=False, H100=0, H200=4), is_asked=False) == [four]
    assert machines(config, needs(eight, fits=False, H100=0), is_asked=False) == []
    assert machines(config, needs(eight, fits=False, H100=0, H200=4), is_asked=True) == []

    here = needs(eight, H100=4)._replace(this_machine=[needs(four).stated])
    assert machines(config, here, is_asked=False) == [eight, four] and machines(config, here, is_asked=True) == [eight]


def test_an_engine_that_one_gpu_does_not_hold_starts_nowhere() -> None:
    gpus = STATED["tis_dapo_32b"]
    assert machines(resolve("tis_dapo_32b", None, []), needs(gpus, H100=32, H200=8), is_asked=False) == []
    more = resolve("tis_dapo_32b", None, ["engine.gpu_memory_utilization=0.6"])
    assert machines(more, needs(gpus, fits=False, H200=8), is_asked=False) == [GpusConfig(kind="H200", count=8)]
    assert GPUS["H100"].memory * 0.6 < 65e9 < GPUS["H200"].memory * 0.6  # of weights


def test_one_gpu_needs_no_launcher_and_what_was_typed_stays(tmp_path: Path) -> None:
    assert start("quickstart", "tis", ["seed=1"], tmp_path / "a b", 1) == shlex.join(
        ["jackpot", "train", "quickstart", "--arm", "tis", "seed=1", "--run", str(tmp_path / "a b")]
    )
    chosen = ["placement.engines=2", "engine.enable_sleep_mode=true"]
    command = start("joint_8b", arm=None, overrides=chosen, run=None, gpus=4)
    assert command.endswith(f"jackpot train joint_8b {' '.join(chosen)}")


def test_gpus_of_this_machine_are_of_a_kind_that_plans_know(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpus_here() is None

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name, memory, kind in (
        ("NVIDIA H100 80GB HBM3", 79.6e9, "H100"),
        ("NVIDIA GeForce RTX 4090", 25.3e9, "4090"),
        ("NVIDIA A100-SXM4-40GB", 42e9, None),
    ):
        device = SimpleNamespace(name=name, total_memory=memory)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index, device=device: device)
        assert gpus_here() == (kind and GpusConfig.model_validate({"kind": kind, "count": 2}))


def test_models_of_the_hub_alone_are_downloaded_first(tmp_path: Path) -> None:
    config = resolve("joint_8b", None, [f"policy.path={tmp_path}", "objective.reference.path=Qwen/Qwen3-8B-Base"])
    assert downloads(config) == ["hf download Qwen/Qwen3-1.7B-Base", "hf download Qwen/Qwen3-8B-Base"]
    settings = ["objective.advantage=gae", "critic={path: Qwen/Qwen3-4B-Base, optimizer: {learning_rate: 1e-5}}"]
    assert "hf download Qwen/Qwen3-4B-Base" in downloads(resolve("joint_8b", None, settings))


def test_gpus_that_are_asked_about_are_as_many_as_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_command, "_plan", lambda *_: None)  # as of models that are small
    train("quickstart", dry_run=True, gpus="1xH100")
    assert "1 H100 are not asked about: models as small as these fit any GPU" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="names 8 GPUs, and 2 ranks train"):
        train("quickstart", ["placement.launcher=ray", "placement.ranks=2"], dry_run=True, gpus="8xH100")


LONGER = ["policy.path=Qwen/Qwen2.5-7B", "rollout_model.path=Qwen/Qwen2.5-1.5B"]
SLEEPLESS = "enable_sleep_mode: false"
DRAFTS = [
    "rollout_model.share=0.5",
    f"engine={{{SLEEPLESS}}}",
    f"evaluation.engine={{{SLEEPLESS}, draft: {{tokens: 3}}}}",
]


@pytest.mark.parametrize(
    ("overrides", "error", "expected"),
    [
        ([*LONGER, "sampling.num_top_log_probs=152000"], ConfigError, "returns at most 151936"),
        (
            [*LONGER, "evaluation.engine={name: sglang_server, urls: ['http://a:1'], weights_folder: w}"],
            EngineError,
            r"sglang_server samples from all 152064 .*Qwen2.5-7B, .* has 151936;.*_embeddings\(151936",
        ),
        ([*LONGER, *DRAFTS], EngineError, "evaluation.engine=vllm with drafts samples from all 152064"),
        (["objective.correction.normalizer=exact"], EngineError, "computes in bf16"),
        (["sampling.num_top_log_probs=200000"], ConfigError, "returns at most 151936"),
        (["sampling.max_new_tokens=9216"], ConfigError, "leaves no room for a prompt"),
        (["placement.launcher=ray", "placement.ranks=8", "placement.engines=0"], ConfigError, "torch.distributed"),
    ],
)
def test_a_dry_run_refuses_what_a_start_refuses(
    overrides: list[str], error: type[JackpotError], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=expected):
        train("joint_8b", overrides, arm=None, run=tmp_path, dry_run=True, gpus=None, tiny=False)


def test_a_dry_run_of_ranks_refuses_what_these_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "8")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")

    with pytest.raises(ConfigError, match=r"leave placement\.engines out"):
        train("joint_8b", ["placement.engines=0"], arm=None, run=None, dry_run=True, gpus=None, tiny=False)


def test_a_dry_run_refuses_the_folder_of_other_settings(finished_run: FinishedRuns) -> None:
    with pytest.raises(CheckpointError, match="seed: 0 in the folder, 9 now"):
        train("quickstart", [*SMALL, "seed=9"], arm=None, run=finished_run(), dry_run=True, gpus=None, tiny=False)


def test_ranks_refuse_a_model_that_cannot_be_sharded(tmp_path: Path) -> None:
    CTRLConfig(n_embd=8, n_layer=1, n_head=1, dff=8, vocab_size=32, architectures=[]).save_pretrained(tmp_path)
    config, paths = small_config("rollout_model=null", "sampling.num_top_log_probs=4"), {"policy": str(tmp_path)}
    check_start(config, paths, 1)
    with pytest.raises(ModelError, match="the policy, CTRLLMHeadModel, has no layers"):
        check_start(config, paths, 2)
