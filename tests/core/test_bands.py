"""Bands of values have names of their ends, and each value lies in exactly one of them."""

import torch

from jackpot.core.bands import band_masks, band_names


def test_bands_are_named_by_their_ends():
    assert band_names((0, 1, 4)) == ["0", "1-3", "4-up"]
    assert band_names((0.0, 0.5)) == ["0-0.5", "0.5-up"]


def test_a_value_lies_in_the_band_that_starts_at_it_or_before_it():
    masks = band_masks(torch.tensor([[-1, 0, 1], [3, 4, 99]]), (0, 1, 4))
    assert {name: mask.nonzero().tolist() for name, mask in masks.items()} == {
        "0": [[0, 1]],
        "1-3": [[0, 2], [1, 0]],
        "4-up": [[1, 1], [1, 2]],
    }
