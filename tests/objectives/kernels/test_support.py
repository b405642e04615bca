"""A policy renormalized on what a sampler kept: its log-probs, their gradient, and what that gradient is of."""

import pytest
import torch
from torch import Tensor

from helpers.naive_head import N, V, assert_same_gradients, leaves, naive_log_probs, random_head
from jackpot.objectives.kernels import support
from jackpot.objectives.kernels.support import support_log_probs

KEPT = 4
TEMPERATURE = 0.7


def listed(seed: int = 3) -> tuple[Tensor, Tensor]:
    """Five distinct ids of each position, of which some are kept."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(V, generator=generator)[: KEPT + 1] for _ in range(N)])
    is_kept = torch.ones(N, KEPT + 1, dtype=torch.bool)
    is_kept[:, -1] = False
    is_kept[0, 1:] = False  # a support of one token
    return ids, is_kept


def naive(log_probs: Tensor, sampled: Tensor, ids: Tensor, is_kept: Tensor) -> Tensor:
    """The same over the whole vocabulary."""
    outside = torch.ones_like(log_probs, dtype=torch.bool)
    for row, (token, of_row, kept) in enumerate(zip(sampled, ids, is_kept, strict=True)):
        outside[row, of_row[kept]] = False
        outside[row, token] = False
    return log_probs.masked_fill(outside, -torch.inf).log_softmax(-1)


@pytest.mark.parametrize("kind", ["plain", "bias", "soft_cap"])
@pytest.mark.parametrize("gathered", [1, 2**24])
def test_it_is_the_softmax_over_the_kept_ids(kind, gathered, monkeypatch):
    monkeypatch.setattr(support, "_GATHERED", gathered)
    head = random_head(1, kind)
    ids, is_kept = listed()
    sampled = ids[:, 0].clone()
    sampled[1] = next(token for token in range(V) if token not in ids[1])  # sampled, and in no list

    log_probs, of_list = support_log_probs(head, sampled, ids, is_kept, TEMPERATURE)
    wanted = naive(naive_log_probs(head, TEMPERATURE), sampled, ids, is_kept)

    of_sampled = wanted.gather(1, sampled[:, None])[:, 0]
    torch.testing.assert_close(log_probs, of_sampled)
    torch.testing.assert_close(of_list, wanted.detach().gather(1, ids).masked_fill(~is_kept, -torch.inf))
    assert not of_list.requires_grad

    coefficients = torch.arange(N, dtype=torch.float64) - 2.5
    assert_same_gradients((log_probs * coefficients).sum(), (of_sampled * coefficients).sum(), leaves(head))


def test_its_gradient_is_that_of_the_truncated_policy():
    """Sum over what can be sampled, p_inf w A grad log p: of the mean of A with w = rho, of Z times that with OBRS."""
    head = random_head(2, n=1)
    kept, advantages = torch.tensor([[7, 2, 9]]), torch.tensor([1.5, -0.4, 0.3], dtype=torch.float64)
    p_inf = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    everything = torch.ones_like(kept, dtype=torch.bool)

    policy = naive(naive_log_probs(head, 1.0), kept[0, :1], kept, everything)[0].exp()
    wanted = torch.autograd.grad((policy[kept[0]] * advantages).sum(), leaves(head))

    lam = 1.3
    z = torch.minimum(p_inf, policy[kept[0]].detach() / lam).sum()
    sums = {"rho": 0.0, "obrs": 0.0, "untruncated": 0.0}
    for column, token in enumerate(kept[0]):
        log_prob = support_log_probs(head, token[None], kept, everything, 1.0)[0][0]
        rho = (log_prob.exp() / p_inf[column]).detach()
        accepted, weight = (rho / lam).clamp(max=1.0), z * rho.clamp(min=lam)
        sums["rho"] += p_inf[column] * rho * advantages[column] * log_prob
        sums["obrs"] += p_inf[column] * accepted * weight * advantages[column] * log_prob

        whole = naive_log_probs(head, 1.0)[0, token]
        sums["untruncated"] += p_inf[column] * (whole.exp() / p_inf[column]).detach() * advantages[column] * whole

    gradients = {name: torch.autograd.grad(total, leaves(head), retain_graph=True) for name, total in sums.items()}
    torch.testing.assert_close(gradients["rho"], wanted)
    torch.testing.assert_close(gradients["obrs"], tuple(z * part for part in wanted))
    assert (gradients["untruncated"][0] - wanted[0]).abs().max() > 0.1 * wanted[0].abs().max()
