"""`uniforms` draws the numbers of splitmix64, by key and position alone; `fold_in` makes keys of names."""

import itertools

import pytest
import torch

from jackpot.core.prng import fold_in, key_tensor, uniforms

MASK = 2**64 - 1  # of 64 bits
KEYS = [0, 1, 42, 2**63 - 1, 2**63, 2**64 - 1, 0x9E3779B97F4A7C15]


def splitmix64(state: int, count: int) -> list[int]:
    """Compute the first `count` outputs of the published generator, 64 bits each, with Python's integers."""
    outputs = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state  # as in the publication
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        outputs.append(z ^ (z >> 31))
    return outputs


def test_the_reference_is_the_published_generator():
    assert splitmix64(1234567, 3) == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("key", KEYS)
def test_a_row_is_splitmix64_from_the_key(key):
    row = uniforms([key], range(500))

    assert row.dtype == torch.float64
    assert row.tolist() == [(output >> 11) / 2**53 for output in splitmix64(key, 500)]


def test_a_number_depends_on_key_and_position_only():
    rows = torch.stack([uniforms([key], range(40)) for key in KEYS])
    positions = torch.tensor([3, 0, 39, 7, 7, 1, 20])

    assert torch.equal(uniforms(KEYS, positions), rows[torch.arange(len(KEYS)), positions])
    assert torch.equal(uniforms(key_tensor(KEYS)[:, None], torch.arange(40)), rows)
    assert torch.equal(uniforms(KEYS[2:3], [11]), rows[2:3, 11])


def test_numbers_are_uniform_over_positions_and_over_keys():
    over_positions = uniforms([fold_in(0, "test")], torch.arange(100_000))
    over_keys = uniforms([fold_in(0, "test", index) for index in range(20_000)], [5])

    for numbers in (over_positions, over_keys):
        assert (numbers >= 0).all()
        assert (numbers < 1).all()

        counts = torch.histc(numbers, bins=100, min=0, max=1)
        expected = len(numbers) / 100
        chi_square = ((counts - expected) ** 2 / expected).sum().item()
        assert 50 < chi_square < 160  # 99 degrees of freedom: 1e-5 on either side

    correlation_of_neighbours = torch.corrcoef(torch.stack([over_positions[:-1], over_positions[1:]]))[0, 1]
    assert abs(correlation_of_neighbours) < 0.02  # six standard errors of 100,000 pairs


def unmixed(z: int) -> int:
    """Undo what splitmix64 does to its state for an output."""
    z = unshifted(z, 31)
    z = unshifted(z * pow(0x94D049BB133111EB, -1, 2**64) & MASK, 27)
    return unshifted(z * pow(0xBF58476D1CE4E5B9, -1, 2**64) & MASK, 30)


def unshifted(z: int, count: int) -> int:
    """Undo z ^ (z >> count)."""
    return z ^ (z >> count) ^ (z >> 2 * count)


def test_the_largest_number_is_below_one():
    """The largest 53 bits there are: found by running the generator backwards from an output of ones."""
    gamma = 0x9E3779B97F4A7C15
    key = (unmixed(MASK) - gamma) & MASK

    assert splitmix64(key, 1) == [MASK]
    assert uniforms([key], [0]).item() == 1 - 2**-53


def test_different_parts_give_different_keys():
    parts = [(), (1,), ("1",), (-1,), (1, 1), (11,), ("a", "bc"), ("ab", "c"), ("abc",), ("",), ("", ""), (2**70,)]
    parts += [("a", 1), (1, "a"), ("é",), ("3:abc",), ("abc", ""), ("int:1:1",)]

    keys = [fold_in(*key_parts) for key_parts in parts]

    assert all(0 <= key < 2**64 for key in keys)
    assert all(a != b for a, b in itertools.combinations(keys, 2))


def test_a_key_never_changes():
    """A run that is resumed years later must draw the same random numbers."""
    assert fold_in(0, "uid", "obrs", 3) == 1529939121031431176


@pytest.mark.parametrize("part", [1.5, None, True, b"bytes"])
def test_a_part_of_another_kind_is_refused(part):
    with pytest.raises(TypeError, match="fold_in takes ints and strings"):
        fold_in("seed", part)


@pytest.mark.parametrize("key", [-1, 2**64])
def test_a_key_outside_64_bits_is_refused(key):
    with pytest.raises(ValueError, match=r"2\*\*64"):
        key_tensor([key])
