"""Charts as a PNG file."""

from pathlib import Path

from benchmarks.png import write_png
from jackpot.ui.charts import Chart, Guide, Series

BAD = "$a^{ and $ b"  # what stands between the dollars is no mathematics


def size_of(png: Path) -> tuple[int, int]:
    """Width and height, pixels, from the header of a PNG file."""
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[12:16] == b"IHDR"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_dollars_in_any_text_are_dollars(tmp_path: Path) -> None:
    lines = (Series(name=BAD, x=[0.0, 1.0], y=[1.0, 2.0]), Series(name=f"{BAD} 2", x=[0.0], y=[1.0]))
    guides = (Guide(text=BAD, y=1.0),)
    chart = Chart(title=BAD, x_label=BAD, y_label=BAD, series=lines, x_names=(BAD, BAD), guides=guides)
    write_png(tmp_path / "a.png", [chart, chart])
    assert size_of(tmp_path / "a.png") == (1500, 570)
