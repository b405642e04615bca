"""Which tokens and steps each metric of an iteration counts, and the metrics that are computed from others."""

import math
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch

from helpers.runs import FinishedRuns, read_lines
from jackpot.core.clock import Seconds
from jackpot.core.metrics import ClusteredMean, EffectiveSampleSize, Mean
from jackpot.training.iteration_metrics import (
    FEWEST_TOKENS,
    WITH_STANDARD_ERROR,
    metric_values,
    throughput,
    training_sums,
)
from jackpot.training.learner import StepResult


def step_with_means(**values: float) -> StepResult:
    """A step of 200 tokens, each of which has these values."""
    means = {name: Mean.numbers([value] * 200) for name, value in values.items()}
    return StepResult(metrics=means, events=(), traces={})


def test_standard_errors_are_of_the_first_epoch_alone() -> None:
    names = (*WITH_STANDARD_ERROR, "obrs/z")
    steps = [step_with_means(**dict.fromkeys(names, value)) for value in (1.0, 3.0, 10.0, 20.0)]  # two an epoch
    components = SimpleNamespace(config=SimpleNamespace(batch=SimpleNamespace(ppo_epochs=2)))

    metrics = metric_values(training_sums([], steps, components, iteration=1))

    assert [metrics[name] for name in WITH_STANDARD_ERROR] == [2.0, 2.0]  # of 1 and 3, the first epoch
    assert metrics["obrs/z"] == 8.5  # of 1, 3, 10 and 20, both epochs
    assert metrics["mismatch/ess"] == pytest.approx(4.0**2 / (2 * 10.0))


def test_an_effective_share_of_a_handful_of_tokens_is_null() -> None:
    def shares(count: int) -> list[float]:
        weights = torch.linspace(0.5, 2.0, count)
        mask = torch.ones(count, dtype=torch.bool)
        sums = {name: Mean.of(weights, mask) for name in ("mismatch/ratio", "correction/weight")}
        sums["mismatch/prefix_ess_at_16-63"] = EffectiveSampleSize.of(weights.log(), mask)
        sums["mismatch/sequence_ess"] = EffectiveSampleSize.of(weights.log(), mask)

        metrics = metric_values(sums)
        assert 0.5 < metrics["mismatch/sequence_ess"] < 1.0  # of whole responses, of which a batch may have few
        return [metrics[name] for name in ("mismatch/ess", "correction/ess", "mismatch/prefix_ess_at_16-63")]

    assert all(map(math.isnan, shares(FEWEST_TOKENS - 1)))
    assert shares(FEWEST_TOKENS) == pytest.approx([shares(FEWEST_TOKENS)[0]] * 3)  # none is null


def test_explained_variance_is_what_the_error_leaves() -> None:
    returns = torch.tensor([0.0, 1.0, 0.0, 3.0])
    errors = torch.tensor([0.5, 0.5, 0.0, 1.0])
    mask = torch.ones(4, dtype=torch.bool)
    metrics = metric_values({"critic/error": Mean.of(errors, mask), "critic/return": Mean.of(returns, mask)})

    unexplained_share = errors.var(correction=0) / returns.var(correction=0)
    assert metrics == {"critic/return": 1.0, "critic/explained_variance": pytest.approx(1.0 - unexplained_share.item())}


def test_an_iteration_without_metrics_has_none() -> None:
    assert metric_values({}) == {}


@pytest.mark.parametrize(
    ("tokens", "overlaps", "speeds"),
    [
        (10.0, False, {"speed/tokens_per_second": 2.0, "speed/rollout_tokens_per_second": 5.0}),
        (10.0, True, {"speed/tokens_per_second": 2.0}),  # how long generation alone takes is unknown
        (None, False, {}),
        (0.0, True, {}),
    ],
)
def test_throughput_is_tokens_over_seconds(tokens, overlaps, speeds) -> None:
    phases = {"rollout": Seconds(2.0, 1.0), "train": Seconds(3.0, 2.5)}  # of the clock, and of the CPU

    metrics = throughput(phases, tokens, overlaps)

    seconds = {"seconds/rollout": 2.0, "seconds/train": 3.0, "cpu_seconds/rollout": 1.0, "cpu_seconds/train": 2.5}
    assert metrics == seconds | speeds


def test_what_was_trained_on_counts_once_an_epoch(finished_run: FinishedRuns) -> None:
    folder = finished_run("iterations=1", "batch.ppo_epochs=2", "evaluation.problems=2")
    rows = pq.read_table(folder / "rollouts" / "iteration-000001.parquet").to_pylist()
    line = read_lines(folder)[1]

    assert line["tokens/train"] == 2 * sum(len(row["token_ids"]) for row in rows)
    assert line["reward/frac_zero_std"] == sum(not any(row["advantages"]) for row in rows) / len(rows)


def test_the_error_of_acceptance_is_clustered_by_response() -> None:
    mask = torch.ones(30, 4, dtype=torch.bool)
    gaps_by_response = torch.linspace(-0.2, 0.3, 30, dtype=torch.float64)[:, None].expand(30, 4)  # one error a response

    def error(gaps: torch.Tensor, z: float) -> float:
        sums = {
            "obrs/acceptance_by_response": ClusteredMean.of(gaps, mask),
            "obrs/acceptance_variance": Mean.of(torch.full(mask.shape, z * (1.0 - z)), mask),
        }
        return metric_values(sums)["obrs/acceptance_minus_z_stderr"]

    assert error(gaps_by_response, 1.0) == pytest.approx(float(gaps_by_response[:, 0].std()) / math.sqrt(30), rel=1e-9)

    coin_error = math.sqrt(0.999 * 0.001 / 120)  # of 30 times 4 coins, where the gaps are all alike
    assert error(torch.full((30, 4), 1e-3), 0.999) == pytest.approx(coin_error, rel=1e-6)
