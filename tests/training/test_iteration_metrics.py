"""Which tokens the metrics of an iteration are of."""

import math
from types import SimpleNamespace

import pytest
import torch

from jackpot.core.metrics import EffectiveSampleSize, Mean
from jackpot.training.iteration_metrics import FEWEST_TOKENS, WITH_STANDARD_ERROR, metric_values, training_sums
from jackpot.training.learner import StepResult


def step(**values: float) -> StepResult:
    names = {name: Mean.numbers([value] * 200) for name, value in values.items()}
    return StepResult(metrics=names, events=(), traces={})


def test_metrics_with_a_standard_error_are_of_the_first_epoch_and_others_of_all() -> None:
    steps = [step(**dict.fromkeys((*WITH_STANDARD_ERROR, "obrs/z"), value)) for value in (1.0, 3.0, 10.0, 20.0)]
    components = SimpleNamespace(config=SimpleNamespace(batch=SimpleNamespace(ppo_epochs=2)))
    found = metric_values(training_sums([], steps, components))
    assert [found[name] for name in WITH_STANDARD_ERROR] == [2.0, 2.0]
    assert found["obrs/z"] == 8.5
    assert found["mismatch/ess"] == pytest.approx(4.0**2 / (2 * 10.0))


def test_an_effective_share_of_a_handful_of_tokens_is_null() -> None:
    def shares(count: int) -> list[float]:
        weights = torch.linspace(0.5, 2.0, count)
        mask = torch.ones(count, dtype=torch.bool)
        sums = {name: Mean.of(weights, mask) for name in ("mismatch/ratio", "correction/weight")}
        sums["mismatch/prefix_ess_at_16-63"] = EffectiveSampleSize.of(weights.log(), mask)
        sums["mismatch/sequence_ess"] = EffectiveSampleSize.of(weights.log(), mask)
        found = metric_values(sums)
        assert 0.5 < found["mismatch/sequence_ess"] < 1.0  # of whole responses, of which a batch may have few
        return [found[name] for name in ("mismatch/ess", "correction/ess", "mismatch/prefix_ess_at_16-63")]

    assert all(map(math.isnan, shares(FEWEST_TOKENS - 1)))
    assert shares(FEWEST_TOKENS) == pytest.approx([shares(FEWEST_TOKENS)[0]] * 3)
