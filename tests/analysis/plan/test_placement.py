"""Placements of whole runs on GPUs. Expectations: docs/cost.md, sums by hand."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.hub import without_hub
from helpers.runs import small_config
from jackpot.analysis.plan import placement as module
from jackpot.analysis.plan.cost_model import GPUS
from jackpot.analysis.plan.estimate import Estimator
from jackpot.analysis.plan.events import simulate
from jackpot.analysis.plan.placement import Placement, Placements, residents, tried
from jackpot.analysis.plan.sharding import cache_bytes, without_learner
from jackpot.analysis.plan.sizes import model_sizes, prompt_lengths
from jackpot.config.recipes import resolve
from jackpot.config.run import Config

SHARED = Placement(8, 8, True)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_hub(monkeypatch, tmp_path)
    monkeypatch.delenv("JACKPOT_DATA", raising=False)


def placements(config: Config, response: float) -> Placements:
    return Placements(config, Estimator(config, model_sizes(config), prompt_lengths(config), response), "H100", 0)


def joint_8b(*overrides: str) -> Placements:
    return placements(resolve("joint_8b", None, list(overrides)), 2048.0)


WORKED_EXAMPLE = 33.0 + 34.1 + 0.7  # docs/cost.md: generation, training, sending; to 0.1 each


def test_shared_gpus_take_what_the_cost_model_says_and_the_last_engine_decides() -> None:
    found = joint_8b()
    cluster = found.cluster(SHARED, 0)
    assert cluster.training == pytest.approx(34.1, abs=0.05) and cluster.sending == pytest.approx(0.7, abs=0.05)
    lengths = sorted(response for number in range(8) for response in found.batch(number))
    alike = [response for response in lengths[:: len(lengths) // 64][:64] for _ in range(8)]  # each engine the same
    assert simulate(cluster, [alike] * 3, 1).seconds == pytest.approx(WORKED_EXAMPLE, rel=0.03)
    assert 1.02 < found.simulate(cluster).seconds / WORKED_EXAMPLE < 1.06


def test_splits_have_engines_with_more_memory_and_a_learner_without_any() -> None:
    found = joint_8b()
    shared, split = found.cluster(SHARED, 0), found.cluster(Placement(3, 5, False), 1)
    assert (shared.engines, split.engines, split.ahead) == (8, 3, 1)
    assert split.training == pytest.approx(shared.training * 8 / 5)
    assert split.models[0].slots > shared.models[0].slots
    most = found.micro_batches
    whole, half, more = (found.cluster(Placement(1, gpus, False), 1).training for gpus in (most, most // 2, 8 * most))
    assert whole == more < half  # a rank without a micro-batch only waits


def test_engines_on_gpus_of_their_own_take_nine_tenths_of_the_memory() -> None:
    config = resolve("joint_8b", None, [])
    plan = Estimator(config, model_sizes(config), prompt_lengths(config))
    alone = without_learner(plan.needs)
    shares = {name: one.settings.gpu_memory_utilization for name, one in alone.items()}
    assert sum(shares.values()) == pytest.approx(0.9) and shares["engine"] / shares["evaluation.engine"] == 0.4 / 0.35
    gpu = GPUS["H100"]
    assert cache_bytes(alone["engine"], 1, gpu) > cache_bytes(plan.needs["engine"], 1, gpu)
    fixed = small_config("engine={name: vllm, kv_cache_memory_bytes: 1000}")
    needs = Estimator(fixed, model_sizes(fixed), prompt_lengths(fixed)).needs
    assert without_learner(needs) == needs


def test_two_models_take_turns_and_both_are_sent() -> None:
    alone, half = joint_8b(), joint_8b("rollout_model.share=0.5")
    cluster = half.cluster(SHARED, 0)
    assert [response.model for response in half.batch(0)] == [0] * 256 + [1] * 256
    assert len(cluster.models) == 2 and cluster.sending > alone.cluster(SHARED, 0).sending
    policy = joint_8b("rollout_model=null", "evaluation.engine=null", "objective.correction=none")
    assert {response.model for response in policy.batch(0)} == {0} == {one.model for one in alone.batch(0)}
    assert alone.cluster(SHARED, 0).sending < cluster.sending


def test_drafts_make_the_policy_faster() -> None:
    transformers = ("engine=transformers", "evaluation.engine=transformers", "rollout_model.share=0.0")
    plain, drafted = (
        joint_8b(*transformers, *more).cluster(SHARED, 0).models[1]
        for more in ((), ("evaluation.engine.draft.tokens=3",))
    )
    assert drafted.decode(100, 100, 1e4) < plain.decode(100, 100, 1e4)


def test_the_cheapest_is_the_least_of_all_that_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AHEAD", (0, 1, 3))
    found = placements(small_config(), 20.0).plan(3, restart=1.0)
    assert [str(run.placement) for run in found.runs] == ["shared", "1 + 2", "2 + 1"]
    assert [list(run.by_ahead) for run in found.runs] == [[0], [0, 1, 3], [0, 1, 3]]
    assert [list(run.in_flight) for run in found.runs] == [[], [1, 3], [1, 3]]
    best, ahead = found.cheapest()
    hours = [run.hours(number) for run in found.runs for number in run.by_ahead]
    assert best.hours(ahead) == min(hours) and best.evaluating > 0
    run, number = found.fastest()
    assert run.by_ahead[number].seconds == min(one.seconds for run in found.runs for one in run.by_ahead.values())
    assert list(found.deaths) == [math.inf, 3600.0, 600.0]


def test_of_many_gpus_splits_are_tried_in_equal_steps() -> None:
    assert [one.generating for one in tried(64)] == [64, *range(4, 64, 4)]
    assert all(one.gpus == 64 for one in tried(64)) and len(tried(16)) == 16


@pytest.mark.slow
def test_a_placement_without_the_room_is_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AHEAD", (0,))
    found = joint_8b().plan(8, restart=120.0)
    assert list(map(str, found.no_room)) == ["6 + 2", "7 + 1"]
    assert found.runs[0].evaluating < found.runs[-1].evaluating < found.runs[1].evaluating  # on 8, 5 and 1 GPUs
    with pytest.raises(module.ConfigError, match="fits on no placement"):
        joint_8b().plan(2, restart=120.0)


SERVERS = "engine={name: vllm_server, urls: ['http://127.0.0.1:1'], weights_folder: /tmp/w}"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            (),
            {
                "this process": [
                    "learner of policy, rollout model",
                    "transformers engine of rollout model, for rollouts",
                    "transformers engine of policy, for evaluations",
                ]
            },
        ),
        (
            (
                SERVERS,
                "evaluation.engine={name: vllm, device: 1}",
                "critic.optimizer.learning_rate=1e-3",
                "objective.advantage=gae",
            ),
            {
                "this process": ["learner of policy, rollout model, critic"],
                "servers http://127.0.0.1:1": ["vllm_server engine of rollout model, for rollouts"],
                "this process, GPU 1": ["vllm engine of policy, for evaluations"],
            },
        ),
        (
            ("placement.engines=2",),
            {
                "this process": ["learner of policy, rollout model"],
                "each of 2 engine processes": [
                    "transformers engine of rollout model, for rollouts",
                    "transformers engine of policy, for evaluations",
                ],
            },
        ),
        (
            ("rollout_model=null", "objective.correction=none"),
            {"this process": ["learner of policy", "transformers engine of policy, for rollouts"]},
        ),
    ],
)
def test_who_goes_where(overrides: tuple[str, ...], expected: dict[str, list[str]]) -> None:
    assert residents(small_config(*overrides), 1) == expected


def test_of_several_ranks_each_holds_a_share_and_the_first_one_the_engines() -> None:
    assert residents(small_config("evaluation.engine={name: vllm, device: 1}"), 3) == {
        "rank 0": ["1/3 of the learner of policy, rollout model", "transformers engine of rollout model, for rollouts"],
        "rank 0, GPU 1": ["vllm engine of policy, for evaluations"],
        "each of ranks 1 to 2": ["1/3 of the learner of policy, rollout model"],
    }


def test_a_learner_that_offloads_has_no_weights_on_gpus_of_its_own() -> None:
    split = Placement(1, 2, False)
    kept, offloaded = (
        placements(small_config(*overrides), 12.0)._run(split).training
        for overrides in ((), ("placement.offload=true",))
    )
    assert kept.weights > 0 and offloaded == replace(kept, weights=0.0, optimizer=0.0, gradients=0.0)
