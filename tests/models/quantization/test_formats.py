"""Which layers the engine and training compute in different number formats, and in which."""

from helpers.engines.reference import tiny_model
from helpers.runs import small_config
from jackpot.analysis.diagnose.limits import MetricHistory
from jackpot.models.quantization.formats import SideFormats, layer_differences, layer_formats


def differences(first: SideFormats, second: SideFormats) -> dict[str, tuple[str, str]]:
    """Return the two formats of each kind of layers of the tiny model that the sides compute differently."""
    model = tiny_model(0)
    rows = layer_differences(layer_formats(model, first), layer_formats(model, second))
    return {row.layers: (row.first, row.second) for row in rows}


def test_equal_sides_have_no_difference():
    for side in (SideFormats(dtype="bf16"), SideFormats(dtype="fp32", quantization="fp8", kv_cache_dtype="fp8")):
        assert differences(side, side) == {}


def test_quantized_layers_are_named_with_their_grids():
    formats = differences(SideFormats(dtype="fp32", quantization="fp8"), SideFormats(dtype="fp32"))

    expected_layers = {f"{layer}_proj (2)" for layer in ("q", "k", "v", "o", "gate", "up", "down")}  # of 2 blocks
    assert {name.split(".")[-1] for name in formats} == expected_layers
    assert formats["model.layers.*.mlp.down_proj (2)"] == (
        "weights fp8 by 128 x 128, activations fp8 by 1 x 128",
        "fp32",
    )

    int8_side = SideFormats(dtype="fp32", quantization="int8_w8a8")
    fp8_side = SideFormats(dtype="fp32", quantization="fp8")
    grid_pairs = differences(int8_side, fp8_side)
    assert len(grid_pairs) == 7
    assert grid_pairs["model.layers.*.mlp.up_proj (2)"] == (
        "weights int8 by 1 x all, activations int8 by 1 x all",
        "weights fp8 by 128 x 128, activations fp8 by 1 x 128",
    )


def test_autocast_cache_and_head_differ_where_settings_do():
    formats = differences(SideFormats(dtype="bf16"), SideFormats(dtype="fp32", autocast="bf16"))

    assert formats == {
        "norms and what flows between layers": ("bf16", "fp32"),
        "model.embed_tokens": ("bf16", "fp32"),
    }

    quantized_cache = SideFormats(dtype="bf16", kv_cache_dtype="fp8", head_dtype="fp32")
    assert differences(SideFormats(dtype="bf16"), quantized_cache) == {
        "keys and values": ("bf16", "fp8"),
        "output layer": ("bf16", "fp32"),
    }


def test_a_start_says_what_the_engine_computes_differently():
    old_layers = [["a", "x", "y"]]
    new_layers = [["mlp.down_proj (3)", "fp8", "fp32"], ["keys and values", "fp8", "fp32"]]
    events = [
        {"event": "computed_differently", "iteration": 0, "layers": layers} for layers in (old_layers, new_layers)
    ]

    assert MetricHistory([], events, small_config()).computed_differently() == (
        ". They compute differently: mlp.down_proj (3): fp8 there, fp32 in training; keys and values: fp8 there, "
        "fp32 in training"
    )
    assert MetricHistory([], [], small_config()).computed_differently() == ""
