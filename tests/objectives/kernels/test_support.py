"""A policy renormalized on the tokens that a sampler kept: its log-probs are those of the softmax over these tokens,
and corrections of them have the gradient of the truncated policy.
"""

import pytest
import torch
from torch import Tensor

from helpers.naive_head import N, V, assert_same_gradients, leaves, naive_log_probs, random_head
from jackpot.objectives.kernels import support
from jackpot.objectives.kernels.support import support_log_probs

KEPT = 4  # ids of a position
TEMPERATURE = 0.7


def listed_ids(seed: int = 3) -> tuple[Tensor, Tensor]:
    """Return five distinct ids of each position, and which of them are kept."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(V, generator=generator)[: KEPT + 1] for _ in range(N)])
    is_kept = torch.ones(N, KEPT + 1, dtype=torch.bool)
    is_kept[:, -1] = False
    is_kept[0, 1:] = False  # a support of one token
    return ids, is_kept


def naive_support_log_probs(log_probs: Tensor, sampled: Tensor, ids: Tensor, is_kept: Tensor) -> Tensor:
    """Return the renormalized log-probs over the whole vocabulary, -inf outside of sampled and kept tokens."""
    is_outside = torch.ones_like(log_probs, dtype=torch.bool)
    for row, (token, row_ids, row_is_kept) in enumerate(zip(sampled, ids, is_kept, strict=True)):
        is_outside[row, row_ids[row_is_kept]] = False
        is_outside[row, token] = False
    return log_probs.masked_fill(is_outside, -torch.inf).log_softmax(-1)


@pytest.mark.parametrize("kind", ["plain", "bias", "soft_cap"])
@pytest.mark.parametrize("gathered", [1, 2**24])
def test_log_probs_are_the_softmax_over_the_kept_ids(kind, gathered, monkeypatch):
    monkeypatch.setattr(support, "_GATHERED", gathered)
    head = random_head(1, kind)
    ids, is_kept = listed_ids()
    sampled = ids[:, 0].clone()
    sampled[1] = next(token for token in range(V) if token not in ids[1])  # sampled, and in no list

    log_probs, listed_log_probs = support_log_probs(head, sampled, ids, is_kept, TEMPERATURE)

    expected = naive_support_log_probs(naive_log_probs(head, TEMPERATURE), sampled, ids, is_kept)
    expected_log_probs = expected.gather(1, sampled[:, None])[:, 0]
    torch.testing.assert_close(log_probs, expected_log_probs)
    torch.testing.assert_close(listed_log_probs, expected.detach().gather(1, ids).masked_fill(~is_kept, -torch.inf))
    assert not listed_log_probs.requires_grad

    coefficients = torch.arange(N, dtype=torch.float64) - 2.5
    assert_same_gradients((log_probs * coefficients).sum(), (expected_log_probs * coefficients).sum(), leaves(head))


def test_corrected_gradients_are_those_of_the_truncated_policy():
    """Sum over what can be sampled, p_inf w A grad log p: of the mean of A with w = rho, of Z times that with OBRS."""
    head = random_head(2, n=1)
    kept_ids = torch.tensor([[7, 2, 9]])
    advantages = torch.tensor([1.5, -0.4, 0.3], dtype=torch.float64)
    p_inf = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    is_kept = torch.ones_like(kept_ids, dtype=torch.bool)

    policy = naive_support_log_probs(naive_log_probs(head, 1.0), kept_ids[0, :1], kept_ids, is_kept)[0].exp()
    expected_gradients = torch.autograd.grad((policy[kept_ids[0]] * advantages).sum(), leaves(head))

    lam = 1.3
    z = torch.minimum(p_inf, policy[kept_ids[0]].detach() / lam).sum()
    sums = {"rho": 0.0, "obrs": 0.0, "untruncated": 0.0}
    for column, token in enumerate(kept_ids[0]):
        log_prob = support_log_probs(head, token[None], kept_ids, is_kept, 1.0)[0][0]
        rho = (log_prob.exp() / p_inf[column]).detach()
        acceptance = (rho / lam).clamp(max=1.0)
        weight = z * rho.clamp(min=lam)
        sums["rho"] += p_inf[column] * rho * advantages[column] * log_prob
        sums["obrs"] += p_inf[column] * acceptance * weight * advantages[column] * log_prob

        full_log_prob = naive_log_probs(head, 1.0)[0, token]
        full_rho = (full_log_prob.exp() / p_inf[column]).detach()
        sums["untruncated"] += p_inf[column] * full_rho * advantages[column] * full_log_prob

    gradients = {name: torch.autograd.grad(total, leaves(head), retain_graph=True) for name, total in sums.items()}
    torch.testing.assert_close(gradients["rho"], expected_gradients)
    torch.testing.assert_close(gradients["obrs"], tuple(z * gradient for gradient in expected_gradients))
    assert (gradients["untruncated"][0] - expected_gradients[0]).abs().max() > 0.1 * expected_gradients[0].abs().max()
