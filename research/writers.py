"""Draws KL and acceptance over the FLOPs of a token from the table of writers in docs/smollm.md.

    python -m research.writers

The page is the data: its rows are what examples/shrink.py printed.
"""

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "smollm.md"
PICTURE = PAGE.parent / "pictures" / "smollm-writers.png"
_NUMBER = r"\**([\d.]+)\**"
_BEFORE = rf"\| (\d+) of 30 \| (\d+) % \| {_NUMBER} \| {_NUMBER} \|"
_AFTER = rf"\| \| \| {_NUMBER} \| {_NUMBER} \|"


def main() -> None:
    """Draw the picture."""
    import matplotlib.pyplot as plt

    rows = [list(map(float, row)) for row in re.findall(rf"{_BEFORE}.*\n{_AFTER}", PAGE.read_text())]
    layers, flops, kl_start, accepted_start, kl, accepted = zip(*sorted(rows), strict=True)

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for panel, start, trained, label in (
        (panels[0], kl_start, kl, "KL(policy || rollout model), nats a token"),
        (panels[1], accepted_start, accepted, "acceptance Z at lam = 1"),
    ):
        panel.plot(flops, start, "o--", color="#7F7F7F", label="layers left out")
        panel.plot(flops, trained, "o-", color="#0072B2", label="and 60 iterations of distillation")
        for x, y, count in zip(flops, trained, layers, strict=True):
            at = {"textcoords": "offset points", "xytext": (0, 7), "ha": "center", "fontsize": 8}
            panel.annotate(f"{count:.0f} layers", (x, y), **at)
        panel.set_xlabel("FLOPs a token, % of the policy's")
        panel.set_ylabel(label)
        panel.set_ylim(bottom=0)
        panel.margins(x=0.12)
        panel.spines[["top", "right"]].set_visible(False)
    panels[1].set_ylim(top=1)
    panels[1].legend(frameon=False, loc=(0.28, 0.42))
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
