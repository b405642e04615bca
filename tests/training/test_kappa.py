"""A step that learns its kappa in passing, and repairs what the old kappa got wrong, is the step that knew it before.

Kappa "prepass" reads the batch twice and knows it; "auto" begins with the kappa of the step before.
"""

import io
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from helpers.learners import (
    flat,
    make_learner,
    parameters,
    policy_objective,
    rollout_model_objective,
    smallest_model,
    write,
)
from helpers.ranks import run_repair_rank
from helpers.repairs import gradient_of_update, micro_batches_of
from helpers.sums import assert_equal_sums
from jackpot.core.errors import ConfigError
from jackpot.core.metrics import ClusteredMean, EffectiveSampleSize, Histogram, Max, Mean, Sum
from jackpot.objectives.corrections import Correction
from jackpot.objectives.corrections.base import Kappas, measure_overlap
from jackpot.training.kappa import HiddenNorms, StepTotals, _delta
from jackpot.training.old_policy import MicroBatch

POLICY, ROLLOUT_MODEL = smallest_model(0), smallest_model(1)
WRITTEN = write(ROLLOUT_MODEL, num_top_log_probs=2)  # kappa is about 4
PARTS = micro_batches_of(WRITTEN)
NO_CAP = {"c1": math.inf, "c2": math.inf}
CASES = {
    "obrs": {},
    "a cap that few tokens reach": {"c1": 3.0},
    "expected mask": {"mask": "expected", "aggregate": "seq-mean-token-mean"},
    "accepted tokens by sequence": {"aggregate": "seq-mean-token-mean", "count": "accepted"},
    "expected mask, accepted tokens": {"mask": "expected", "count": "accepted", "target": "new"},
    "constant denominator, current policy": {
        "aggregate": "seq-mean-token-sum-norm",
        "target": "new",
        "proximal": "new",
    },
    "proximal point of the rollouts": {"proximal": "rollout"},
    "gspo": {"surrogate": "gspo", "proximal": "rollout", "aggregate": "seq-mean-token-mean"},
    "gmpo": {"surrogate": "gmpo", "proximal": "rollout", "mask": "expected"},
    "cispo": {"surrogate": "cispo", "proximal": "rollout"},
    "reweight_only": {"name": "reweight_only", "lam": 0.9, "c1": 1.2, "c2": 1.2},
    "z_only": {"name": "z_only", "lam": 0.9, "c1": 1.2},
}


def learner_of(kappa, tolerance=0.0, last_kappa=None, **changes):
    """A learner of a top-k Z without fill-ins, whose step before had the kappa `last_kappa`; None: it had none."""
    objective = policy_objective(changes.pop("name", "obrs"), **changes, kappa=kappa, kappa_tolerance=tolerance)
    learner = make_learner(POLICY, ROLLOUT_MODEL, objective=objective, exact_engines=())
    if last_kappa is not None:
        learner._totals.keep({"obrs/acceptance": Mean.number(last_kappa), "obrs/z": Mean.number(1.0)})
    return learner


def relative_error(gradient, expected_gradient):
    return ((gradient - expected_gradient).norm() / expected_gradient.norm()).item()


def value(result, name):
    return result.metrics[name].value.item()


def metrics_of_any_kappa(result):
    """The fields of all metrics but those that say how the step came by its kappa."""
    metrics_of_the_way = {"seconds/prepass", "obrs/kappa_error", "obrs/repaired_sequences"}
    return {
        f"{name} {field}": content
        for name, metric in result.metrics.items()
        if name not in metrics_of_the_way
        for field, content in vars(metric).items()
    }


def assert_same_report(result, expected_result):
    """Two steps report the same metrics, and the same columns for the same rollouts."""
    metrics, expected_metrics = metrics_of_any_kappa(result), metrics_of_any_kappa(expected_result)
    assert metrics.keys() == expected_metrics.keys()
    for name, metric in metrics.items():
        torch.testing.assert_close(metric, expected_metrics[name], rtol=1e-5, atol=1e-7, equal_nan=True, msg=name)

    assert result.traces.keys() == expected_result.traces.keys()
    assert expected_result.traces
    for uid, columns in expected_result.traces.items():
        assert result.traces[uid].keys() == columns.keys()
        for name, column in columns.items():
            torch.testing.assert_close(result.traces[uid][name], column, rtol=1e-6, atol=1e-7, msg=name)


@cache
def gradient_with_prepass(case):
    """Gradient and result of the step that knows its kappa beforehand."""
    return gradient_of_update(learner_of("prepass", **CASES[case]), PARTS)


@pytest.mark.parametrize(
    ("case", "last_kappa"), [*((case, 4.3) for case in CASES), ("obrs", None), ("expected mask", 0.2)]
)
def test_the_repaired_step_is_that_which_knows_kappa_before(case, last_kappa):
    expected_gradient, prepass_result = gradient_with_prepass(case)
    gradient, one_pass_result = gradient_of_update(learner_of("auto", last_kappa=last_kappa, **CASES[case]), PARTS)

    assert len(PARTS) > 2
    assert value(prepass_result, "obrs/kappa") > 3.5
    assert relative_error(gradient, expected_gradient) < 1e-6
    assert_same_report(one_pass_result, prepass_result)
    assert value(one_pass_result, "seconds/prepass") == 0.0
    assert value(prepass_result, "seconds/prepass") > 0.0
    assert 0.0 < value(one_pass_result, "obrs/repaired_sequences") < 1.0


def test_without_a_cap_the_rescaled_gradient_is_exact():
    expected_gradient, _ = gradient_of_update(learner_of("prepass", **NO_CAP), PARTS)
    gradient, result = gradient_of_update(learner_of("auto", last_kappa=0.7, **NO_CAP), PARTS)

    assert relative_error(gradient, expected_gradient) < 1e-6
    assert value(result, "obrs/kappa_error") == 0.0
    assert value(result, "obrs/repaired_sequences") == 0.0


def grad_norm_metric(result):
    return {"policy/grad_norm": result.metrics["policy/grad_norm"]}


def test_no_more_is_repaired_than_the_tolerance_needs():
    c1 = 1.3
    parts = micro_batches_of(write(ROLLOUT_MODEL, num_top_log_probs=2))
    expected_gradient, prepass_result = gradient_of_update(learner_of("prepass", c1=c1), parts)
    last_kappa = 1.01 * value(prepass_result, "obrs/kappa")

    gradient, unrepaired_result = gradient_of_update(
        learner_of("auto", tolerance=0.5, last_kappa=last_kappa, c1=c1), parts
    )
    kappa_error = value(unrepaired_result, "obrs/kappa_error")

    assert value(unrepaired_result, "obrs/repaired_sequences") == 0.0
    assert 1e-5 < relative_error(gradient, expected_gradient) < kappa_error < 0.2

    repaired_shares = []
    for tolerance in (1.001 * kappa_error, 0.999 * kappa_error, 0.3 * kappa_error, 0.0):
        gradient, result = gradient_of_update(
            learner_of("auto", tolerance=tolerance, last_kappa=last_kappa, c1=c1), parts
        )
        assert relative_error(gradient, expected_gradient) < max(tolerance, 1e-6)
        assert value(result, "obrs/kappa_error") == pytest.approx(kappa_error)
        assert_same_report(result, replace(prepass_result, metrics=prepass_result.metrics | grad_norm_metric(result)))
        repaired_shares.append(value(result, "obrs/repaired_sequences"))

    assert repaired_shares[0] == 0.0
    assert repaired_shares[1] == 1 / len(WRITTEN)
    assert repaired_shares[1] <= repaired_shares[2] <= repaired_shares[3]
    assert repaired_shares[1] < repaired_shares[3]


def weight_of(trace, batch, row, t, kappa):
    """The OBRS weight of one token, with lam 0.9 and the cap c1 1.3."""
    rho = math.exp(trace["old_log_probs"][t].item() - batch.rollout_log_probs[row, t].item())
    return min(kappa * trace["z"][t].item() * max(0.9, rho), 1.3)


def test_the_error_is_estimated_as_the_equation_says(monkeypatch):
    """By loops over tokens, from the weights of both kappas and from the gradient of the hidden states."""
    learner = learner_of("auto", tolerance=10.0, last_kappa=4.3)
    hidden_states = []  # of the policy in each micro-batch, with their gradients
    forward_outputs = learner._forward.outputs

    def keep_gradients(*arguments, **options):
        outputs = forward_outputs(*arguments, **options)
        outputs.hidden["policy"].retain_grad()
        hidden_states.append(outputs.hidden["policy"])
        return outputs

    monkeypatch.setattr(learner._forward, "outputs", keep_gradients)
    totals = learner.state_dict()["totals"]

    result, _ = learner.update(PARTS)
    correction, kappa = learner._objective.correction, value(result, "obrs/kappa")

    assert value(result, "obrs/repaired_sequences") == 0.0

    squared_errors = squared_norms = 0.0
    for micro, states in zip(PARTS, hidden_states, strict=True):
        norms = torch.zeros(micro.tokens.response_mask.shape, dtype=torch.float64)
        norms[micro.tokens.response_mask] = states.grad.double().norm(dim=-1)
        squared_norms += norms.square().sum().item()
        for row, uid in enumerate(micro.tokens.uids):
            trace, sequence_error = result.traces[uid], 0.0
            for t in range(len(trace["weights"])):
                last_weight = weight_of(trace, micro.tokens, row, t, kappa=4.3)
                final_weight = weight_of(trace, micro.tokens, row, t, kappa=kappa)
                assert final_weight == pytest.approx(trace["weights"][t].item(), rel=1e-5)
                share = final_weight / (kappa / 4.3 * last_weight) - 1.0
                sequence_error += abs(share) * norms[row, t].item() if abs(share) > 4e-6 else 0.0  # less is rounding
            squared_errors += sequence_error**2

    assert totals
    assert correction.settings["c1"] == 1.3
    expected_error = 3.0 * math.sqrt(squared_errors / squared_norms)  # 3.0: the margin of `KappaRepair`
    assert value(result, "obrs/kappa_error") == pytest.approx(expected_error, rel=1e-4)


def test_weights_that_differ_by_rounding_alone_are_not_repaired():
    final_weights = torch.tensor([1000.0, -1000.0, 1e-3, 1e-3, 0.0, 0.0])
    held_weights = torch.tensor([1000.001, -1000.001, 1.00001e-3, 2e-3, 0.0, 0.5])
    assert _delta(final_weights, held_weights).tolist() == pytest.approx([0.0, 0.0, -1e-8, -1e-3, 0.0, -0.5], rel=0.1)


def test_only_sequences_with_a_gradient_at_a_cap_are_read_again():
    items_without_gradient = [replace(item, advantages=torch.zeros_like(item.advantages)) for item in WRITTEN[1:]]
    parts = micro_batches_of([WRITTEN[0], *items_without_gradient])

    _, result = gradient_of_update(learner_of("auto", last_kappa=4.3), parts)

    assert value(result, "obrs/repaired_sequences") * len(WRITTEN) == pytest.approx(1.0)
    assert value(result, "correction/clip_frac") != 0.0
    assert value(result, "policy/loss") != 0.0


class Smooth:
    """A correction of one's own: not linear in kappa anywhere, and without a word about its cap."""

    kappa, lam, reads = "auto", 1.0, ("z",)

    def measure(self, inputs):
        return measure_overlap(inputs, self.lam)

    def apply(self, inputs, totals):
        kappa = totals["obrs/acceptance"].total / totals["obrs/z"].total if totals else torch.ones(()).double()
        return Correction.of(inputs, 2.0 * torch.tanh(kappa.float() * inputs.z.value), kappas=Kappas(kappa))


@pytest.mark.parametrize("last_kappa", [None, 4.3])
def test_a_correction_not_linear_in_kappa_is_repaired(last_kappa):
    class Beforehand(Smooth):
        kappa = "prepass"

    gradients = []
    for correction_kind in (Beforehand, Smooth):
        learner = learner_of("auto", last_kappa=last_kappa)
        object.__setattr__(learner._objective, "correction", correction_kind())
        gradient, result = gradient_of_update(learner, PARTS)
        gradients.append(gradient)

    assert value(result, "obrs/repaired_sequences") == 1.0
    assert relative_error(gradients[1], gradients[0]) < 1e-6


def test_with_regularizers_auto_reads_twice():
    regularized = replace(policy_objective(kappa="auto"), entropy_coeff=0.1)
    learner = make_learner(POLICY, ROLLOUT_MODEL, objective=regularized, exact_engines=())
    result, _ = learner.update(PARTS)

    assert value(result, "seconds/prepass") > 0.0
    assert "obrs/kappa_error" not in result.metrics
    assert value(result, "obrs/kappa") == pytest.approx(value(result, "obrs/acceptance") / value(result, "obrs/z"))


@pytest.mark.parametrize("kappa", ["prepass", "auto"])
def test_the_kappa_of_a_skipped_step_is_not_carried(kappa):
    learner = learner_of(kappa, last_kappa=4.3)
    last_totals = learner.state_dict()["totals"]
    broken_tokens = replace(
        PARTS[0].tokens, rollout_log_probs=torch.full_like(PARTS[0].tokens.rollout_log_probs, math.nan)
    )

    result, _ = learner.update([replace(PARTS[0], tokens=broken_tokens), *PARTS[1:]])

    assert {event["why"] for event in result.events} == {"non-finite gradient"}
    assert torch.equal(parameters(learner, "policy"), flat(POLICY))
    assert learner.state_dict()["totals"] == last_totals

    learner.update(PARTS)
    assert learner.state_dict()["totals"]["obrs/z"][1] > 1.0
    assert learner.version.policy == 1


@pytest.mark.parametrize("kappa", ["prepass", "auto"])
def test_kappa_is_one_where_the_models_do_not_overlap(kappa):
    """No listed token has any mass: Z is 0, so is every weight, and the policy has nothing to learn."""
    parts_without_overlap = [
        MicroBatch(
            tokens=replace(micro.tokens, top_log_probs=torch.full_like(micro.tokens.top_log_probs, -math.inf)), old=None
        )
        for micro in PARTS
    ]
    learner = learner_of(kappa, last_kappa=4.3)
    last_totals = learner.state_dict()["totals"]

    result, _ = learner.update(parts_without_overlap)

    assert value(result, "obrs/kappa") == 1.0
    assert value(result, "policy/grad_norm") == 0.0
    assert learner.state_dict()["totals"] == last_totals
    assert learner.version.policy == 0


def test_each_step_begins_with_the_kappa_of_the_step_before():
    learner = learner_of("auto")
    assert learner._totals.before_backward(PARTS, learner._forward).totals == {}

    result, _ = learner.update(PARTS)
    totals, are_provisional, _ = learner._totals.before_backward(PARTS, learner._forward)

    assert are_provisional
    assert (totals["obrs/acceptance"].total / totals["obrs/z"].total).item() == pytest.approx(
        value(result, "obrs/kappa")
    )


def test_totals_of_every_kind_survive_a_checkpoint():
    """A correction of one's own may measure what it likes."""
    values = torch.tensor([-0.5, 0.25, 1.0])
    kinds = (Mean, ClusteredMean, Max, EffectiveSampleSize, Histogram)
    sums = {kind.__name__: kind.of(values[None], values[None] > 0.0) for kind in kinds} | {"Sum": Sum.of(values > 0.0)}
    saved_totals, loaded_totals = (StepTotals(policy_objective()) for _ in range(2))
    saved_totals.keep(sums)

    file = io.BytesIO()
    torch.save(saved_totals.state_dict(), file)
    file.seek(0)
    loaded_totals.load_state_dict(torch.load(file, weights_only=True))

    assert_equal_sums(loaded_totals._last, sums)


def test_an_unknown_kappa_of_a_correction_of_ones_own_is_refused():
    class Carried(Smooth):
        kappa = "previous"

    with pytest.raises(ConfigError, match=r"unknown kappa 'previous'.*auto, none, prepass"):
        StepTotals(replace(policy_objective(), correction=Carried()))


def test_the_rollout_models_gradient_does_not_feel_kappa():
    moves = []
    for kappa in ("prepass", "auto"):
        learner = learner_of(kappa, last_kappa=0.3)
        learner._rollout_objective = rollout_model_objective(distill="reverse")
        learner._forward.distill = learner._rollout_objective.distill
        learner.update(PARTS)
        moves.append(parameters(learner, "rollout_model") - flat(ROLLOUT_MODEL))

    assert torch.equal(*moves)
    assert moves[0].abs().max() > 1e-3


def test_a_cap_on_one_of_two_ranks_leaves_the_step_of_one(tmp_path: Path):
    """The rank without one runs the passes of the other, with weights of 0."""
    mp.start_processes(run_repair_rank, args=(tmp_path,), nprocs=2, start_method="fork")
    rank_results = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]

    assert [rank_result["own_repairs"] for rank_result in rank_results] == [0, 1]
    assert [rank_result["passes"] for rank_result in rank_results] == [1, 1]
    assert relative_error(rank_results[0]["gradient"] + rank_results[1]["gradient"], rank_results[0]["whole"]) < 1e-6
    assert rank_results[0]["error"] == rank_results[1]["error"]
    assert rank_results[0]["error"] > 1e-5


def test_where_the_error_is_no_number_everything_is_repaired(monkeypatch):
    """As where a gradient overflows float32: the step must be that of its own kappa all the same."""
    spread = HiddenNorms.spread
    monkeypatch.setattr(HiddenNorms, "spread", lambda norms, batch: spread(norms, batch) * math.nan)
    expected_gradient, _ = gradient_with_prepass("obrs")
    gradient, result = gradient_of_update(learner_of("auto", tolerance=0.5, last_kappa=4.3), PARTS)

    assert math.isnan(value(result, "obrs/kappa_error"))
    assert relative_error(gradient, expected_gradient) < 1e-6
