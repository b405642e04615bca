"""Charts as a PNG file."""

from pathlib import Path

import pytest

from benchmarks.png import write_png
from jackpot.ui.charts import Chart, Guide, Series

BAD = "$a^{ and $ b"  # what stands between the dollars is no mathematics


def size_of(png: Path) -> tuple[int, int]:
    """Width and height, pixels, from the header of a PNG file."""
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[12:16] == b"IHDR"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


@pytest.mark.parametrize("text", [BAD, "$a^{$", "costs $5", "a name"])
def test_dollars_in_any_text_are_dollars(tmp_path: Path, text: str) -> None:
    lines = (Series(name=text, x=[0.0, 1.0], y=[1.0, 2.0]), Series(name=f"{text} 2", x=[0.0], y=[1.0]))
    chart = Chart(
        title=text, x_label=text, y_label=text, series=lines, x_names=(text, text), guides=(Guide(text=text, y=1.0),)
    )
    write_png(tmp_path / "a.png", [chart, chart])
    assert size_of(tmp_path / "a.png") == (1500, 570)


@pytest.mark.parametrize("place", ["title", "x_label", "y_label", "name", "guide", "x_names"])
def test_each_text_by_itself_may_have_dollars(tmp_path: Path, place: str) -> None:
    texts = dict.fromkeys(("title", "x_label", "y_label", "name", "guide", "x_names"), "a")
    texts[place] = BAD
    axes = {name: texts[name] for name in ("title", "x_label", "y_label")}
    lines = tuple(Series(name=texts["name"], x=[0.0, 1.0], y=[1.0, 2.0]) for _ in range(2))
    guide = Guide(text=texts["guide"], y=1.0)
    chart = Chart(**axes, series=lines, x_names=(texts["x_names"],) * 2, guides=(guide,))
    write_png(tmp_path / "a.png", [chart])
