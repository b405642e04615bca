"""What `jackpot mismatch` prints of layers in different number formats, in a terminal of 80 columns."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from jackpot.ui.charts import Section
from jackpot.ui.terminal.output import show_tables
from jackpot.ui.views.mismatch import _layers

INT8 = "weights int8 by 1 x all, activations int8 by 1 x all"


@pytest.mark.parametrize("pairs", [1, 2])
def test_layers_of_a_pair_stand_in_one_table_that_fits(pairs: int) -> None:
    results = [
        SimpleNamespace(
            name=f"transformers fp32 int8_w8a8 | {index}",
            layers=[(f"model.layers.*.self_attn.{part}_proj (3)", INT8, "fp32") for part in "qkvo"],
        )
        for index in range(pairs)
    ]
    equal_pair = SimpleNamespace(name="x", layers=[])
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)

    show_tables(console, [Section(title="", intro="", items=_layers([*results, equal_pair]))])
    text = console.file.getvalue()

    assert max(map(len, text.splitlines())) <= 80
    assert text.count("sampler | learner") == pairs
    assert text.count("| fp32") == 4 * pairs
    assert all(text.count(f"{part}_proj (3)") == pairs for part in "qkvo")
