"""The tile reader as Triton kernels: a tile is read twice in forward and once in backward, whatever is computed.

A program of `_read` has one position: it finishes the logits, takes their maxima, and reads them again for the sums. A
program of `_differentiate` has one position and some tokens. The formulas are those of `reader.py`. Logits are float32
or of half precision; tiles in float64 go to the eager reader.

Status: experimental. It has run on one H200; the tests run it in Triton's interpreter.

Shapes: `C` positions, `T` tokens of a tile.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingTypeStubs]  # Triton has no stubs
import triton.language as tl  # pyright: ignore[reportMissingTypeStubs]
from torch import Tensor

from jackpot.objectives.kernels.reader import EAGER, LOWEST, TileGradient, TileReader, TileSums
from jackpot.objectives.kernels.tiles import Tile
from jackpot.objectives.kernels.topk import BLOCK

WIDTH = 1024  # tokens that a program reads at a time; a multiple of BLOCK
_LOWEST = tl.constexpr(LOWEST)
_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def _logits(
    start: tl.tensor, bias: tl.tensor, columns: tl.tensor, mask: tl.tensor, soft_cap: float, temperature: float,
    RAW: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load logits of one row in float32, at the given columns; -inf where `mask` is False.

    `start` points to the row, `bias` to the bias. With RAW the row holds products W h, which become logits: plus bias,
    soft-capped, divided by the temperature.
    """
    logits = tl.load(start + columns, mask=mask, other=0.0).to(tl.float32)
    if RAW:
        if BIAS:
            logits += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
        if CAP:
            logits = soft_cap * (2.0 * tl.sigmoid(2.0 * (logits / soft_cap)) - 1.0)  # tanh, which Triton lacks
        logits = logits / temperature
    return tl.where(mask, logits, float("-inf"))


@triton.jit
def _finished(start: tl.tensor, columns: tl.tensor, T: int) -> tl.tensor:
    """Load a row's final logits (no raw products W h) at the given columns, in float32; -inf beyond its T tokens."""
    return tl.load(start + columns, mask=columns < T, other=float("-inf")).to(tl.float32)


@triton.jit
def _finish(
    start: tl.tensor, bias: tl.tensor, soft_cap: float, temperature: float, maxima: tl.tensor,
    begin: int, T: int, NUM_BLOCKS: int,
    RAW: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, TOPS: tl.constexpr, WIDTH: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return WIDTH logits of a row from `begin` on.

    With RAW they also replace the products W h in memory; with TOPS the maximum of each block is stored in `maxima`.
    """
    columns = begin + tl.arange(0, WIDTH)
    mask = columns < T
    logits = _logits(start, bias, columns, mask, soft_cap, temperature, RAW, BIAS, CAP)
    if RAW:
        tl.store(start + columns, logits, mask=mask)
    if TOPS:
        blocks = begin // _BLOCK + tl.arange(0, WIDTH // _BLOCK)
        largest = tl.max(tl.reshape(logits, [WIDTH // _BLOCK, _BLOCK]), axis=1)
        tl.store(maxima + blocks, largest, mask=blocks < NUM_BLOCKS)
    return logits


@triton.jit
def _store_sums(
    sums: tl.tensor, C: int, row_max: tl.tensor, sum_exp: tl.tensor, moment: tl.tensor, gap: tl.tensor,
    masked: tl.tensor, PAIR: tl.constexpr,
) -> None:  # fmt: skip
    """Write one position's `TileSums` under one head to `sums`, C numbers apart.

    All but `row_max` still are WIDTH partial sums, or partial maxima (`masked`, for max_at_masked), and are reduced
    first. Only a pair of heads has `gap` and `masked`.
    """
    tl.store(sums, row_max)
    tl.store(sums + C, tl.sum(sum_exp, axis=0))
    tl.store(sums + 2 * C, tl.sum(moment, axis=0))
    if PAIR:
        tl.store(sums + 3 * C, tl.sum(gap, axis=0))
        tl.store(sums + 4 * C, tl.max(masked, axis=0))


@triton.jit
def _read(
    p: tl.tensor, q: tl.tensor, bias_p: tl.tensor, bias_q: tl.tensor, cap_p: float, cap_q: float, temperature: float,
    maxima_p: tl.tensor, maxima_q: tl.tensor, sums: tl.tensor, C: int, T: int, NUM_BLOCKS: int,
    RAW_P: tl.constexpr, RAW_Q: tl.constexpr, BIAS_P: tl.constexpr, BIAS_Q: tl.constexpr,
    CAP_P: tl.constexpr, CAP_Q: tl.constexpr, PAIR: tl.constexpr, TOPS: tl.constexpr, MOMENTS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Write one position's `TileSums` (all but block_max) under heads p and q to `sums` [2, 5, C], field by field.

    The tiles `p` and `q` have C positions and T tokens; with TOPS block_max goes to `maxima_p` and `maxima_q`. Without
    PAIR there is only head p, without MOMENTS `moment` and `gap` are 0.
    """
    row = tl.program_id(0).to(tl.int64)
    p += row * T
    q += row * T
    maxima_p += row * NUM_BLOCKS
    maxima_q += row * NUM_BLOCKS

    max_p = tl.full([WIDTH], float("-inf"), tl.float32)
    max_q = tl.full([WIDTH], float("-inf"), tl.float32)
    masked_p = tl.full([WIDTH], float("-inf"), tl.float32)
    masked_q = tl.full([WIDTH], float("-inf"), tl.float32)

    # Turn products into logits, and take the largest logits: of all tokens, and (`masked`) of those whose logit is -inf
    # under the other head.
    for begin in range(0, T, WIDTH):
        logits_p = _finish(
            p, bias_p, cap_p, temperature, maxima_p, begin, T, NUM_BLOCKS, RAW_P, BIAS_P, CAP_P, TOPS, WIDTH
        )
        max_p = tl.maximum(max_p, logits_p)
        if PAIR:
            logits_q = _finish(
                q, bias_q, cap_q, temperature, maxima_q, begin, T, NUM_BLOCKS, RAW_Q, BIAS_Q, CAP_Q, TOPS, WIDTH
            )
            max_q = tl.maximum(max_q, logits_q)
            masked_p = tl.maximum(masked_p, tl.where(logits_q == float("-inf"), logits_p, float("-inf")))
            masked_q = tl.maximum(masked_q, tl.where(logits_p == float("-inf"), logits_q, float("-inf")))

    tl.debug_barrier()  # what was stored above is loaded below
    row_max_p = tl.maximum(tl.max(max_p, axis=0), _LOWEST)
    row_max_q = tl.maximum(tl.max(max_q, axis=0), _LOWEST)
    sum_p = tl.zeros([WIDTH], tl.float32)
    sum_q = tl.zeros([WIDTH], tl.float32)
    moment_p = tl.zeros([WIDTH], tl.float32)
    moment_q = tl.zeros([WIDTH], tl.float32)
    gap_p = tl.zeros([WIDTH], tl.float32)
    gap_q = tl.zeros([WIDTH], tl.float32)

    # Read the logits again for the sums, which are relative to the maxima.
    for begin in range(0, T, WIDTH):
        columns = begin + tl.arange(0, WIDTH)
        shifted_p = _finished(p, columns, T) - row_max_p
        exp_p = tl.exp(shifted_p)
        sum_p += exp_p
        if MOMENTS:
            shifted_p = tl.maximum(shifted_p, _LOWEST)
            moment_p += exp_p * shifted_p
        if PAIR:
            shifted_q = _finished(q, columns, T) - row_max_q
            exp_q = tl.exp(shifted_q)
            sum_q += exp_q
            if MOMENTS:
                shifted_q = tl.maximum(shifted_q, _LOWEST)
                moment_q += exp_q * shifted_q
                gap_p += exp_p * (shifted_p - shifted_q)
                gap_q += exp_q * (shifted_q - shifted_p)

    _store_sums(sums + row, C, row_max_p, sum_p, moment_p, gap_p, masked_p, PAIR)
    if PAIR:
        _store_sums(sums + 5 * C + row, C, row_max_q, sum_q, moment_q, gap_q, masked_q, PAIR)


@triton.jit
def _common_mass(
    p: tl.tensor, q: tl.tensor, bias_p: tl.tensor, bias_q: tl.tensor, cap_p: float, cap_q: float, temperature: float,
    logsumexp_p: tl.tensor, logsumexp_q: tl.tensor, lam: float, mass: tl.tensor, T: int,
    RAW_P: tl.constexpr, RAW_Q: tl.constexpr, BIAS_P: tl.constexpr, BIAS_Q: tl.constexpr,
    CAP_P: tl.constexpr, CAP_Q: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Write one position's share of Z, the sum of min(q(x), p(x) / lam) over the tile's tokens x, to `mass` [C].

    Z is the probability that OBRS accepts a token. `p` and `q` point to the tiles [C, T] of policy and rollout model,
    whose probabilities are p(x) and q(x).
    """
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([WIDTH], tl.float32)
    normalizer_p, normalizer_q = tl.load(logsumexp_p + row), tl.load(logsumexp_q + row)
    for begin in range(0, T, WIDTH):
        columns = begin + tl.arange(0, WIDTH)
        mask = columns < T
        logits_p = _logits(p + row * T, bias_p, columns, mask, cap_p, temperature, RAW_P, BIAS_P, CAP_P)
        logits_q = _logits(q + row * T, bias_q, columns, mask, cap_q, temperature, RAW_Q, BIAS_Q, CAP_Q)
        total += tl.minimum(tl.exp(logits_q - normalizer_q), tl.exp(logits_p - normalizer_p) / lam)
    tl.store(mass + row, tl.sum(total, axis=0))


@triton.jit
def _gradient(
    log_probs: tl.tensor, other_log_probs: tl.tensor, coefficients: tl.tensor, C: int, row: tl.tensor, is_id: tl.tensor,
    logits: tl.tensor, soft_cap: float, temperature: float, CAP: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the loss's gradient with respect to a position's products W h.

    It is the formula of `GradCoefficients`, times the derivative of the soft cap.
    """
    # The fields of `GradCoefficients` lie in their order, C numbers apart. Below, _LOWEST in place of -inf makes the
    # product with a probability of 0 be 0.
    on_id = tl.load(coefficients + row)
    constant = tl.load(coefficients + C + row)
    on_log = tl.load(coefficients + 2 * C + row)
    on_other_log = tl.load(coefficients + 3 * C + row)
    on_other = tl.load(coefficients + 4 * C + row)
    factor = constant + on_log * tl.maximum(log_probs, _LOWEST) - on_other_log * tl.maximum(other_log_probs, _LOWEST)
    gradient = tl.exp(log_probs) * factor - on_other * tl.exp(other_log_probs) + tl.where(is_id, on_id, 0.0)
    if CAP:
        ratio = logits * (temperature / soft_cap)
        gradient *= 1.0 - ratio * ratio
    return gradient


@triton.jit
def _differentiate(
    p: tl.tensor, q: tl.tensor, bias_p: tl.tensor, bias_q: tl.tensor, cap_p: float, cap_q: float, temperature: float,
    logsumexp_p: tl.tensor, logsumexp_q: tl.tensor, coefficients: tl.tensor, ids: tl.tensor,
    out_p: tl.tensor, out_q: tl.tensor, C: int, T: int,
    RAW_P: tl.constexpr, RAW_Q: tl.constexpr, BIAS_P: tl.constexpr, BIAS_Q: tl.constexpr,
    CAP_P: tl.constexpr, CAP_Q: tl.constexpr, PAIR: tl.constexpr,
    TRAINS_P: tl.constexpr, TRAINS_Q: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Write the gradients with respect to the products W h of one position at WIDTH tokens to each head's `out`.

    The tiles have C positions and T tokens. PAIR: there is a second head q; TRAINS_P, TRAINS_Q: a head has a gradient.
    `coefficients` [2, 5, C] are each head's fields of `GradCoefficients`. All loads come before the stores, since a
    gradient may take the memory of the logits.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = columns < T
    is_id = columns == tl.load(ids + row)

    logits_p = _logits(p + row * T, bias_p, columns, mask, cap_p, temperature, RAW_P, BIAS_P, CAP_P)
    log_probs_p = logits_p - tl.load(logsumexp_p + row)
    logits_q = tl.zeros([WIDTH], tl.float32)
    log_probs_q = tl.zeros([WIDTH], tl.float32)

    if PAIR:
        logits_q = _logits(q + row * T, bias_q, columns, mask, cap_q, temperature, RAW_Q, BIAS_Q, CAP_Q)
        log_probs_q = logits_q - tl.load(logsumexp_q + row)

    if TRAINS_Q:
        gradient = _gradient(
            log_probs_q, log_probs_p, coefficients + 5 * C, C, row, is_id, logits_q, cap_q, temperature, CAP_Q
        )
        tl.store(out_q + row * T + columns, gradient.to(out_q.dtype.element_ty), mask=mask)
    if TRAINS_P:
        gradient = _gradient(log_probs_p, log_probs_q, coefficients, C, row, is_id, logits_p, cap_p, temperature, CAP_P)
        tl.store(out_p + row * T + columns, gradient.to(out_p.dtype.element_ty), mask=mask)


class TritonReader(TileReader):
    """The tile reader that runs the kernels of this file on a GPU."""

    name = "triton"

    def read(self, tiles: Sequence[Tile], tops: bool, moments: bool) -> list[TileSums]:
        """Return the sums of each head, which `TileSums` describes; torch computes those of float64 logits."""
        if tiles[0].logits.dtype == torch.float64:
            return EAGER.read(tiles, tops, moments)

        c, t = tiles[0].logits.shape
        num_blocks, is_pair = -(-t // BLOCK), len(tiles) == 2  # t / BLOCK rounded up
        sums = tiles[0].logits.new_empty((2, 5, c), dtype=torch.float32)  # 5 sums of each position, for each head
        maxima = [tile.logits.new_empty((c, num_blocks if tops else 0), dtype=torch.float32) for tile in tiles]

        # Where there is a single tile, the kernel gets it as the second one too.
        arguments, flags = _operands(tiles)
        flags |= {"PAIR": is_pair, "TOPS": tops, "MOMENTS": moments}
        _launch(_read, (c,), *arguments, maxima[0], maxima[-1], sums, c, t, num_blocks, **flags, WIDTH=_width(t))

        results: list[TileSums] = []
        for i, head_sums in enumerate(sums[: len(tiles)]):
            row_max, sum_exp, moment, gap, max_at_masked = head_sums  # as `_store_sums` has written them
            other_may_mask = is_pair and tiles[1 - i].may_mask  # whether the other head may have logits of -inf
            results.append(
                TileSums(
                    row_max=row_max,
                    sum_exp=sum_exp,
                    moment=moment if moments else None,
                    block_max=maxima[i] if tops else None,
                    gap=gap if is_pair and moments else None,
                    max_at_masked=max_at_masked if other_may_mask and moments else None,
                )
            )
        return results

    def common_mass(self, tiles: Sequence[Tile], logsumexps: Sequence[Tensor], lam: float) -> Tensor:
        """Return the share of Z that `TileReader.common_mass` describes; torch computes that of float64 logits."""
        if tiles[0].logits.dtype == torch.float64:
            return EAGER.common_mass(tiles, logsumexps, lam)
        c, t = tiles[0].logits.shape
        mass = tiles[0].logits.new_empty(c, dtype=torch.float32)
        arguments, flags = _operands(tiles)
        _launch(_common_mass, (c,), *arguments, *logsumexps, lam, mass, t, **flags, WIDTH=_width(t))
        return mass

    def differentiate(
        self,
        tiles: Sequence[Tile],
        logsumexps: Sequence[Tensor],
        gradients: Sequence[TileGradient | None],
        columns: Tensor,
    ) -> None:
        """Write the gradients that `TileReader.differentiate` describes; torch computes those of float64 logits."""
        logits = tiles[0].logits
        if logits.dtype == torch.float64:
            return EAGER.differentiate(tiles, logsumexps, gradients, columns)

        c, t = logits.shape
        # [2, 5, C]: each head's fields of `GradCoefficients`, in their order; 0 for None.
        coefficients = logits.new_zeros((2, 5, c), dtype=torch.float32)
        for i, head_gradient in enumerate(gradients):
            for j, coefficient in enumerate(head_gradient.coefficients if head_gradient else ()):
                if coefficient is not None:
                    coefficients[i, j] = coefficient

        # A head without gradient has no memory to write to: its logits stand there, and the kernel does not write them.
        out = [logits if head_gradient is None else head_gradient.out for head_gradient in gradients]
        is_pair, trains = len(tiles) == 2, [head_gradient is not None for head_gradient in gradients]
        arguments, flags = _operands(tiles)
        flags |= {"PAIR": is_pair, "TRAINS_P": trains[0], "TRAINS_Q": is_pair and trains[1]}
        # The arguments are in the order of the kernel's parameters; a single head is given as the second one too. The
        # grid has a program for each position and each `_width(t)` tokens, rounded up.
        arguments += [logsumexps[0], logsumexps[-1], coefficients, columns, out[0], out[-1], c, t]
        _launch(_differentiate, (c, -(-t // _width(t))), *arguments, **flags, WIDTH=_width(t))


TRITON = TritonReader()


def _launch(
    kernel: triton.JITFunction[Any], grid: tuple[int, ...], *arguments: Tensor | float, **constants: int
) -> None:
    """Run a kernel's programs, one for each point of `grid`; none for an empty grid.

    Triton hands each tensor to the kernel as a pointer: hence the kernels' annotations, tl.tensor in place of Tensor.
    """
    if grid[0]:  # 0 where a tile has no position
        kernel[grid](*arguments, **constants)


def _width(tokens: int) -> int:
    """Return how many of a tile's `tokens` a program of a kernel reads at a time, a power of two."""
    return min(WIDTH, max(BLOCK, 1 << (tokens - 1).bit_length()))


def _operands(tiles: Sequence[Tile]) -> tuple[list[Tensor | float], dict[str, bool]]:
    """Return a kernel's first arguments, and its flags RAW, BIAS and CAP, for tiles P and Q; a single tile is both."""
    pair = [tiles[0], tiles[-1]]
    # Without a bias or a soft cap any tensor or number stands in its place: the flags say that it is not read.
    biases = [tile.logits if tile.bias is None else tile.bias for tile in pair]
    caps = [tile.soft_cap or 1.0 for tile in pair]
    flags: dict[str, bool] = {}
    for name, tile in zip("PQ", pair, strict=True):
        flags |= {f"RAW_{name}": tile.is_raw, f"BIAS_{name}": tile.bias is not None, f"CAP_{name}": bool(tile.soft_cap)}
    # The arguments are in the order of the kernels' first parameters.
    return [*(tile.logits for tile in pair), *biases, *caps, tiles[0].temperature], flags
