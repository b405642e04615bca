"""Quantization to FP8 and INT8, code by code and block by block, against numpy and the definition of FP8.

The definition stands in tests/helpers/engines/quantized_reference.py.
"""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers.engines.quantized_reference import GRID, round_blocks, to_e4m3
from jackpot.models.quantization import quantizer
from jackpot.models.quantization.linear import round_to_fp8
from jackpot.models.quantization.quantizer import (
    E4M3,
    FP8_BLOCKS,
    FP8_TOKEN_BLOCKS,
    INT8_ROWS,
    Grid,
    block_scales,
    dequantize,
    encode,
    next_power_of_two,
    quantize,
)
from research.parity import round_by_token

FLOAT_BLOCKS = Grid(codes=E4M3, rows=128, columns=128, scales="float32")


def matrix(rows: int, columns: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers of many sizes, some rows much larger than others."""
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.exp(2.0 * torch.randn(rows, 1, generator=draw))
    return (sizes * torch.randn(rows, columns, generator=draw)).to(dtype)


def test_every_code_has_the_value_of_the_format():
    values = torch.arange(127, dtype=torch.uint8).view(E4M3).double().numpy()
    assert (values == GRID).all()
    assert GRID[-1] == 448.0
    assert GRID[1] == 2.0**-9


def test_numbers_go_to_the_nearest_code_ties_to_even():
    middles = (GRID[1:] + GRID[:-1]) / 2
    below = np.nextafter(middles, 0, dtype=np.float32)
    above = np.nextafter(middles, 1e9, dtype=np.float32)
    near_ties = np.concatenate([middles, below, above])
    extremes = [448.1, 1e4, -1e30, np.inf, -np.inf, 1e-12]
    values = np.concatenate([near_ties, -near_ties, GRID, extremes]).astype(np.float32)

    codes = encode(torch.from_numpy(values), 1.0, E4M3).double().numpy()

    assert (codes == to_e4m3(values)).all()
    assert encode(torch.tensor([math.nan]), 1.0, E4M3).isnan()
    assert encode(torch.tensor([0.5, 1.5, -2.5, 300.0, -300.0]), 1.0, torch.int8).tolist() == [0, 2, -2, 127, -127]


def test_a_power_of_two_is_that_of_the_divided_maximum():
    """Of every mantissa, though nothing is divided, and near the ends of the exponents."""
    mantissas = torch.arange(2**23, dtype=torch.int32)
    for exponent, step in ((100, 101), (127, 1), (254, 101)):
        largest = (mantissas[::step] + (exponent << 23)).view(torch.float32)
        assert torch.equal(block_scales(largest, FP8_BLOCKS), next_power_of_two(largest / 448.0))


def test_a_compiled_formula_is_taken_where_its_bits_are_the_same(monkeypatch):
    device, formula = torch.device("cpu"), quantizer._codes_and_scales
    monkeypatch.setattr(quantizer, "_compiled", quantizer._compiled.__wrapped__)
    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda values, grid: function(values, grid))
    values = matrix(5, 300)

    compiled = quantizer._compiled(FP8_TOKEN_BLOCKS, device)
    assert all(map(torch.equal, compiled(values, FP8_TOKEN_BLOCKS), formula(values, FP8_TOKEN_BLOCKS)))

    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda values, grid: function(1.2 * values, grid))
    with pytest.warns(UserWarning, match="codes are not those of torch's operators"):
        assert quantizer._compiled(FP8_TOKEN_BLOCKS, device) is None


def test_the_next_power_of_two_is_exact_at_and_beside_powers():
    powers = [2.0**exponent for exponent in range(-100, 101, 7)]
    for power in powers:
        just_above = np.nextafter(np.float32(power), np.float32(9e30))
        numbers = torch.tensor([power, just_above, power * 1.99])
        assert next_power_of_two(numbers).tolist() == [power, 2 * power, 2 * power]

    nonfinite = next_power_of_two(torch.tensor([math.inf, math.nan]))
    assert nonfinite[0] == math.inf
    assert nonfinite[1].isnan()


@pytest.mark.parametrize(
    ("grid", "kind", "rows", "columns"),
    [(FP8_BLOCKS, "fp8", 128, 128), (FP8_TOKEN_BLOCKS, "fp8", 1, 128), (INT8_ROWS, "int8", 1, 10_000)],
)
@pytest.mark.parametrize("shape", [(130, 140), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matrix_of_any_shape_is_rounded_block_by_block(grid, kind, rows, columns, shape, dtype):
    values = matrix(*shape, dtype=dtype)
    expected = round_blocks(values.float().numpy(), rows, columns, kind)

    quantized = quantize(values, grid)
    rounded = dequantize(quantized, torch.float64).numpy()

    assert quantized.codes.shape == shape
    assert quantized.codes.dtype == grid.codes
    assert quantized.scales.shape == (-(-shape[0] // rows), -(-shape[1] // columns))
    assert rounded == pytest.approx(expected, rel=2e-7)  # a float32 product of code and scale

    if kind == "fp8":
        assert (rounded == expected).all()


def test_powers_of_two_alone_make_every_formula_agree():
    values = matrix(512, 128, seed=3, dtype=torch.bfloat16).float()
    largest = values.abs().amax(1, keepdim=True)

    def share_of_different_codes(grid: Grid) -> float:
        """Return the share of codes that division by the scale and a product with its inverse round differently."""
        scales = block_scales(largest, grid)
        codes = [scaled.clamp(-448, 448).to(E4M3).float() for scaled in (values / scales, values * (1 / scales))]
        return float((codes[0] != codes[1]).double().mean())

    assert share_of_different_codes(FP8_TOKEN_BLOCKS) == 0.0
    assert 0.0 < share_of_different_codes(Grid(codes=E4M3, rows=1, scales="float32")) < 5e-3


def test_with_powers_of_two_rounding_again_changes_nothing():
    rounded = dequantize(quantize(matrix(256, 200), FP8_BLOCKS), torch.float32)

    assert torch.equal(dequantize(quantize(rounded, FP8_BLOCKS), torch.float32), rounded)
    assert torch.equal(rounded.bfloat16().float(), rounded)

    float_scaled = dequantize(quantize(matrix(256, 200), FLOAT_BLOCKS), torch.float32)
    assert not torch.equal(float_scaled.bfloat16().float(), float_scaled)


def test_square_blocks_do_not_mind_being_transposed():
    values = matrix(256, 200)
    quantized, quantized_transpose = quantize(values, FP8_BLOCKS), quantize(values.T, FP8_BLOCKS)

    assert torch.equal(quantized.codes.float(), quantized_transpose.codes.T.float())
    assert torch.equal(quantized.scales, quantized_transpose.scales.T)


def test_zeros_stay_zero_and_nan_stays_in_its_block():
    values = matrix(3, 256)  # two blocks a row
    values[0, :128] = 0.0
    values[1, 5] = math.nan
    values[2, 200] = math.inf

    rounded = dequantize(quantize(values, FP8_TOKEN_BLOCKS), torch.float32)

    assert (rounded[0, :128] == 0.0).all()
    assert rounded[0, 128:].any()
    assert rounded[1, :128].isnan().all()
    assert rounded[1, 128:].isfinite().all()
    assert rounded[2, :128].isfinite().all()
    assert not rounded[2, 200].isfinite()


def test_int8_is_symmetric_and_uses_its_largest_code():
    quantized = quantize(matrix(64, 300), INT8_ROWS)
    assert (quantized.codes.abs().amax(1) == 127).all()
    assert quantized.codes.min() == -127


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_of_fp8_holds_numbers_of_fp8(dtype):
    states = matrix(12, 40, dtype=dtype).reshape(2, 3, 2, 40)

    rounded = round_to_fp8(states)

    assert rounded.dtype == dtype
    assert (rounded.double().numpy() == to_e4m3(states.float().numpy())).all()

    rounded_by_token = round_by_token(states)

    expected = round_blocks(states.reshape(12, 40).float().numpy(), 1, 40, "fp8").reshape(2, 3, 2, 40)

    assert rounded_by_token.dtype == dtype
    assert (rounded_by_token.double().numpy() == expected).all()

    assert torch.equal(round_to_fp8(rounded), rounded)
    assert torch.equal(round_by_token(rounded_by_token), rounded_by_token)
