"""Sums compared entry by entry, where == would stumble over NaN and over tensors."""

import torch

from jackpot.core.metrics import Sums


def assert_equal_sums(first: Sums, second: Sums) -> None:
    """Two sums have the same names, kinds of entries and values to the bit; NaN is equal to NaN."""
    assert first.keys() == second.keys()
    for name in first:
        assert type(first[name]) is type(second[name]), name
        for first_value, second_value in zip(first[name], second[name], strict=True):
            torch.testing.assert_close(first_value, second_value, rtol=0.0, atol=0.0, equal_nan=True, msg=name)
