"""Charts are drawn into a PNG file, whatever stands in their texts."""

from pathlib import Path

from benchmarks.png import write_png
from jackpot.ui.charts import Chart, Guide, Series

TEXT_WITH_DOLLARS = "$a^{ and $ b"  # what stands between the dollars is no mathematics


def size_of(png: Path) -> tuple[int, int]:
    """Return width and height, pixels, from the header of a PNG file."""
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[12:16] == b"IHDR"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_texts_with_dollars_around_no_mathematics_are_drawn(tmp_path: Path) -> None:
    lines = (
        Series(name=TEXT_WITH_DOLLARS, x=[0.0, 1.0], y=[1.0, 2.0]),
        Series(name=f"{TEXT_WITH_DOLLARS} 2", x=[0.0], y=[1.0]),
    )
    guides = (Guide(text=TEXT_WITH_DOLLARS, y=1.0),)
    chart = Chart(
        title=TEXT_WITH_DOLLARS,
        x_label=TEXT_WITH_DOLLARS,
        y_label=TEXT_WITH_DOLLARS,
        series=lines,
        x_names=(TEXT_WITH_DOLLARS, TEXT_WITH_DOLLARS),
        guides=guides,
    )

    write_png(tmp_path / "a.png", [chart, chart])

    assert size_of(tmp_path / "a.png") == (1500, 570)
