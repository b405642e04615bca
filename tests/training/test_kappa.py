"""One pass over the micro-batches gives the step that knows kappa beforehand: gradients, metrics and columns."""

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


def learner_of(kappa, tolerance=0.0, before=None, **changes):
    """A learner of a top-k Z without fill-ins, whose step before had the kappa `before`; None: it had none."""
    objective = policy_objective(changes.pop("name", "obrs"), **changes, kappa=kappa, kappa_tolerance=tolerance)
    learner = make_learner(POLICY, ROLLOUT_MODEL, objective=objective, exact_engines=())
    if before is not None:
        learner._totals.keep({"obrs/acceptance": Mean.number(before), "obrs/z": Mean.number(1.0)})
    return learner


def relative(found, wanted):
    return ((found - wanted).norm() / wanted.norm()).item()


def value(result, name):
    return result.metrics[name].value.item()


def own_metrics(result):
    own = {"seconds/prepass", "obrs/kappa_error", "obrs/repaired_sequences"}
    return {
        f"{name} {field}": part
        for name, entry in result.metrics.items()
        if name not in own
        for field, part in vars(entry).items()
    }


def assert_same_report(found, wanted):
    ours, theirs = own_metrics(found), own_metrics(wanted)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-7, equal_nan=True, msg=name)
    assert found.traces.keys() == wanted.traces.keys()
    assert wanted.traces
    for uid, columns in wanted.traces.items():
        assert found.traces[uid].keys() == columns.keys()
        for name, column in columns.items():
            torch.testing.assert_close(found.traces[uid][name], column, rtol=1e-6, atol=1e-7, msg=name)


@cache
def with_prepass(case):
    return gradient_of_update(learner_of("prepass", **CASES[case]), PARTS)


@pytest.mark.parametrize(("case", "before"), [*((case, 4.3) for case in CASES), ("obrs", None), ("expected mask", 0.2)])
def test_the_repaired_step_is_that_which_knows_kappa_before(case, before):
    wanted, prepass = with_prepass(case)
    found, one_pass = gradient_of_update(learner_of("auto", before=before, **CASES[case]), PARTS)

    assert len(PARTS) > 2
    assert value(prepass, "obrs/kappa") > 3.5
    assert relative(found, wanted) < 1e-6
    assert_same_report(one_pass, prepass)
    assert value(one_pass, "seconds/prepass") == 0.0 < value(prepass, "seconds/prepass")
    assert 0.0 < value(one_pass, "obrs/repaired_sequences") < 1.0


def test_without_a_cap_the_rescaled_gradient_is_exact():
    wanted, _ = gradient_of_update(learner_of("prepass", **NO_CAP), PARTS)
    found, result = gradient_of_update(learner_of("auto", before=0.7, **NO_CAP), PARTS)
    assert relative(found, wanted) < 1e-6
    assert value(result, "obrs/kappa_error") == 0.0 == value(result, "obrs/repaired_sequences")


def test_no_more_is_repaired_than_the_tolerance_needs():
    c1, parts = 1.3, micro_batches_of(write(ROLLOUT_MODEL, num_top_log_probs=2))
    wanted, prepass = gradient_of_update(learner_of("prepass", c1=c1), parts)
    before = 1.01 * value(prepass, "obrs/kappa")
    found, left = gradient_of_update(learner_of("auto", 0.5, before, c1=c1), parts)
    error = value(left, "obrs/kappa_error")

    assert value(left, "obrs/repaired_sequences") == 0.0
    assert 1e-5 < relative(found, wanted) < error < 0.2

    repaired = []
    for tolerance in (1.001 * error, 0.999 * error, 0.3 * error, 0.0):
        found, result = gradient_of_update(learner_of("auto", tolerance, before, c1=c1), parts)
        assert relative(found, wanted) < max(tolerance, 1e-6)
        assert value(result, "obrs/kappa_error") == pytest.approx(error)
        assert_same_report(result, replace(prepass, metrics=prepass.metrics | _grad_norm(result)))
        repaired.append(value(result, "obrs/repaired_sequences"))
    assert 0.0 == repaired[0] < repaired[1] == 1 / len(WRITTEN) <= repaired[2] <= repaired[3] > repaired[1]


def _grad_norm(result):
    return {"policy/grad_norm": result.metrics["policy/grad_norm"]}


def test_the_error_is_estimated_as_the_equation_says(monkeypatch):
    """By loops over tokens, from the weights of both kappas and from the gradient of the hidden states."""
    learner = learner_of("auto", 10.0, 4.3)
    hidden, read = [], learner._forward.outputs

    def keep_gradients(*given, **options):
        found = read(*given, **options)
        found.hidden["policy"].retain_grad()
        hidden.append(found.hidden["policy"])
        return found

    monkeypatch.setattr(learner._forward, "outputs", keep_gradients)
    totals = learner.state_dict()["totals"]
    result, _ = learner.update(PARTS)
    correction, kappa = learner._objective.correction, value(result, "obrs/kappa")

    assert value(result, "obrs/repaired_sequences") == 0.0

    top = bottom = 0.0
    for micro, states in zip(PARTS, hidden, strict=True):
        norms = torch.zeros(micro.tokens.response_mask.shape, dtype=torch.float64)
        norms[micro.tokens.response_mask] = states.grad.double().norm(dim=-1)
        bottom += norms.square().sum().item()
        for row, uid in enumerate(micro.tokens.uids):
            trace, worth = result.traces[uid], 0.0
            for t in range(len(trace["weights"])):
                before, final = _weight(trace, micro.tokens, row, t, 4.3), _weight(trace, micro.tokens, row, t, kappa)
                assert final == pytest.approx(trace["weights"][t].item(), rel=1e-5)
                share = final / (kappa / 4.3 * before) - 1.0
                worth += abs(share) * norms[row, t].item() if abs(share) > 4e-6 else 0.0
            top += worth**2
    assert totals
    assert correction.settings["c1"] == 1.3
    assert value(result, "obrs/kappa_error") == pytest.approx(3.0 * math.sqrt(top / bottom), rel=1e-4)


def _weight(trace, batch, row, t, kappa):
    rho = math.exp(trace["old_log_probs"][t].item() - batch.rollout_log_probs[row, t].item())
    return min(kappa * trace["z"][t].item() * max(0.9, rho), 1.3)


def test_weights_that_differ_by_rounding_alone_are_not_repaired():
    wanted = torch.tensor([1000.0, -1000.0, 1e-3, 1e-3, 0.0, 0.0])
    held = torch.tensor([1000.001, -1000.001, 1.00001e-3, 2e-3, 0.0, 0.5])
    assert _delta(wanted, held).tolist() == pytest.approx([0.0, 0.0, -1e-8, -1e-3, 0.0, -0.5], rel=0.1)


def test_only_sequences_with_a_gradient_at_a_cap_are_read_again():
    quiet = [replace(item, advantages=torch.zeros_like(item.advantages)) for item in WRITTEN[1:]]
    parts = micro_batches_of([WRITTEN[0], *quiet])
    _, result = gradient_of_update(learner_of("auto", before=4.3), parts)
    assert value(result, "obrs/repaired_sequences") * len(WRITTEN) == pytest.approx(1.0)
    assert value(result, "correction/clip_frac") * value(result, "policy/loss") != 0.0


class Smooth:
    """A correction of one's own: not linear in kappa anywhere, and without a word about its cap."""

    kappa, lam, reads = "auto", 1.0, ("z",)

    def measure(self, inputs):
        return measure_overlap(inputs, self.lam)

    def apply(self, inputs, totals):
        kappa = totals["obrs/acceptance"].total / totals["obrs/z"].total if totals else torch.ones(()).double()
        return Correction.of(inputs, 2.0 * torch.tanh(kappa.float() * inputs.z.value), kappas=Kappas(kappa))


@pytest.mark.parametrize("before", [None, 4.3])
def test_a_correction_not_linear_in_kappa_is_repaired(before):
    class Beforehand(Smooth):
        kappa = "prepass"

    gradients = []
    for kind in (Beforehand, Smooth):
        learner = learner_of("auto", before=before)
        object.__setattr__(learner._objective, "correction", kind())
        gradient, result = gradient_of_update(learner, PARTS)
        gradients.append(gradient)

    assert value(result, "obrs/repaired_sequences") == 1.0
    assert relative(*reversed(gradients)) < 1e-6


def test_with_regularizers_auto_reads_twice():
    regularized = replace(policy_objective(kappa="auto"), entropy_coeff=0.1)
    learner = make_learner(POLICY, ROLLOUT_MODEL, objective=regularized, exact_engines=())
    result, _ = learner.update(PARTS)

    assert value(result, "seconds/prepass") > 0.0
    assert "obrs/kappa_error" not in result.metrics
    assert value(result, "obrs/kappa") == pytest.approx(value(result, "obrs/acceptance") / value(result, "obrs/z"))


@pytest.mark.parametrize("kappa", ["prepass", "auto"])
def test_the_kappa_of_a_skipped_step_is_not_carried(kappa):
    learner = learner_of(kappa, before=4.3)
    before = learner.state_dict()["totals"]
    broken = replace(PARTS[0].tokens, rollout_log_probs=torch.full_like(PARTS[0].tokens.rollout_log_probs, math.nan))
    result, _ = learner.update([replace(PARTS[0], tokens=broken), *PARTS[1:]])

    assert {event["why"] for event in result.events} == {"non-finite gradient"}
    assert torch.equal(parameters(learner, "policy"), flat(POLICY))
    assert learner.state_dict()["totals"] == before

    learner.update(PARTS)
    assert learner.state_dict()["totals"]["obrs/z"][1] > 1.0
    assert learner.version.policy == 1


@pytest.mark.parametrize("kappa", ["prepass", "auto"])
def test_kappa_is_one_where_the_models_do_not_overlap(kappa):
    """No listed token has any mass: Z is 0, so is every weight, and the policy has nothing to learn."""
    nowhere = [
        MicroBatch(
            tokens=replace(micro.tokens, top_log_probs=torch.full_like(micro.tokens.top_log_probs, -math.inf)), old=None
        )
        for micro in PARTS
    ]
    learner = learner_of(kappa, before=4.3)
    before = learner.state_dict()["totals"]
    result, _ = learner.update(nowhere)

    assert value(result, "obrs/kappa") == 1.0
    assert value(result, "policy/grad_norm") == 0.0
    assert learner.state_dict()["totals"] == before
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
    kept = {kind.__name__: kind.of(values[None], values[None] > 0.0) for kind in kinds} | {"Sum": Sum.of(values > 0.0)}
    before, after = (StepTotals(policy_objective()) for _ in range(2))
    before.keep(kept)
    file = io.BytesIO()
    torch.save(before.state_dict(), file)
    file.seek(0)
    after.load_state_dict(torch.load(file, weights_only=True))

    assert_equal_sums(after._last, kept)


def test_an_unknown_kappa_of_a_correction_of_ones_own_is_refused():
    class Carried(Smooth):
        kappa = "previous"

    with pytest.raises(ConfigError, match=r"unknown kappa 'previous'.*auto, none, prepass"):
        StepTotals(replace(policy_objective(), correction=Carried()))


def test_the_rollout_models_gradient_does_not_feel_kappa():
    moves = []
    for kappa in ("prepass", "auto"):
        learner = learner_of(kappa, before=0.3)
        learner._rollout_objective = rollout_model_objective(distill="reverse")
        learner._forward.distill = learner._rollout_objective.distill
        learner.update(PARTS)
        moves.append(parameters(learner, "rollout_model") - flat(ROLLOUT_MODEL))

    assert torch.equal(*moves)
    assert moves[0].abs().max() > 1e-3


def test_a_cap_on_one_of_two_ranks_leaves_the_step_of_one(tmp_path: Path):
    """The rank without one runs the passes of the other, with weights of 0."""
    mp.start_processes(run_repair_rank, args=(tmp_path,), nprocs=2, start_method="fork")
    ours = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]

    assert [one["own_repairs"] for one in ours] == [0, 1]
    assert [one["passes"] for one in ours] == [1, 1]
    assert relative(ours[0]["gradient"] + ours[1]["gradient"], ours[0]["whole"]) < 1e-6
    assert ours[0]["error"] == ours[1]["error"] > 1e-5


def test_where_the_error_is_no_number_everything_is_repaired(monkeypatch):
    """As where a gradient overflows float32: the step must be that of its own kappa all the same."""
    spread = HiddenNorms.spread
    monkeypatch.setattr(HiddenNorms, "spread", lambda norms, batch: spread(norms, batch) * math.nan)
    wanted, _ = with_prepass("obrs")
    found, result = gradient_of_update(learner_of("auto", 0.5, 4.3), PARTS)

    assert math.isnan(value(result, "obrs/kappa_error"))
    assert relative(found, wanted) < 1e-6
