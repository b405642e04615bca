"""Both models read the tokens of a tool inside a response, and neither learns from them nor counts them."""

from dataclasses import replace

import pytest
import torch

from helpers.learners import (
    LINEAR,
    VOCAB,
    ReferenceAdamW,
    assert_same_move,
    batches,
    double,
    flat,
    gradient,
    make_learner,
    parameters,
    policy_objective,
    reference_losses,
    rollout_model_objective,
    sampled_log_probs,
    smallest_model,
    train,
    write,
)
from jackpot.objectives.losses import LOSS_AGG_MODES
from jackpot.training.batching import collate

MODELS = {"policy": smallest_model(0), "rollout_model": smallest_model(1)}
ITEMS = write(MODELS["rollout_model"], seed=5, turn_end_token_ids=range(2, 12))
MASKS = ("sampled", "expected", "sampled")
SAMPLED = [item.rollout.sampled_mask for item in ITEMS]
ANY = [{"aggregate": name, "mask": mask} for name, mask in zip(LOSS_AGG_MODES, MASKS, strict=True)]


def learner_for(**changes):
    """Return a learner of fresh copies of both models with a changed policy objective."""
    aggregate = changes.get("aggregate", "token-mean")
    return make_learner(
        *MODELS.values(),
        objective=policy_objective(**changes),
        rollout_objective=rollout_model_objective(aggregate=aggregate),
    )


def test_the_batch_has_tool_tokens_between_sampled_ones():
    """Else everything here would pass on empty masks."""
    masks_with_tool_tokens = [mask for mask in SAMPLED if mask[0] and mask[-1] and not mask.all()]
    assert len(masks_with_tool_tokens) > 5
    assert sum(int((~mask).sum()) for mask in SAMPLED) > 15


@pytest.mark.parametrize(
    "changes",
    [
        *ANY,
        {"count": "accepted"},
        {"target": "new", "proximal": "new"},
    ],
    ids=str,
)
def test_losses_and_gradients_are_those_of_float64(changes):
    """K = V makes Z exact, and the reference leaves the tool's tokens out of every sum and of every count.

    In a single micro-batch, and in many.
    """
    learners = [learner_for(**changes) for _ in range(2)]

    results = [
        train(learner, batches(ITEMS, budget=budget))[0] for learner, budget in zip(learners, (10_000, 40), strict=True)
    ]

    current_models, old_models = ({role: double(model) for role, model in MODELS.items()} for _ in range(2))
    losses = reference_losses(current_models, old_models, ITEMS, **changes)
    for (role, model), loss in zip(MODELS.items(), losses, strict=True):
        expected_parameters = ReferenceAdamW(LINEAR).step(flat(model).double(), gradient(loss, current_models[role]))
        for learner, result in zip(learners, results, strict=True):
            assert result.metrics[f"{role}/loss"].value.item() == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
            assert_same_move(parameters(learner, role), expected_parameters, flat(model))


def with_other_tool_columns(item, seed):
    """Return the same response with other numbers wherever nothing was sampled."""
    rollout, generator = item.rollout, torch.Generator().manual_seed(seed)
    is_of_tool, shape = ~rollout.sampled_mask, rollout.top_ids.shape
    changed_rollout = replace(
        rollout,
        rollout_log_probs=rollout.rollout_log_probs.masked_fill(is_of_tool, torch.nan),
        top_ids=torch.where(is_of_tool[:, None], torch.randint(VOCAB, shape, generator=generator), rollout.top_ids),
        top_log_probs=torch.where(is_of_tool[:, None], torch.randn(shape, generator=generator), rollout.top_log_probs),
        versions=torch.where(is_of_tool[:, None], 99, rollout.versions),
    )
    return replace(item, rollout=changed_rollout, advantages=item.advantages.masked_fill(is_of_tool, 1e6))


@pytest.mark.parametrize(
    "changes", [*ANY, {"normalizer": "exact"}, {"proximal": "rollout"}, {"target": "new", "proximal": "new"}], ids=str
)
def test_what_stands_beside_a_tool_token_changes_nothing(changes):
    """Bit for bit: every metric, every per-token column and both models, in anchored steps too."""
    steps = dict(mini_batch_size=6, epochs=2, budget=60) if changes.get("target") != "new" else {}
    learner, other_learner = learner_for(**changes), learner_for(**changes)
    other_items = [with_other_tool_columns(item, seed) for seed, item in enumerate(ITEMS)]

    results = train(learner, batches(ITEMS, **steps))
    other_results = train(other_learner, batches(other_items, **steps))

    for result, other_result in zip(results, other_results, strict=True):
        for name in result.metrics.keys() - {"seconds/prepass"}:
            assert not any(value.isnan().any() for value in result.metrics[name]), name
            assert all(map(torch.equal, result.metrics[name], other_result.metrics[name])), name

        for uid, columns in result.traces.items():
            for name, column in columns.items():
                torch.testing.assert_close(
                    other_result.traces[uid][name], column, rtol=0, atol=0, equal_nan=True, msg=name
                )

    for role, model in MODELS.items():
        assert torch.equal(parameters(learner, role), parameters(other_learner, role))
        assert not torch.equal(parameters(learner, role), flat(model))


def test_coins_of_tool_tokens_are_thrown_away():
    """A uniform belongs to a position of the response, so an unused one moves no other."""
    batch = collate(ITEMS, seed=0, epoch=0)
    uniforms = torch.where(batch.response_mask, batch.uniforms, 0.5)
    results = [train(learner_for(), [[train_batch]])[0] for train_batch in (batch, replace(batch, uniforms=uniforms))]

    for name in ("correction/accepted", "policy/loss"):
        assert torch.equal(*(result.metrics[name].total for result in results))


def test_the_columns_of_a_tool_token_are_zero():
    """In the second of two steps, whose anchors went through padding and back."""
    results = train(learner_for(), batches(ITEMS, mini_batch_size=len(ITEMS) // 2, budget=60))
    traces = {uid: trace for result in results for uid, trace in result.traces.items()}
    model = double(MODELS["policy"])

    for item in ITEMS:
        mask, trace = item.rollout.sampled_mask, traces[item.rollout.uid]
        exact_log_probs = sampled_log_probs(model, item.rollout, 1.0).detach().float()
        torch.testing.assert_close(trace["old_log_probs"][mask], exact_log_probs[mask], rtol=0, atol=1e-5)
        for name, column in trace.items():
            assert len(column) == len(mask), name
            assert not column[~mask].any(), name


def test_counts_are_of_sampled_tokens():
    [result] = train(learner_for(), batches(ITEMS, budget=40))
    sampled_count = sum(int(mask.sum()) for mask in SAMPLED)
    for name in ("policy/loss", "rollout_model/loss", "obrs/acceptance", "mismatch/ratio", "policy/entropy"):
        assert result.metrics[name].count == sampled_count, name
    assert result.metrics["mismatch/engine_gap_max"].value < 1e-5
