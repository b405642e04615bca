"""A run that was stopped and continued ends bit-equal to one that was not, and only with the settings it began with."""

import shutil
import signal
from contextlib import closing
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from helpers.runs import BRIEF, SHORT, FinishedRuns, assert_same_run, metrics, run, run_and_copy, small_config, weights
from jackpot.core.errors import CheckpointError
from jackpot.launch.start import launch
from jackpot.models.hub import starter_path
from jackpot.training.run_folder.checkpoint import load_state

REGIMES = {
    "stale, dynamic": (
        "batch.group_size=2",
        "batch.mini_batch_size=4",
        "batch.ppo_epochs=2",
        "batch.micro_batch_tokens=128",
        "batch.filter_groups.max_num_gen_batches=2",
        "objective.correction.target=new",
        "objective.overlong_buffer.len=4",
        "rollout_model.distill_control={target: 0.05, horizon: 1}",
    ),
    "one-pass kappa, iteration": (
        "batch.mini_batch_size=8",
        "batch.micro_batch_tokens=64",
        "sampling.num_top_log_probs=2",
        "objective.correction={c1: 1.1, kappa_tolerance: 0}",
        "policy.optimizer.schedule=cosine",
        "rollout_model.update=iteration",
    ),
    "tool, frozen, reference": (
        "task=tool_arithmetic",
        "sampling.max_new_tokens=16",
        "rollout_model.optimizer=null",
        "objective.reference.kl_loss_coef=0.1",
        "objective.entropy_coeff=0.01",
    ),
    "frozen policy": (
        *("policy.optimizer=null", "objective.correction=none", "batch.mini_batch_size=8"),
        *("rollout_model.share=0.0", "rollout_model.ppo_weight=0.0"),
    ),
    "on policy": ("rollout_model=null", "objective.correction=none"),
    "lora on both, gae": (
        *("policy.lora.rank=4", "rollout_model.lora.rank=2"),
        *("objective.advantage=gae", "critic.optimizer.learning_rate=1e-3"),
    ),
    "lora on policy, quantized": (
        *("policy.lora.rank=4", "rollout_model=null", "objective.correction=tis", "engine.quantization=int8_w8a8"),
    ),
    "quantized writer": ("engine.quantization=fp8", "engine.kv_cache_dtype=fp8", "evaluation.engine=transformers"),
}
SLOW_REGIMES = (  # the quick ones have much of them
    *("one-pass kappa, iteration", "stale, dynamic", "frozen policy"),
    *("lora on both, gae", "lora on policy, quantized", "quantized writer"),
)


@pytest.mark.parametrize(
    "regime", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW_REGIMES else name for name in REGIMES]
)
def test_a_killed_run_continues_bit_equal(regime: str, tmp_path: Path) -> None:
    config = small_config(*BRIEF, *REGIMES[regime])

    run_and_copy(config, tmp_path / "whole", tmp_path / "killed", after=3)  # the checkpoint is that of iteration 2
    assert metrics(tmp_path / "killed")[-1]["iteration"] == 3
    with (tmp_path / "killed" / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "reward/me')  # a line cut short
    (tmp_path / "killed" / "rollouts" / "iteration-000004.parquet.partial").write_bytes(b"half a file")

    run(config, tmp_path / "killed")

    roles = ["policy"] if config.rollout_model is None else ["policy", "rollout_model"]
    assert_same_run(tmp_path / "whole", tmp_path / "killed", roles + (["critic"] if config.critic else []))


def test_a_run_killed_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    """One of its models has an adapter, the other one none."""
    config = small_config(*BRIEF, "iterations=2", "policy.lora.rank=4", "policy.optimizer.learning_rate=1e-3")
    run_and_copy(config, tmp_path / "whole", tmp_path / "killed", after=1)
    (tmp_path / "killed" / "checkpoints" / "step-2.partial").mkdir()  # it was about to be written
    lines_before = (tmp_path / "killed" / "metrics.jsonl").read_bytes()

    run(config, tmp_path / "killed")

    assert_same_run(tmp_path / "whole", tmp_path / "killed", ["policy", "rollout_model"])
    assert (tmp_path / "killed" / "superseded" / "1" / "metrics.jsonl").read_bytes() == lines_before


def test_training_moves_both_models_and_counts_their_steps(finished_run: FinishedRuns) -> None:
    folder = finished_run()

    for role in ("policy", "rollout_model"):
        starter_weights = load_file(starter_path(role) / "model.safetensors")
        trained_weights = weights(folder, role)
        assert not any(torch.equal(trained_weights[name], tensor) for name, tensor in starter_weights.items())

    state = load_state(folder / "checkpoints" / "last")
    assert state["version"][1] == 4
    assert state["version"][0] <= 4


def test_a_changed_setting_is_refused_and_named(finished_run: FinishedRuns, tmp_path: Path) -> None:
    finished_run.copy(tmp_path, kill_after=3)
    config_before = (tmp_path / "config.yaml").read_text()

    with pytest.raises(CheckpointError, match=r"objective\.correction\.lam: 1\.0 in the folder, 2\.0 now"):
        launch(small_config("objective.correction.lam=2.0"), tmp_path, lambda line: None)

    assert (tmp_path / "config.yaml").read_text() == config_before
    assert metrics(tmp_path)[-1]["iteration"] == 3


def test_a_start_mends_what_a_kill_left_behind(finished_run: FinishedRuns, tmp_path: Path) -> None:
    """A partial checkpoint is never taken for one, and links are made again."""
    finished_run.copy(tmp_path, kill_after=3)
    checkpoints = tmp_path / "checkpoints"
    links = {name: (checkpoints / name).readlink() for name in ("last", "best")}
    for name in links:
        (checkpoints / name).unlink()
    partial = checkpoints / "step-3.partial"
    partial.mkdir()
    (partial / "state.pt").write_bytes(b"half a file")

    with closing(launch(small_config(), tmp_path, lambda line: None)) as trainer:
        assert trainer.iteration == 2

    assert {name: (checkpoints / name).readlink() for name in links} == links
    assert not partial.exists()


def test_only_the_newest_and_the_best_checkpoint_are_kept(tmp_path: Path) -> None:
    run(small_config("iterations=3", "checkpoint.every=1", "checkpoint.keep=1", "evaluation.every=1"), tmp_path)

    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert (tmp_path / "checkpoints" / "last").readlink().name == "step-3"

    best_name = (tmp_path / "checkpoints" / "best").readlink().name
    assert names == {"last", "best", "step-3", best_name}

    accuracy = {line["iteration"]: line["eval/policy_accuracy"] for line in metrics(tmp_path) if line["iteration"]}
    assert accuracy[int(best_name.removeprefix("step-"))] == max(accuracy.values())


def test_the_run_folder_holds_the_resolved_settings(finished_run: FinishedRuns) -> None:
    config = small_config()
    assert type(config).model_validate(yaml.safe_load((finished_run() / "config.yaml").read_text())) == config


def test_another_regime_is_refused_with_the_difference(finished_run, tmp_path: Path) -> None:
    finished_run.copy(tmp_path, "iterations=2", arm="on_policy")
    with pytest.raises(CheckpointError, match=r"rollout_model: null in the folder"):
        launch(small_config("iterations=2"), tmp_path, lambda line: None)


def test_a_setting_that_came_later_does_not_stop_an_older_run(finished_run: FinishedRuns, tmp_path: Path) -> None:
    finished_run.copy(tmp_path, kill_after=3)
    settings = yaml.safe_load((tmp_path / "config.yaml").read_text())
    del settings["rollouts"]  # as if that block had not existed yet
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))

    with closing(launch(small_config(), tmp_path, lambda line: None)) as trainer:
        assert trainer.iteration == 2


def test_a_run_that_has_not_trained_yet_takes_other_settings(finished_run: FinishedRuns, tmp_path: Path) -> None:
    finished_run.copy(tmp_path, kill_after=0)
    run(small_config(SHORT, "iterations=1"), tmp_path)
    assert metrics(tmp_path)[-1]["iteration"] == 1


def test_a_new_best_is_kept_whenever_it_is_found(tmp_path: Path) -> None:
    cadence = ("evaluation.every=1", "checkpoint.every=100", "checkpoint.keep=1")

    run(small_config(SHORT, "iterations=2", *cadence), tmp_path)

    lines = [line for line in metrics(tmp_path) if line["iteration"]]
    best_iteration = max(lines, key=lambda line: (line["eval/policy_accuracy"], -line["iteration"]))[
        "iteration"
    ]  # the first one
    assert (tmp_path / "checkpoints" / "best").readlink().name == f"step-{best_iteration}"
    assert (tmp_path / "checkpoints" / f"step-{best_iteration}" / "policy" / "model.safetensors").is_file()


def test_after_ctrl_c_before_iteration_1_settings_may_change(tmp_path: Path) -> None:
    with closing(launch(small_config(SHORT), tmp_path, lambda line: signal.raise_signal(signal.SIGINT))) as trainer:
        assert not trainer.train()
        assert trainer.iteration == 0

    assert not list((tmp_path / "checkpoints").iterdir())

    run(small_config(SHORT, "iterations=1", "rollout_model.optimizer=null"), tmp_path)
    assert metrics(tmp_path)[-1]["iteration"] == 1


def test_a_run_is_not_continued_beside_another_reference(tmp_path: Path) -> None:
    reference = tmp_path / "reference"
    shutil.copytree(starter_path("policy"), reference)
    overrides = ("objective.reference={kl_loss_coef: 0.1}", f"objective.reference.path={reference}")
    config = small_config(SHORT, "iterations=1", *overrides)
    run(config, tmp_path / "run")
    shutil.copy(tmp_path / "run" / "checkpoints" / "last" / "policy" / "model.safetensors", reference)

    with pytest.raises(CheckpointError, match=r"objective\.reference are not those that the run began with"):
        launch(config, tmp_path / "run", lambda line: None)
