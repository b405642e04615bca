"""Copies of weights, which stand in for the model's own for a while."""

import torch
from torch import nn

from jackpot.training.old_policy import KeptWeights


def test_kept_weights_take_no_more_pinned_memory_than_they_need():
    """torch rounds what it pins up to a power of two."""
    drawn = torch.Generator().manual_seed(0)
    shapes = [(3, 5), (7,), (2, 8), (0, 4), (1,)]
    parameters = [nn.Parameter(torch.randn(shape, generator=drawn)) for shape in shapes]
    parameters[2].requires_grad_(False)
    kept, before = KeptWeights(parameters), [one.detach().clone() for one in parameters]
    assert sorted(len(copy) for copy in kept._copies) == [1, 1, 1, 2, 2, 4, 4, 8]

    kept.keep()
    with torch.no_grad():
        after = [one.add_(1.0).clone() for one in parameters[:2]]
    with kept.in_place():
        assert all(map(torch.equal, parameters, before))
    assert all(map(torch.equal, parameters[:2], after))
