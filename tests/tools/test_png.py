"""Charts are drawn into a PNG file, whatever stands in their texts."""

from pathlib import Path

import pytest

from benchmarks.png import write_png
from jackpot.ui.charts import Chart, Guide, Series

TEXT_WITH_DOLLARS = "$a^{ and $ b"  # what stands between the dollars is no mathematics


def size_of(png: Path) -> tuple[int, int]:
    """Return width and height, pixels, from the header of a PNG file."""
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[12:16] == b"IHDR"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def test_texts_with_dollars_around_no_mathematics_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    drawn_texts = []
    savefig = Figure.savefig

    def record_and_save(figure: Figure, *arguments: object, **options: object) -> None:
        drawn_texts.extend(text.get_text() for text in figure.findobj(Text) if text.get_visible())
        savefig(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", record_and_save)
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
    # in each of two panels: title, two labels, two names of x, a line and a guide
    assert drawn_texts.count(r"\$a^{ and \$ b") == 2 * 7
    assert drawn_texts.count(r"\$a^{ and \$ b 2") == 2
