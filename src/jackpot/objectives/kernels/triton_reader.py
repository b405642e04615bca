"""The tile reader as Triton kernels: a tile is read twice in forward and once in backward, whatever is computed.

A program of `_read` has one position: it finishes the logits, takes their maxima, and reads them again for the sums. A
program of `_differentiate` has one position and some tokens. The formulas are those of `reader.py`; logits are float32
or rounded, and float64 is left to the eager reader.

Status: never run on its target (a GPU). The tests run it in Triton's interpreter.

Shapes: `C` positions, `T` tokens of a tile.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from jackpot.objectives.kernels.reader import EAGER, LOWEST, GradCoefficients, TileReader, TileSums
from jackpot.objectives.kernels.tiles import Tile
from jackpot.objectives.kernels.topk import BLOCK

WIDTH = 1024  # tokens that a program reads at a time; a multiple of BLOCK
_LOWEST = tl.constexpr(LOWEST)
_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def _logits(
    start, bias, columns, mask, soft_cap, temperature, RAW: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr
):
    """Load logits and finish them; -inf where `mask` is False."""
    found = tl.load(start + columns, mask=mask, other=0.0).to(tl.float32)
    if RAW:
        if BIAS:
            found += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
        if CAP:
            found = soft_cap * (2.0 * tl.sigmoid(2.0 * (found / soft_cap)) - 1.0)
        found = found / temperature
    return tl.where(mask, found, float("-inf"))


@triton.jit
def _finished(start, columns, T):
    """Load finished logits of a row of T; -inf beyond its end."""
    return tl.load(start + columns, mask=columns < T, other=float("-inf")).to(tl.float32)


@triton.jit
def _finish(
    start, bias, soft_cap, temperature, maxima, begin, T, NUM_BLOCKS,
    RAW: tl.constexpr, BIAS: tl.constexpr, CAP: tl.constexpr, TOPS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Load WIDTH logits of a row, finish them, and write raw ones back and the largest of each block to `maxima`."""
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
def _store_sums(sums, C, row_max, sum_exp, moment, gap, masked, PAIR: tl.constexpr):
    """Write the numbers of one position and head, C apart; the last two are those of a pair."""
    tl.store(sums, row_max)
    tl.store(sums + C, tl.sum(sum_exp, axis=0))
    tl.store(sums + 2 * C, tl.sum(moment, axis=0))
    if PAIR:
        tl.store(sums + 3 * C, tl.sum(gap, axis=0))
        tl.store(sums + 4 * C, tl.max(masked, axis=0))


@triton.jit
def _read(
    p, q, bias_p, bias_q, cap_p, cap_q, temperature, maxima_p, maxima_q, sums, C, T, NUM_BLOCKS,
    RAW_P: tl.constexpr, RAW_Q: tl.constexpr, BIAS_P: tl.constexpr, BIAS_Q: tl.constexpr,
    CAP_P: tl.constexpr, CAP_Q: tl.constexpr, PAIR: tl.constexpr, TOPS: tl.constexpr, MOMENTS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Write row_max, sum_exp, moment, gap and max_at_masked of each head to `sums` [2, 5, C]."""
    row = tl.program_id(0).to(tl.int64)
    p += row * T
    q += row * T
    maxima_p += row * NUM_BLOCKS
    maxima_q += row * NUM_BLOCKS
    max_p = tl.full([WIDTH], float("-inf"), tl.float32)
    max_q = tl.full([WIDTH], float("-inf"), tl.float32)
    masked_p = tl.full([WIDTH], float("-inf"), tl.float32)
    masked_q = tl.full([WIDTH], float("-inf"), tl.float32)
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
    p, q, bias_p, bias_q, cap_p, cap_q, temperature, logsumexp_p, logsumexp_q, lam, mass, T,
    RAW_P: tl.constexpr, RAW_Q: tl.constexpr, BIAS_P: tl.constexpr, BIAS_Q: tl.constexpr,
    CAP_P: tl.constexpr, CAP_Q: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write sum_x min(q(x), p(x) / lam) to `mass` [C]."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    of_p, of_q = tl.load(logsumexp_p + row), tl.load(logsumexp_q + row)
    for begin in range(0, T, WIDTH):
        columns = begin + places
        mask = columns < T
        logits_p = _logits(p + row * T, bias_p, columns, mask, cap_p, temperature, RAW_P, BIAS_P, CAP_P)
        logits_q = _logits(q + row * T, bias_q, columns, mask, cap_q, temperature, RAW_Q, BIAS_Q, CAP_Q)
        total += tl.minimum(tl.exp(logits_q - of_q), tl.exp(logits_p - of_p) / lam)
    tl.store(mass + row, tl.sum(total, axis=0))


@triton.jit
def _gradient(own, other, coefficients, C, row, is_id, logits, soft_cap, temperature, CAP: tl.constexpr):
    """Evaluate the formula of `GradCoefficients`; `own` and `other` are shifted logits."""
    on_id = tl.load(coefficients + row)
    constant = tl.load(coefficients + C + row)
    on_log = tl.load(coefficients + 2 * C + row)
    on_other_log = tl.load(coefficients + 3 * C + row)
    on_other = tl.load(coefficients + 4 * C + row)
    factor = constant + on_log * tl.maximum(own, _LOWEST) - on_other_log * tl.maximum(other, _LOWEST)
    gradient = tl.exp(own) * factor - on_other * tl.exp(other) + tl.where(is_id, on_id, 0.0)
    if CAP:
        ratio = logits * (temperature / soft_cap)
        gradient *= 1.0 - ratio * ratio
    return gradient


@triton.jit
def _differentiate(
    p, q, bias_p, bias_q, cap_p, cap_q, temperature, logsumexp_p, logsumexp_q, coefficients, places, out_p, out_q, C, T,
    RAW_P: tl.constexpr, RAW_Q: tl.constexpr, BIAS_P: tl.constexpr, BIAS_Q: tl.constexpr,
    CAP_P: tl.constexpr, CAP_Q: tl.constexpr, HAS_P: tl.constexpr, HAS_Q: tl.constexpr,
    TRAINS_P: tl.constexpr, TRAINS_Q: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the gradients of both heads' products; `coefficients` [2, 5, C]. Loads come before stores."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = columns < T
    is_id = columns == tl.load(places + row)
    logits_p = tl.zeros([WIDTH], tl.float32)
    logits_q = tl.zeros([WIDTH], tl.float32)
    own_p = tl.zeros([WIDTH], tl.float32)
    own_q = tl.zeros([WIDTH], tl.float32)
    if HAS_P:
        logits_p = _logits(p + row * T, bias_p, columns, mask, cap_p, temperature, RAW_P, BIAS_P, CAP_P)
        own_p = logits_p - tl.load(logsumexp_p + row)
    if HAS_Q:
        logits_q = _logits(q + row * T, bias_q, columns, mask, cap_q, temperature, RAW_Q, BIAS_Q, CAP_Q)
        own_q = logits_q - tl.load(logsumexp_q + row)
    if TRAINS_Q:
        gradient = _gradient(own_q, own_p, coefficients + 5 * C, C, row, is_id, logits_q, cap_q, temperature, CAP_Q)
        tl.store(out_q + row * T + columns, gradient.to(out_q.dtype.element_ty), mask=mask)
    if TRAINS_P:
        gradient = _gradient(own_p, own_q, coefficients, C, row, is_id, logits_p, cap_p, temperature, CAP_P)
        tl.store(out_p + row * T + columns, gradient.to(out_p.dtype.element_ty), mask=mask)


class TritonReader(TileReader):
    """Runs the kernels."""

    name = "triton"

    def read(self, tiles: Sequence[Tile], tops: bool, moments: bool) -> list[TileSums]:
        if tiles[0].logits.dtype == torch.float64:
            return EAGER.read(tiles, tops, moments)
        c, t = tiles[0].logits.shape
        new, num_blocks, is_pair = tiles[0].logits.new_empty, triton.cdiv(t, BLOCK), len(tiles) == 2
        sums = new((2, 5, c), dtype=torch.float32)
        maxima = [new((c, num_blocks if tops else 0), dtype=torch.float32) for _ in tiles]
        arguments, flags = _operands(tiles)
        if c:
            _read[(c,)](
                *arguments, maxima[0], maxima[-1], sums, c, t, num_blocks,
                **flags, PAIR=is_pair, TOPS=tops, MOMENTS=moments, WIDTH=_width(t),
            )  # fmt: skip
        found = []
        for i, own in enumerate(sums[: len(tiles)]):
            row_max, sum_exp, moment, gap, masked = own
            may_mask = is_pair and tiles[1 - i].may_mask
            found.append(
                TileSums(
                    row_max=row_max,
                    sum_exp=sum_exp,
                    moment=moment if moments else None,
                    block_max=maxima[i] if tops else None,
                    gap=gap if is_pair and moments else None,
                    max_at_masked=masked if may_mask and moments else None,
                )
            )
        return found

    def common_mass(self, tiles: Sequence[Tile], logsumexps: Sequence[Tensor], lam: float) -> Tensor:
        if tiles[0].logits.dtype == torch.float64:
            return EAGER.common_mass(tiles, logsumexps, lam)
        c, t = tiles[0].logits.shape
        mass = tiles[0].logits.new_empty(c, dtype=torch.float32)
        arguments, flags = _operands(tiles)
        if c:
            _common_mass[(c,)](*arguments, *logsumexps, lam, mass, t, **flags, WIDTH=_width(t))
        return mass

    def differentiate(
        self,
        tiles: Sequence[Tile | None],
        logsumexps: Sequence[Tensor],
        coefficients: Sequence[GradCoefficients | None],
        places: Tensor,
        out: Sequence[Tensor | None],
    ) -> None:
        known = next(tile.logits for tile in tiles if tile is not None)
        if known.dtype == torch.float64:
            return EAGER.differentiate(tiles, logsumexps, coefficients, places, out)
        c, t = known.shape
        if not c:
            return None
        columns = known.new_zeros((2, 5, c), dtype=torch.float32)
        for i, of_head in enumerate(coefficients):
            for number, column in enumerate(of_head or ()):
                if column is not None:
                    columns[i, number] = column
        has, trains = ([one is not None for one in of] + [False] for of in (tiles, out))
        width = _width(t)
        arguments, flags = _operands([tile or next(filter(None, tiles)) for tile in tiles])
        memory = [known if into is None else into for into in out]
        _differentiate[(c, triton.cdiv(t, width))](
            *arguments, logsumexps[0], logsumexps[-1], columns, places, memory[0], memory[-1], c, t,
            **flags, HAS_P=has[0], HAS_Q=has[1], TRAINS_P=trains[0], TRAINS_Q=trains[1], WIDTH=width,
        )  # fmt: skip
        return None


TRITON = TritonReader()


def _width(tokens: int) -> int:
    """Return the tokens that a program reads at a time."""
    return min(WIDTH, max(BLOCK, triton.next_power_of_2(tokens)))


def _operands(tiles: Sequence[Tile]) -> tuple[list, dict[str, bool]]:
    """Return the arguments and flags by which a kernel reads a pair of tiles; one tile is given twice."""
    pair = [tiles[0], tiles[-1]]
    biases = [tile.logits if tile.bias is None else tile.bias for tile in pair]
    caps = [tile.soft_cap or 1.0 for tile in pair]
    flags = {}
    for name, tile in zip("PQ", pair, strict=True):
        flags |= {f"RAW_{name}": tile.is_raw, f"BIAS_{name}": tile.bias is not None, f"CAP_{name}": bool(tile.soft_cap)}
    return [*(tile.logits for tile in pair), *biases, *caps, tiles[0].temperature], flags
