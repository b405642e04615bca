"""What only CUDA has: products of bf16 in fp32, flash attention of several lengths, block-wise products of FP8.

Each checks its arguments as CUDA does (aten/src/ATen/native/cuda: Blas.cpp, ScaledBlas.cpp; transformers/cuda/
attention.cu) and then computes: products by operators of the device, so that a captured graph replays them.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType

from virtual_gpu.cuda import device

calls: Counter[str] = Counter()


def _check(condition: bool, text: str) -> None:
    if not condition:
        raise RuntimeError(text)


def _check_devices(*tensors: Tensor) -> None:
    _check(all(tensor.is_cuda for tensor in tensors), "Expected all tensors to be on the same device")


# Products of another dtype than their factors


def _mm(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    calls["mm"] += 1
    _check_devices(a, b)
    _check(a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0], "mat1 and mat2 shapes cannot be multiplied")
    _check(a.dtype == b.dtype, f"mat1 and mat2 must have the same dtype, but got {a.dtype} and {b.dtype}")
    is_wider = out_dtype == torch.float32 and a.dtype in (torch.float16, torch.bfloat16)
    _check(out_dtype == a.dtype or is_wider, "out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs")
    return a.to(out_dtype) @ b.to(out_dtype)


def _mm_out(a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
    return _into(out, _mm(a, b, out_dtype))


def _addmm(total: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1) -> Tensor:
    _check_devices(total)
    _check(total.dtype in (out_dtype, a.dtype), "self dtype must match either out_dtype or mat1 dtype")
    product = alpha * _mm(a, b, out_dtype)
    return product + beta * total if beta else product


def _addmm_out(total: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor, **factors: float) -> Tensor:
    return _into(out, _addmm(total, a, b, out_dtype, **factors))


def _into(out: Tensor, product: Tensor) -> Tensor:
    _check_devices(out)
    _check(out.dtype == product.dtype, "out_dtype must be the same as the dtype of the provided out tensor")
    _check(out.shape == product.shape, "virtual GPU: out would be resized")
    return out.copy_(product)


# Flash attention of several lengths


class Sequences:
    """The states of several sequences, [tokens, heads, size] each, on the host in fp32."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, cu_query: Tensor, cu_key: Tensor, longest: Any
    ) -> None:
        _check_devices(query, key, value, cu_query, cu_key)
        _check(query.dtype in (torch.float16, torch.bfloat16), "FlashAttention only support fp16 and bf16 data type")
        _check(query.dtype == key.dtype == value.dtype, "query and key must have the same dtype")
        _check(cu_query.dtype == cu_key.dtype == torch.int32, "cu_seqlens must have dtype int32")
        _check(query.shape[-1] <= 256 and query.shape[-1] % 8 == 0, "FlashAttention: head dimension at most 256, by 8")
        _check(query.shape[1] % key.shape[1] == 0, "Number of heads in key/value must divide number of heads in query")
        for states in (query, key, value):
            _check(states.stride(-1) == 1, "Input tensor must have contiguous last dimension")
        self.query, self.key, self.value = (device.host_alias(states).float() for states in (query, key, value))
        self.groups = query.shape[1] // key.shape[1]
        self._ends = [device.host_alias(ends).tolist() for ends in (cu_query, cu_key)]
        for states, ends, length in zip((query, key), self._ends, longest, strict=True):
            _check(ends[-1] == len(states), "virtual GPU: cu_seqlens do not end at the tokens")
            _check(length >= max(b - a for a, b in pairwise(ends)), "virtual GPU: a sequence is longer than max")

    def __call__(self, is_causal: bool, left: int | None, right: int | None, scale: float) -> Iterator[tuple[Any, ...]]:
        """Yield of each sequence its queries and keys as slices, and the scores, [heads, queries, keys]."""
        left, right = (None, 0) if is_causal else (left, right)
        for query_span, key_span in zip(*map(pairwise, self._ends), strict=True):
            q, k = slice(*query_span), slice(*key_span)
            queries, keys = q.stop - q.start, k.stop - k.start
            distances = torch.arange(keys) - torch.arange(keys - queries, keys)[:, None]  # aligned at the last key
            is_hidden = torch.zeros_like(distances, dtype=torch.bool)
            if right is not None and right >= 0:
                is_hidden |= distances > right
            if left is not None and left >= 0:
                is_hidden |= distances < -left
            scores = scale * self.by_head(self.query[q]) @ self.by_head(self.key[k]).mT
            yield q, k, scores.masked_fill(is_hidden, -torch.inf)

    def by_head(self, states: Tensor) -> Tensor:
        """Return states [tokens, heads, size] as [query heads, tokens, size]."""
        return states.repeat_interleave(self.query.shape[1] // states.shape[1], 1).transpose(0, 1)


def _flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_query: Tensor,
    cu_key: Tensor,
    longest_query: int,
    longest_key: int,
    dropout: float,
    is_causal: bool,
    debug_mask: bool,
    *,
    scale: float,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **_: Any,
) -> tuple[Tensor, ...]:
    calls["flash forward"] += 1
    sequences = Sequences(query, key, value, cu_query, cu_key, (longest_query, longest_key))
    out = torch.zeros(query.shape)
    log_sums = torch.zeros(query.shape[1], len(query))
    for q, k, scores in sequences(is_causal, window_size_left, window_size_right, scale):
        log_sums[:, q] = scores.logsumexp(-1)
        out[q] = (scores.softmax(-1) @ sequences.by_head(sequences.value[k])).transpose(0, 1)
    unused_results = (torch.zeros(2, dtype=torch.int64), torch.empty(0), torch.empty(0))  # state of the dropout, a mask
    return tuple(_quietly_on(query, tensor) for tensor in (out.to(query.dtype), log_sums, *unused_results))


def _flash_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sums: Tensor,
    cu_query: Tensor,
    cu_key: Tensor,
    longest_query: int,
    longest_key: int,
    dropout: float,
    is_causal: bool,
    state: Tensor,
    unused: Tensor,
    *,
    scale: float,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    calls["flash backward"] += 1
    sequences = Sequences(query, key, value, cu_query, cu_key, (longest_query, longest_key))
    by_head = sequences.by_head
    out_gradients = device.host_alias(gradient).float()
    gradients = [torch.zeros_like(states) for states in (sequences.query, sequences.key, sequences.value)]

    def summed_by_key_head(states: Tensor) -> Tensor:
        """Sum over the query heads that share a key head."""
        return states.transpose(0, 1).unflatten(1, (-1, sequences.groups)).sum(2)

    for q, k, scores in sequences(is_causal, window_size_left, window_size_right, scale):
        weights, row_gradients = scores.softmax(-1), out_gradients[q].transpose(0, 1)
        weight_gradients = row_gradients @ by_head(sequences.value[k]).mT
        score_gradients = scale * weights * (weight_gradients - (weight_gradients * weights).sum(-1, keepdim=True))
        gradients[0][q] += (score_gradients @ by_head(sequences.key[k])).transpose(0, 1)
        gradients[1][k] += summed_by_key_head(score_gradients.mT @ by_head(sequences.query[q]))
        gradients[2][k] += summed_by_key_head(weights.mT @ row_gradients)
    return tuple(_quietly_on(query, states.to(query.dtype)) for states in gradients)


def _quietly_on(like: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor of the host on the device, without a copy for which the host would wait."""
    copy = torch.empty_like(tensor, device=like.device)
    device.host_alias(copy).copy_(tensor)
    return copy


# Products of FP8 by blocks


def _check_scales(scales: Tensor, rows: int, columns: int) -> None:
    _check(scales.dtype == torch.float32 and scales.shape == (rows, columns), f"scales must be {rows} x {columns}")
    is_by_column = scales.stride(0) == 1 and scales.stride(1) == (rows if columns > 1 else scales.stride(1))
    _check(is_by_column, f"strides of scales must be (1, {rows}), got {scales.stride()}")


def _scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: list[Tensor],
    recipe_a: list[int],
    swizzle_a: list[int],
    scale_b: list[Tensor],
    recipe_b: list[int],
    swizzle_b: list[int],
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    *_: Any,
) -> Tensor:
    calls["scaled_mm"] += 1
    [rows_a], [scales_b] = scale_a, scale_b
    _check_devices(a, b, rows_a, scales_b)
    (m, k), n = a.shape, b.shape[1]
    _check(a.dtype == b.dtype == torch.float8_e4m3fn, "mat_a and mat_b must be fp8 types")
    _check(k == b.shape[0] and k % 16 == 0 and n % 16 == 0, "sizes must be divisible by 16")
    _check(a.stride(1) == 1 and b.stride(0) == 1, "cuBLASLt multiplies row-major by column-major matrices only")
    _check(list(recipe_a) == [ScalingType.BlockWise1x128.value], "virtual GPU: A has scales of rows")
    _check(m % 4 == 0, "cuBLAS reads the scales of rows in pieces of 16 bytes")
    parts = -(-k // 128)
    _check_scales(rows_a, m, parts)
    if list(recipe_b) == [ScalingType.BlockWise128x128.value]:
        blocks = -(-n // 128)
        _check_scales(scales_b, -(-parts // 4) * 4, blocks)
        rows_b = scales_b[:parts].T.repeat_interleave(128, 0, output_size=128 * blocks)[:n]
    else:
        _check_scales(scales_b, n, parts)
        rows_b = scales_b
    total = torch.zeros(m, n, device=a.device)
    left, right = a.float(), b.T.float()
    for block in range(parts):
        columns = slice(128 * block, 128 * block + 128)
        total += rows_a[:, block, None] * (rows_b[:, block] * (left[:, columns] @ right[:, columns].T))
    return total.to(out_dtype or torch.bfloat16)


_library = torch.library.Library("aten", "IMPL", "CUDA")
for _name, _kernel in {
    "mm.dtype": _mm,
    "mm.dtype_out": _mm_out,
    "addmm.dtype": _addmm,
    "addmm.dtype_out": _addmm_out,
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_backward": _flash_backward,
    "_scaled_mm_v2": _scaled_mm,
}.items():
    _library.impl(_name, _kernel)
