"""Sums compared entry by entry, where == would stumble over NaN and over tensors."""

import torch

from jackpot.core.metrics import Sums


def assert_equal_sums(one: Sums, other: Sums) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert type(one[name]) is type(other[name]), name
        for mine, theirs in zip(one[name], other[name], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0.0, atol=0.0, equal_nan=True, msg=name)
