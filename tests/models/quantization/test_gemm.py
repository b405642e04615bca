"""Products of quantized matrices: exact, and the same in every batch."""

import numpy as np
import pytest
import torch

from jackpot.models.quantization.linear import QuantizedLinear
from jackpot.models.quantization.product import gemm_exact, scaled_operands
from jackpot.models.quantization.quantizer import FP8_TOKEN_BLOCKS, SCHEMES, Grid, Quantized, quantize
from models.quantization.test_quantizer import matrix
from research.parity import with_scales

BOTH = ["int8_w8a8", "fp8"]


def operands(name: str, m: int, n: int = 150, k: int = 300) -> tuple[Quantized, Quantized]:
    scheme = SCHEMES[name]
    return quantize(matrix(m, k, 1), scheme.activations), quantize(matrix(n, k, 2), scheme.weights)


def numpy_of(quantized: Quantized) -> np.ndarray:
    """Codes times scales in float64, which does not round them."""
    rows, columns = quantized.grid.block(quantized.codes.shape)
    scales = quantized.scales.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return (quantized.codes.double() * scales[: quantized.codes.shape[0], : quantized.codes.shape[1]]).numpy()


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("scales", ["power_of_two", "float32"])
def test_a_product_is_that_of_what_the_codes_stand_for(name, scales):
    scheme = with_scales(SCHEMES[name], scales)
    a, b = quantize(matrix(33, 300, 1), scheme.activations), quantize(matrix(150, 300, 2), scheme.weights)
    exact = numpy_of(a) @ numpy_of(b).T
    size = np.abs(numpy_of(a)) @ np.abs(numpy_of(b)).T
    assert (np.abs(gemm_exact(a, b).double().numpy() - exact) / size).max() < 2.5e-7


@pytest.mark.parametrize("name", BOTH)
def test_a_token_notices_neither_others_nor_threads(name):
    a, b = operands(name, 32, n=512, k=1024)
    whole, threads = gemm_exact(a, b), torch.get_num_threads()

    for m in (1, 2, 3, 8, 31):
        assert torch.equal(gemm_exact(Quantized(a.codes[:m], a.scales[:m], a.grid), b), whole[:m])

    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        assert torch.equal(gemm_exact(a, b), whole)
    finally:
        torch.set_num_threads(threads)


def test_the_largest_codes_do_not_overflow():
    """4,096 products of 127 x 127 and of 448 x 448, and of the least with the largest beside them."""
    for codes, largest in ((torch.int8, 127.0), (torch.float8_e4m3fn, 448.0)):
        grid = Grid(codes=codes, rows=1, scales="power_of_two")
        full = torch.full((2, 4096), largest)
        full[0, 1:] = -largest
        full[1, 0] = 2.0**-9 if codes != torch.int8 else 1.0
        rows = Quantized(full.to(codes), torch.ones(2, 1), grid)

        exact = full.double() @ full.double().T

        assert torch.equal(gemm_exact(rows, rows), exact.float())


@pytest.mark.parametrize(("m", "n", "k"), [(33, 150, 300), (4, 128, 640), (1, 24, 100), (6, 300, 1152)])
@pytest.mark.parametrize("by_blocks", [True, False])
def test_operands_for_a_gpu_have_the_layout_of_its_library(m, n, k, by_blocks):
    """The checks of torch's `scaled_mm`, which on a GPU alone knows blocks, and the product of what lies in memory."""
    a = quantize(matrix(m, k, 1), FP8_TOKEN_BLOCKS)
    b = quantize(matrix(n, k, 2), SCHEMES["fp8"].weights if by_blocks else FP8_TOKEN_BLOCKS)
    given = scaled_operands(a, b)
    left, right, a_scales, b_scales = (given[name] for name in ("mat_a", "mat_b", "scale_a", "scale_b"))
    (rows, size) = left.shape
    columns = right.shape[1]

    parts = -(-k // 128)

    assert (rows % 4, size % 128, columns % 16) == (0, 0, 0)
    assert len(right) == size
    assert left.stride() == (size, 1)
    assert right.stride() == (1, size)
    assert a_scales.shape == (rows, parts)
    assert a_scales.stride() == (1, rows if parts > 1 else 1)

    if by_blocks:
        filled = -(-parts // 4) * 4  # 640 columns have 5 parts, which cuBLAS reads at a distance of 8
        assert b_scales.shape == (filled, -(-n // 128))
        assert b_scales.stride() == (1, filled)
        b_scales = b_scales[:parts].repeat_interleave(128, dim=1)[:, :columns].T
    else:
        assert b_scales.shape == (columns, parts)
        assert b_scales.stride() == (1, columns if parts > 1 else 1)
    wide = [scales.repeat_interleave(128, dim=1).double() for scales in (a_scales, b_scales)]
    product = (left.double() * wide[0]) @ (right.T.double() * wide[1]).T

    exact = numpy_of(a) @ numpy_of(b).T

    assert np.allclose(product[:m, :n].numpy(), exact, rtol=1e-12, atol=1e-12)
    assert not product[m:].any()


def test_matrices_that_do_not_fit_are_refused():
    a, b = operands("fp8", 4)
    int8 = operands("int8_w8a8", 4)[1]
    short = quantize(matrix(150, 256), b.grid)

    wide = quantize(matrix(4, 300), Grid(codes=a.grid.codes, rows=1, columns=64, scales="power_of_two"))

    for left, right in ((a, int8), (a, short), (b, b), (wide, b)):
        with pytest.raises(ValueError, match="a product needs equal codes"):
            gemm_exact(left, right)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_multiplies_codes_and_adds_the_bias_last(name, dtype):
    scheme = SCHEMES[name]
    weight = matrix(70, 200, 4, dtype)
    bias = torch.randn(70).to(dtype)
    layer, inputs = QuantizedLinear(weight, bias, scheme), matrix(15, 200, 5, dtype).reshape(3, 5, 200)
    rows = inputs.reshape(15, 200)
    left = rows.double().numpy() if scheme.activations is None else numpy_of(quantize(rows, scheme.activations))
    expected = left @ numpy_of(quantize(weight, scheme.weights)).T + bias.double().numpy()

    found = layer(inputs)

    assert found.dtype == dtype
    assert found.shape == (3, 5, 70)

    size = np.abs(left) @ np.abs(numpy_of(quantize(weight, scheme.weights))).T + 1.0
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2

    assert (np.abs(found.reshape(15, 70).double().numpy() - expected) / size).max() < tolerance
    assert not torch.equal(found, torch.nn.functional.linear(inputs, weight, bias))


def test_a_layer_takes_another_weight():
    layer = QuantizedLinear(matrix(64, 64, 1), None, SCHEMES["fp8"])
    layer.take(matrix(64, 64, 2))
    other = quantize(matrix(64, 64, 2), SCHEMES["fp8"].weights)

    assert torch.equal(layer.quantized.codes.float(), other.codes.float())
    assert torch.equal(layer.quantized.scales, other.scales)
    assert layer.quantized.grid == other.grid
    assert FP8_TOKEN_BLOCKS.rows == 1
