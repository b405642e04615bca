"""A digest of weights, computed on the device that holds them: equal weights have equal digests. Torch only.

It finds accidents, such as weights that were damaged on their way to an engine. It is no protection against an
attacker: its keys are public and its sums are linear.
"""

import json
from array import array
from collections.abc import Iterable, Iterator
from functools import cache
from hashlib import sha256, shake_256

import torch
from torch import Tensor

_ROW = 4096  # words that one sum covers
_WORD = 4  # bytes of a word
_CPU_ROWS = 32  # rows that a CPU multiplies at once: their products, 1 MiB, stay in the cache of a core
_GPU_ROWS = 1024  # rows that a GPU multiplies at once, with products of 32 MiB


class WeightsDigest:
    """The digest of named tensors, which are added in any order.

    The bytes of a tensor, in row-major order and padded with zeros to whole words, are signed 32-bit words w. Every row
    of 4096 words becomes one sum with fixed odd keys k,

        s_r = sum_i k_i w_{4096 r + i}          mod 2**64,     r = 0, 1, ...; the last row may be shorter

    SHA-256 hashes each tensor's name, shape, dtype and sums, 8 bytes for a row of 16 KiB, and then all these hashes in
    sorted order. Sums of integers do not round, so device, chunks and threads do not matter.

    Two tensors that differ in one word of a row always differ in its sum (an odd key times less than 2**32 is not 0).
    Where several words of a row differ, the sums are equal with a chance of at most 2**-32 over the choice of keys.

    A tensor is read a chunk at a time; a tensor that is not contiguous is copied first.

    Args:
        dtype: dtype to which every tensor is cast first, chunk by chunk; None: each tensor keeps its dtype.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self._dtype = dtype
        self._hashes: list[str] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Add one tensor, under its name, to the digest."""
        dtype = self._dtype or tensor.dtype
        shape = json.dumps([name, list(tensor.shape), str(dtype)])
        tensor_hash = sha256(f"{shape}\n".encode())
        tensor_hash.update(array("q", _row_sums(tensor.detach(), dtype).tolist()).tobytes())
        self._hashes.append(tensor_hash.hexdigest())

    def watch(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass (name, tensor) pairs on to the caller, and add each tensor to the digest just before it is yielded.

        So one pass over a generator of tensors serves both their use and their digest.
        """
        for name, tensor in named_tensors:
            self.add(name, tensor)
            yield name, tensor

    def hexdigest(self) -> str:
        """Return the digest of the tensors added so far: 64 hexadecimal digits."""
        return sha256("\n".join(sorted(self._hashes)).encode()).hexdigest()


def weights_digest(named_tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None) -> str:
    """Return the digest of named tensors, 64 hexadecimal digits, which does not depend on their order and device.

    Args:
        dtype: dtype to which every tensor is cast first; None: each tensor keeps its dtype.
    """
    digest = WeightsDigest(dtype)
    for name, tensor in named_tensors:
        digest.add(name, tensor)
    return digest.hexdigest()


def _row_sums(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the weighted sum s_r (see `WeightsDigest`) of each row of 4096 words of a tensor's bytes: [rows] int64.

    The tensor is cast to `dtype` first. The sums are on the tensor's device. An empty tensor has no rows.
    """
    keys = _keys(tensor.device)
    rows = _CPU_ROWS if tensor.device.type == "cpu" else _GPU_ROWS
    # Each chunk has `rows` rows of `_ROW` words of `_WORD` bytes; the last one may be shorter.
    chunks = tensor.reshape(-1).split(rows * _ROW * _WORD // dtype.itemsize)

    # All chunks share this memory, as new memory costs page faults: `cast` for a chunk of another dtype, `products` for
    # its words, whose number is rounded up. The first chunk is the longest.
    cast = torch.empty_like(chunks[0], dtype=dtype)
    products = torch.empty(-(-cast.nbytes // _WORD), dtype=torch.int64, device=tensor.device)

    sums: list[Tensor] = []
    for chunk in chunks:
        converted = chunk if chunk.dtype == dtype else cast[: len(chunk)].copy_(chunk)
        sums += _chunk_sums(_words(converted), keys, products)
    return torch.cat(sums)


def _chunk_sums(words: Tensor, keys: Tensor, products: Tensor) -> Iterator[Tensor]:
    """Yield the weighted sums of the whole rows of `words`, [W] int32, then that of a last, shorter row, if any.

    A row has 4096 words; its sum is s_r in `WeightsDigest`. `products` is memory to work in, at least [W] int64.
    """
    whole = len(words) - len(words) % _ROW  # number of words in whole rows
    terms = products[: len(words)].copy_(words)
    yield terms[:whole].view(-1, _ROW).mul_(keys).sum(dim=1)
    if whole < len(words):
        yield terms[whole:].mul_(keys[: len(words) - whole]).sum(dim=0, keepdim=True)


def _words(chunk: Tensor) -> Tensor:
    """View the bytes of a flat tensor as int32 words.

    A tensor whose bytes are no whole number of words, or are not aligned to words, is copied and padded with zeros.
    """
    size = chunk.dtype.itemsize
    if len(chunk) * size % _WORD == 0 and chunk.storage_offset() * size % _WORD == 0:
        return chunk.view(torch.int32)
    # The number of words, rounded up, times the bytes of a word.
    padded = torch.zeros(-(-len(chunk) * size // _WORD) * _WORD, dtype=torch.uint8, device=chunk.device)
    padded[: len(chunk) * size] = chunk.view(torch.uint8)
    return padded.view(torch.int32)


@cache
def _keys(device: torch.device) -> Tensor:
    """Return the odd numbers by which the words of a row are multiplied: [4096] int64, the keys k of `WeightsDigest`.

    They never change, since saved digests depend on them.
    """
    keys = array("q", shake_256(b"jackpot: weights digest").digest(8 * _ROW))
    return torch.tensor(keys, dtype=torch.int64, device=device) | 1
