"""Products of quantized matrices: exact, the same in every batch, and refused where the operands do not fit."""

import numpy as np
import pytest
import torch

from jackpot.models.quantization.linear import QuantizedLinear
from jackpot.models.quantization.product import gemm_exact, scaled_operands
from jackpot.models.quantization.quantizer import FP8_TOKEN_BLOCKS, SCHEMES, Grid, Quantized, quantize
from models.quantization.test_quantizer import matrix
from research.parity import with_scales

CODED_SCHEMES = ["int8_w8a8", "fp8"]


def operands(name: str, m: int, n: int = 150, k: int = 300) -> tuple[Quantized, Quantized]:
    """Return activations of m x k and weights of n x k, quantized by the scheme of this name."""
    scheme = SCHEMES[name]
    return quantize(matrix(m, k, 1), scheme.activations), quantize(matrix(n, k, 2), scheme.weights)


def numpy_of(quantized: Quantized) -> np.ndarray:
    """Return codes times scales in float64, which does not round them."""
    rows, columns = quantized.grid.block(quantized.codes.shape)
    scales = quantized.scales.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return (quantized.codes.double() * scales[: quantized.codes.shape[0], : quantized.codes.shape[1]]).numpy()


@pytest.mark.parametrize("name", CODED_SCHEMES)
@pytest.mark.parametrize("scales", ["power_of_two", "float32"])
def test_a_product_is_that_of_what_the_codes_stand_for(name, scales):
    scheme = with_scales(SCHEMES[name], scales)
    a = quantize(matrix(33, 300, 1), scheme.activations)
    b = quantize(matrix(150, 300, 2), scheme.weights)

    product = gemm_exact(a, b)

    exact_product = numpy_of(a) @ numpy_of(b).T
    magnitude = np.abs(numpy_of(a)) @ np.abs(numpy_of(b)).T
    assert (np.abs(product.double().numpy() - exact_product) / magnitude).max() < 2.5e-7


@pytest.mark.parametrize("name", CODED_SCHEMES)
def test_a_token_notices_neither_others_nor_threads(name):
    a, b = operands(name, 32, n=512, k=1024)
    full_product = gemm_exact(a, b)
    thread_count = torch.get_num_threads()

    for m in (1, 2, 3, 8, 31):
        assert torch.equal(gemm_exact(Quantized(a.codes[:m], a.scales[:m], a.grid), b), full_product[:m])

    try:
        torch.set_num_threads(2 if thread_count == 1 else 1)
        assert torch.equal(gemm_exact(a, b), full_product)
    finally:
        torch.set_num_threads(thread_count)


def test_the_largest_codes_do_not_overflow():
    """4,096 products of 127 x 127 and of 448 x 448, and of the least with the largest beside them."""
    for codes, largest in ((torch.int8, 127.0), (torch.float8_e4m3fn, 448.0)):
        grid = Grid(codes=codes, rows=1, scales="power_of_two")
        values = torch.full((2, 4096), largest)
        values[0, 1:] = -largest
        values[1, 0] = 2.0**-9 if codes != torch.int8 else 1.0
        rows = Quantized(values.to(codes), torch.ones(2, 1), grid)

        exact = values.double() @ values.double().T

        assert torch.equal(gemm_exact(rows, rows), exact.float())


@pytest.mark.parametrize(("m", "n", "k"), [(33, 150, 300), (4, 128, 640), (1, 24, 100), (6, 300, 1152)])
@pytest.mark.parametrize("by_blocks", [True, False])
def test_operands_for_a_gpu_have_the_layout_of_its_library(m, n, k, by_blocks):
    """The checks of torch's `scaled_mm`, which on a GPU alone knows blocks, and the product of what lies in memory."""
    a = quantize(matrix(m, k, 1), FP8_TOKEN_BLOCKS)
    b = quantize(matrix(n, k, 2), SCHEMES["fp8"].weights if by_blocks else FP8_TOKEN_BLOCKS)

    arguments = scaled_operands(a, b)

    left, right = arguments["mat_a"], arguments["mat_b"]
    a_scales, b_scales = arguments["scale_a"], arguments["scale_b"]
    rows, padded_k = left.shape
    columns = right.shape[1]
    block_count = -(-k // 128)
    assert (rows % 4, padded_k % 128, columns % 16) == (0, 0, 0)
    assert len(right) == padded_k
    assert left.stride() == (padded_k, 1)
    assert right.stride() == (1, padded_k)
    assert a_scales.shape == (rows, block_count)
    assert a_scales.stride() == (1, rows if block_count > 1 else 1)

    if by_blocks:
        padded_count = -(-block_count // 4) * 4  # 640 columns have 5 parts, which cuBLAS reads at a distance of 8
        assert b_scales.shape == (padded_count, -(-n // 128))
        assert b_scales.stride() == (1, padded_count)
        b_scales = b_scales[:block_count].repeat_interleave(128, dim=1)[:, :columns].T
    else:
        assert b_scales.shape == (columns, block_count)
        assert b_scales.stride() == (1, columns if block_count > 1 else 1)

    left_scales = a_scales.repeat_interleave(128, dim=1).double()
    right_scales = b_scales.repeat_interleave(128, dim=1).double()
    product = (left.double() * left_scales) @ (right.T.double() * right_scales).T
    exact = numpy_of(a) @ numpy_of(b).T
    assert np.allclose(product[:m, :n].numpy(), exact, rtol=1e-12, atol=1e-12)
    assert not product[m:].any()


def test_matrices_that_do_not_fit_are_refused():
    a, b = operands("fp8", 4)
    int8_weights = operands("int8_w8a8", 4)[1]
    short_weights = quantize(matrix(150, 256), b.grid)
    small_blocks = quantize(matrix(4, 300), Grid(codes=a.grid.codes, rows=1, columns=64, scales="power_of_two"))

    for left, right in ((a, int8_weights), (a, short_weights), (b, b), (small_blocks, b)):
        with pytest.raises(ValueError, match="a product needs equal codes"):
            gemm_exact(left, right)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_multiplies_codes_and_adds_the_bias_last(name, dtype):
    scheme = SCHEMES[name]
    weight = matrix(70, 200, 4, dtype)
    bias = torch.randn(70).to(dtype)
    layer = QuantizedLinear(weight, bias, scheme)
    inputs = matrix(15, 200, 5, dtype).reshape(3, 5, 200)
    rows = inputs.reshape(15, 200)
    left = rows.double().numpy() if scheme.activations is None else numpy_of(quantize(rows, scheme.activations))
    expected = left @ numpy_of(quantize(weight, scheme.weights)).T + bias.double().numpy()

    outputs = layer(inputs)

    assert outputs.dtype == dtype
    assert outputs.shape == (3, 5, 70)

    magnitude = np.abs(left) @ np.abs(numpy_of(quantize(weight, scheme.weights))).T + 1.0
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    assert (np.abs(outputs.reshape(15, 70).double().numpy() - expected) / magnitude).max() < tolerance
    assert not torch.equal(outputs, torch.nn.functional.linear(inputs, weight, bias))


def test_a_layer_takes_another_weight():
    layer = QuantizedLinear(matrix(64, 64, 1), None, SCHEMES["fp8"])

    layer.take(matrix(64, 64, 2))

    new_weight = quantize(matrix(64, 64, 2), SCHEMES["fp8"].weights)
    assert torch.equal(layer.quantized.codes.float(), new_weight.codes.float())
    assert torch.equal(layer.quantized.scales, new_weight.scales)
    assert layer.quantized.grid == new_weight.grid

    inputs = matrix(5, 64, 3)
    assert torch.equal(layer(inputs), QuantizedLinear(matrix(64, 64, 2), None, SCHEMES["fp8"])(inputs))
