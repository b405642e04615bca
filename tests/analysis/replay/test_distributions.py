"""Which whole distributions `jackpot replay` rebuilds from the two top-k lists of a token, and which it refuses."""

import math

import pytest
import torch

from jackpot.analysis.replay.distributions import saved_distributions, z_of
from jackpot.analysis.replay.responses import ResponseBatch, collate, response_of

P_INF, P_NEW = [0.5, 0.3, 0.1, 0.1], [0.2, 0.3, 0.1, 0.4]


def batch(rollout_ids, policy_ids, p_inf=P_INF, p_new=P_NEW, old=None) -> ResponseBatch:
    """One response of one token, the first of the vocabulary."""
    record = {
        "token_ids": [0],
        "rollout_log_probs": [math.log(p_inf[0])],
        "old_log_probs": [math.log(p_new[0] if old is None else old)],
        "log_probs": [math.log(p_new[0])],
        "rollout_top_ids": [rollout_ids],
        "rollout_top_log_probs": [[math.log(p_inf[token]) for token in rollout_ids]],
        "policy_top_ids": [policy_ids],
        "policy_top_log_probs": [[math.log(p_new[token]) for token in policy_ids]],
    }

    return collate([response_of(record, "here", 0)])


def probabilities(log_probs: torch.Tensor) -> list[float]:
    """List the probabilities that are not 0."""
    return [value for value in log_probs.exp().flatten().tolist() if value > 1e-9]


def test_tokens_in_both_lists_stay_and_all_others_are_one(monkeypatch):
    monkeypatch.setattr("jackpot.analysis.replay.distributions.CAPTURED", 0.3)
    known = saved_distributions(batch([0, 1, 2], [3, 1, 0])).known

    assert probabilities(known.rollout) == pytest.approx([0.5, 0.3, 0.2])  # token 2 is in one list alone
    assert probabilities(known.new) == pytest.approx([0.2, 0.3, 0.5])


def test_lists_that_hold_too_little_give_z_and_no_sums():
    distributions = saved_distributions(batch([0, 1, 2], [3, 1, 0]))
    assert distributions.known is None

    z = z_of(distributions, batch([0, 1, 2], [3, 1, 0]), 1.0, "new")
    assert z.value.tolist() == [[pytest.approx(0.2 + 0.3 + 0.2)]]  # the rest is 0.2 and 0.5

    assert saved_distributions(batch([0, 1, 2, 3], [3, 2, 1, 0])).known is not None

    sure = [0.5, 0.5, 1e-9, 1e-9]  # the writer's two tokens are all of it, and half of the policy's
    assert saved_distributions(batch([0, 1], [1, 0], p_inf=sure)).known is None


def test_the_old_policys_distribution_is_found_where_it_can_be():
    whole_vocabulary = [0, 1, 2, 3]
    first_step = saved_distributions(batch(whole_vocabulary, whole_vocabulary)).known
    assert torch.equal(first_step.old, first_step.new)

    stale = saved_distributions(batch(whole_vocabulary, whole_vocabulary, old=P_INF[0])).known
    assert torch.equal(stale.old, stale.rollout)

    neither = batch(whole_vocabulary, whole_vocabulary, old=0.4)
    assert saved_distributions(neither).known.old is None
    assert z_of(saved_distributions(neither), neither, 1.0, "old") is None
    assert z_of(saved_distributions(neither), neither, 1.0, "new").value.item() == pytest.approx(0.7)


def test_a_file_without_lists_has_neither_distributions_nor_z():
    record = {"token_ids": [0], "rollout_log_probs": [-1.0], "old_log_probs": [-1.0]}
    bare = collate([response_of(record, "here", 0)])
    assert saved_distributions(bare) is None and z_of(None, bare, 1.0, "new") is None
