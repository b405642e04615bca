"""The digest of weights is that of the same formula in plain Python, and notices the changes that it must detect."""

import hashlib
import json
import struct
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from jackpot.core import digest
from jackpot.core.digest import WeightsDigest, weights_digest

ROW = 4096  # words
KEYS = [key | 1 for key in struct.unpack(f"<{ROW}Q", hashlib.shake_256(b"jackpot: weights digest").digest(8 * ROW))]
FLOAT, BRAIN = torch.float32, torch.bfloat16
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


def raw(tensor: Tensor) -> bytes:
    """Return a tensor's bytes."""
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist())


def plain_digest(named_tensors: list[tuple[str, Tensor]]) -> str:
    """Compute the digest with Python's integers, for tensors that need no cast."""
    hashes = []
    for name, tensor in named_tensors:
        data = raw(tensor)
        words = struct.unpack(f"<{-(-len(data) // 4)}i", data + bytes(-len(data) % 4))
        rows = [words[start : start + ROW] for start in range(0, len(words), ROW)]
        sums = [sum(key * word for key, word in zip(KEYS, row, strict=False)) % 2**64 for row in rows]

        head = json.dumps([name, list(tensor.shape), str(tensor.dtype)]) + "\n"
        hashes.append(hashlib.sha256(head.encode() + struct.pack(f"<{len(sums)}Q", *sums)).hexdigest())

    return hashlib.sha256("\n".join(sorted(hashes)).encode()).hexdigest()


def normal(*shape: int, dtype: torch.dtype = FLOAT, seed: int = 0) -> Tensor:
    """Draw a tensor of normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def digest_of(tensor: Tensor, name: str = "weight") -> str:
    """Compute the digest of a single tensor, without a cast."""
    return weights_digest([(name, tensor)], tensor.dtype)


SHAPES = [(), (0,), (3, 0), (1,), (3,), (7, 5), (ROW,), (ROW + 1,), (2 * ROW + 5,), (3, 3 * ROW), (2, 17 * ROW + 3)]


@pytest.mark.parametrize("dtype", [FLOAT, BRAIN, torch.float16, torch.float64, torch.int8], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_digest_is_that_of_the_formula(shape, dtype):
    tensor = (100 * normal(*shape)).to(dtype)
    assert digest_of(tensor) == plain_digest([("weight", tensor)])


def test_the_digest_of_many_tensors_does_not_depend_on_order():
    named = [(f"layer.{index}.weight", normal(index, 3, seed=index)) for index in range(12)]
    assert weights_digest(named, FLOAT) == weights_digest(reversed(named), FLOAT) == plain_digest(named)


def test_digests_in_files_stay_valid():
    """Saved digests must stay valid, so the formula must keep giving this value."""
    named = [("a", torch.arange(10_000, dtype=FLOAT).view(100, 100)), ("b", torch.tensor(-0.5))]
    assert weights_digest(named, BRAIN) == "10462d5ed6fb48b9553df06ecdbf83270c9598bc0ca33e27ba16b271987bd4a1"


@pytest.mark.parametrize("device", DEVICES)
def test_a_digest_is_the_same_on_every_device(device):
    named = [("a", normal(300, 1001)), ("b", normal(5)), ("c", normal(3)[1:])]
    moved = [(name, tensor.to(device)) for name, tensor in named]
    for dtype in (FLOAT, BRAIN):
        assert weights_digest(moved, dtype) == plain_digest([(name, tensor.to(dtype)) for name, tensor in named])


@pytest.mark.parametrize("rows", [1, 3, 1024])
def test_a_digest_does_not_depend_on_the_chunks(monkeypatch, rows):
    tensor, brain = normal(23, ROW), normal(23, ROW + 1, dtype=BRAIN)
    before = digest_of(tensor), digest_of(brain)
    monkeypatch.setattr(digest, "_CPU_ROWS", rows)
    assert (digest_of(tensor), digest_of(brain)) == before


def test_a_digest_does_not_depend_on_the_number_of_threads():
    tensor, threads = normal(70, ROW), torch.get_num_threads()
    digests = set()
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            digests.add(digest_of(tensor))
    finally:
        torch.set_num_threads(threads)

    assert digests == {plain_digest([("weight", tensor)])}


def test_a_digest_does_not_depend_on_the_layout_in_memory():
    tensor = normal(30, 7, dtype=BRAIN)
    wide = torch.zeros(30, 20, dtype=BRAIN)
    wide[:, 3:10] = tensor
    shifted = torch.cat([torch.ones(1, dtype=BRAIN), tensor.reshape(-1)])[1:].view(30, 7)  # begins within a word

    layouts = [tensor.T.contiguous().T, wide[:, 3:10], shifted, torch.nn.Parameter(tensor)]
    assert {digest_of(layout) for layout in layouts} == {plain_digest([("weight", tensor)])}
    assert digest_of(normal(1).expand(9)) == digest_of(normal(1).repeat(9))


def test_tensors_are_cast_before_their_digest_is_taken():
    tensor = normal(50, 3)
    assert weights_digest([("a", tensor)], BRAIN) == weights_digest([("a", tensor.to(BRAIN))], BRAIN)
    assert weights_digest([("a", tensor)], BRAIN) == plain_digest([("a", tensor.to(BRAIN))])


@pytest.mark.parametrize("dtype", [FLOAT, BRAIN], ids=str)
def test_every_flipped_bit_is_noticed(dtype):
    tensor = normal(13, dtype=dtype)
    data = raw(tensor)
    flipped = set()
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        flipped.add(digest_of(torch.frombuffer(changed, dtype=dtype)))

    assert len(flipped | {digest_of(tensor)}) == 8 * len(data) + 1


def accidents(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Return changes of a matrix [N, M] that leave its shape as it is."""
    flat, shape = tensor.reshape(-1), tensor.shape
    last = len(flat) - 1

    for first, second in [(0, 1), (0, last), (1, 2), (5, 4101), (0, 8192)]:
        order = torch.arange(len(flat))
        order[first], order[second] = second, first
        yield f"elements {first} and {second} swapped", flat[order].view(shape)

    for shift in (1, 2, 4096, -1):
        yield f"shifted by {shift}", flat.roll(shift).view(shape)
    yield "shifted, zero at the start", torch.cat([flat.new_zeros(1), flat[:-1]]).view(shape)
    yield "rows reversed", tensor.flip(0)
    yield "columns reversed", tensor.flip(1)
    yield "two rows swapped", tensor[[1, 0, *range(2, len(tensor))]]
    yield "transposed", tensor.T.reshape(shape)
    yield "negated", -tensor

    for count in (1, 2, 3, 4, 64):
        sign = torch.ones_like(flat)
        sign[:: len(flat) // count] = -1  # at equal distances
        yield f"about {count} signs changed", (flat * sign).view(shape)
    for count in (2, 4):
        sign = torch.ones_like(flat)
        sign[:count] = -1
        yield f"the first {count} signs changed", (flat * sign).view(shape)

    yield "zeros", torch.zeros_like(tensor)
    yield "last element changed", torch.cat([flat[:-1], -flat[-1:]]).view(shape)
    yield "last row lost", torch.cat([tensor[:-1], torch.zeros_like(tensor[-1:])])
    yield "doubled", 2 * tensor
    yield "a NaN", torch.where(torch.arange(len(flat)) == 77, float("nan"), flat).to(tensor.dtype).view(shape)
    yield "one moved to the next float", torch.nextafter(tensor.float(), tensor.float() + 1).to(tensor.dtype)


@pytest.mark.parametrize("dtype", [FLOAT, BRAIN], ids=str)
def test_accidents_are_noticed_and_told_apart(dtype):
    tensor = normal(129, 129, dtype=dtype)
    changed = {name: value for name, value in accidents(tensor) if not torch.equal(value, tensor)}
    digests = {digest_of(value): name for name, value in changed.items()} | {digest_of(tensor): "itself"}

    assert len(digests) == len(changed) + 1 >= 24
    assert len(set(digests.values())) == len(digests)


@pytest.mark.parametrize("dtype", [FLOAT, BRAIN], ids=str)
def test_the_sign_of_zero_is_noticed_once_and_everywhere(dtype):
    zeros = torch.zeros(300, dtype=dtype)
    negative = [torch.where(torch.arange(300) < count, -zeros, zeros) for count in range(301)]
    assert len({digest_of(tensor) for tensor in negative}) == 301


def test_every_pair_of_signs_is_noticed():
    """The highest bit of two words at once: what a sum of whole 64-bit words would cancel."""
    tensor = normal(40)
    digests = set()
    for first in range(40):
        for second in range(first):
            changed = tensor.clone()
            changed[[first, second]] *= -1
            digests.add(digest_of(changed))

    assert len(digests | {digest_of(tensor)}) == 40 * 39 // 2 + 1


def test_names_shapes_and_dtypes_count():
    tensor = normal(4, 6)
    different = [
        weights_digest([], FLOAT),
        digest_of(tensor),
        digest_of(tensor, "other"),
        digest_of(tensor.view(6, 4)),
        digest_of(tensor.view(24)),
        digest_of(tensor.view(torch.int32)),
        weights_digest([("weight", tensor)], BRAIN),
        weights_digest([("weight", tensor), ("empty", torch.empty(0))], FLOAT),
        weights_digest([("weight", tensor)] * 2, FLOAT),
        digest_of(torch.zeros(5)),
        digest_of(torch.zeros(6)),
        digest_of(torch.zeros(5, dtype=BRAIN)),
        digest_of(torch.zeros(6, dtype=BRAIN)),
    ]

    assert len(set(different)) == len(different)


def test_two_tensors_that_changed_places_are_noticed():
    first, second = normal(8, 8, seed=1), normal(8, 8, seed=2)
    assert weights_digest([("a", first), ("b", second)], FLOAT) != weights_digest([("a", second), ("b", first)], FLOAT)


def test_watching_hands_tensors_on_and_adds_what_was_taken():
    named = [(f"{index}", normal(4, seed=index)) for index in range(5)]
    sent = WeightsDigest(FLOAT)
    stream = sent.watch(named)
    taken = [next(stream), next(stream)]

    assert all(ours[1] is theirs[1] for ours, theirs in zip(taken, named, strict=False))
    assert sent.hexdigest() == weights_digest(named[:2], FLOAT)
    assert [name for name, _ in stream] == ["2", "3", "4"]
    assert sent.hexdigest() == weights_digest(named, FLOAT)


class LargestCopy(TorchDispatchMode):
    """Records the bytes of the largest new tensor; views of existing ones do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        known = {item.untyped_storage().data_ptr() for item in args if isinstance(item, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in known:
            self.size = max(self.size, result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("dtype", [FLOAT, BRAIN, torch.float64], ids=str)
def test_a_large_tensor_is_worked_on_in_small_pieces(dtype):
    tensor = normal(1000, 4001)
    with LargestCopy() as copies:
        weights_digest([("weight", tensor)], dtype)
    assert 0 < copies.size <= 2**20
