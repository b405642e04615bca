"""The hours of a whole run on each placement on GPUs are those of docs/cost.md and of sums by hand."""

from pathlib import Path

import pytest

from helpers.hub import without_hub
from helpers.runs import small_config
from jackpot.analysis.plan.cost_model import GPUS, Hours
from jackpot.analysis.plan.estimate import Estimator
from jackpot.analysis.plan.sharding import cache_bytes
from jackpot.analysis.plan.sizes import model_sizes, prompt_lengths
from jackpot.config.config import Config
from jackpot.config.recipes import resolve
from jackpot.core.errors import ConfigError
from research.placements import (
    PlacedRun,
    batches_at_once,
    cheapest,
    overlapped,
    placed_runs,
    split_hours,
    without_learner,
)

GPU = GPUS["H100"]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No Hugging Face Hub and no folder of data can be reached."""
    without_hub(monkeypatch, tmp_path)
    monkeypatch.delenv("JACKPOT_DATA", raising=False)


def estimator(config: Config, response: float) -> Estimator:
    """Estimate a run whose responses have this mean length."""
    return Estimator(config, model_sizes(config), prompt_lengths(config), response)


def joint_8b(*overrides: str) -> Estimator:
    """Estimate the recipe of two models of 8B and 1.7B."""
    return estimator(resolve("joint_8b", None, ["iterations=3600", *overrides]), 2048.0)  # hours are seconds of one


def test_shared_gpus_take_what_the_worked_example_takes() -> None:
    plan = joint_8b()
    hours = plan.run_hours(plan.shares(GPU, 8))
    by_stage = (hours.generation, hours.training, hours.sending)
    assert by_stage == pytest.approx((33.0, 34.1, 0.7), abs=0.05)  # docs/cost.md


def test_a_split_hides_what_it_does_at_the_same_time() -> None:
    plan = joint_8b()
    shared = plan.run_hours(plan.shares(GPU, 8))
    # two GPUs generate and six train; the policy learns so many batches behind
    in_turn = split_hours(plan, GPU, 2, 6, 0)
    one_ahead = split_hours(plan, GPU, 2, 6, 1)
    three_ahead = split_hours(plan, GPU, 2, 6, 3)

    assert in_turn.training == pytest.approx(shared.training * 8 / 6) and in_turn.generation > shared.generation
    assert one_ahead.generation == pytest.approx(in_turn.generation - in_turn.training)  # what the learner waits for
    assert one_ahead.sending == in_turn.sending == shared.sending and three_ahead.sending == one_ahead.sending / 2
    assert three_ahead.generation < one_ahead.generation  # the tails of two batches overlap
    assert (
        one_ahead.training == three_ahead.training == in_turn.training
        and one_ahead.evaluating == in_turn.evaluating > 0
    )
    assert split_hours(plan, GPU, 4, 4, 3).generation == 0.0  # training takes longer


def test_a_split_has_engines_with_more_memory_and_idle_ranks() -> None:
    plan = joint_8b()
    assert plan.shares(GPU, 3, without_learner(plan.needs)).rollout_model.cache_bytes > (
        plan.shares(GPU, 3).rollout_model.cache_bytes
    )

    most = plan.work().micro_batches
    hours = {gpus: split_hours(plan, GPU, 1, gpus, 1).training for gpus in (most // 2, most, 8 * most)}
    assert hours[most] < hours[most // 2]
    assert hours[most] == pytest.approx(hours[8 * most], rel=0.02)  # but for AdamW, which all ranks share


def test_engines_on_gpus_of_their_own_take_nine_tenths() -> None:
    plan = joint_8b()
    alone = without_learner(plan.needs)
    shares = {name: need.settings.gpu_memory_utilization for name, need in alone.items()}

    assert sum(shares.values()) == pytest.approx(0.9) and shares["engine"] / shares["evaluation.engine"] == 0.4 / 0.35
    assert cache_bytes(alone["engine"], 1, GPU) > cache_bytes(plan.needs["engine"], 1, GPU)

    needs = estimator(small_config("engine={name: vllm, kv_cache_memory_bytes: 1000}"), 20.0).needs
    assert without_learner(needs) == needs


def placed(config: Config, gpus: int, response: float = 20.0) -> list[PlacedRun]:
    """Every placement of a run on this many H100s."""
    return placed_runs(config, estimator(config, response), "H100", gpus)


def test_the_cheapest_is_the_least_of_all_that_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jackpot.analysis.plan.memory.dry_step", lambda config, shape: 0)  # its memory fits anyway
    runs = placed(small_config(), 3)
    assert [str(run.placement) for run in runs] == ["shared", "1 + 2", "2 + 1"]
    assert [list(run.by_ahead) for run in runs] == [[0], [0, 1, 3, 7], [0, 1, 3, 7]]

    best, ahead = cheapest(runs)
    hours = [hours.all for run in runs for hours in run.by_ahead.values()]
    assert best.by_ahead[ahead].all == min(hours) and best.by_ahead[ahead].evaluating > 0


@pytest.mark.slow
def test_a_placement_without_the_room_has_no_hours() -> None:
    config = resolve("joint_8b", None, [])
    runs = placed(config, 8, 2048.0)
    assert [str(run.placement) for run in runs if not run.by_ahead] == ["6 + 2", "7 + 1"]

    evaluating = [runs[index].by_ahead[0].evaluating for index in (0, 5, 1)]  # on 8, 5 and 1 GPUs
    assert evaluating == sorted(evaluating)

    with pytest.raises(ConfigError, match="fits on no placement"):
        placed(config, 2)


@pytest.mark.parametrize(("ahead", "batches"), [(0, 1), (1, 1), (2, 1), (3, 2), (4, 2), (5, 3), (7, 4)])
def test_batches_between_two_updates_of_the_weights(ahead: int, batches: int) -> None:
    assert batches_at_once(ahead) == batches


@pytest.mark.parametrize(
    ("generation", "training", "batches", "seconds"),
    [
        (8.0, 10.0, 1, 10 + 1),  # generation is hidden
        (8.0, 3.0, 1, 8 + 1),  # training is hidden
        (16 / 2, 10.0, 2, (20 + 1) / 2),  # two batches of 8 s together while two are trained on
        (16 / 2, 3.0, 2, (16 + 1) / 2),
    ],
)
def test_what_overlaps_takes_as_long_as_its_timeline(
    generation: float, training: float, batches: int, seconds: float
) -> None:
    hours = overlapped(Hours(generation, training, sending=1.0, evaluating=5.0), batches)
    assert hours.iterations == seconds and (hours.training, hours.evaluating) == (training, 5.0)
