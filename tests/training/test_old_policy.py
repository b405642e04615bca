"""Copies of weights, which stand in for the model's own for a while."""

import torch
from torch import nn

from jackpot.training.old_policy import KeptWeights


def test_kept_weights_take_no_more_pinned_memory_than_they_need():
    """torch rounds what it pins up to a power of two."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 5), (7,), (2, 8), (0, 4), (1,)]
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    parameters[2].requires_grad_(False)
    first_values = [parameter.detach().clone() for parameter in parameters]

    weights = KeptWeights(parameters)

    # of the numbers 15, 7 and 1 that have a gradient: 8 + 4 + 2 + 1, 4 + 2 + 1, and 1
    assert sorted(len(copy) for copy in weights._copies) == [1, 1, 1, 2, 2, 4, 4, 8]

    weights.keep()
    with torch.no_grad():
        later_values = [parameter.add_(1.0).clone() for parameter in parameters[:2]]

    with weights.in_place():
        assert all(torch.equal(*pair) for pair in zip(parameters, first_values, strict=True))
    assert all(torch.equal(*pair) for pair in zip(parameters[:2], later_values, strict=True))
