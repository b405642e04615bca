"""Every token id of a page has a text: its string, or its number where it has none."""

from pathlib import Path

import numpy as np

from helpers.runs import small_config
from jackpot.ui.report.token_text import TokenTexts, texts_of


def test_an_id_that_pads_the_output_layer_has_its_number(tmp_path: Path) -> None:
    """Rows of the output layer beyond the tokenizer can be drawn, and have no string in saved rollouts."""
    words = TokenTexts()
    words.add_known(np.array([3, 900, 3]), ["Ġthe", None, "Ġthe"])
    words.add_needed(np.array([901]))

    assert texts_of(words, tmp_path, small_config()) == {"3": " the", "900": "#900", "901": "#901"}
