"""Seconds and memory for each token as one size grows: vocabulary, tokens, K, group size, response length.

    OMP_NUM_THREADS=1 python benchmarks/growth.py --json growth.json --picture docs/pictures/growth.png > growth.md
    python benchmarks/growth.py --redraw growth.json --picture docs/pictures/growth.png

The first three are of the loss layer alone (head.py: forward and backward, float32, hidden 1024; beside ours the full
logits), the last two of a whole GRPO step (step.py: 128 responses; micro-batches of 64 responses of 64 tokens, so that
longer responses come in more of them). CPU seconds of one thread; memory is what a process takes at its peak above what
it had before. Each measurement is a process of its own.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from interleaved import Job, measure, table

from jackpot.ui.charts import Chart, Series
from jackpot.ui.png import write_png

HERE = Path(__file__).parent
HEAD = {"device": "cpu", "dtype": "fp32", "vocabulary": 151_936, "hidden": 1024, "tokens": 1024, "top": 20}
STEP = {"what": "on_policy", "new_tokens": 64, "steps": 4, "overrides": ("batch.micro_batch_tokens=7488",)}
RESPONSES = 128
MOST_LOGITS = 2**28  # of a head that full logits are asked for: they are there several times, 1 GiB each


class Range(NamedTuple):
    title: str
    label: str
    values: tuple[int, ...]


HEAD_RANGES = {
    "vocabulary": (Range("Vocabulary, one head", "V", (4096, 16_384, 65_536, 262_144)), "single", ("ours", "naive")),
    "tokens": (Range("Tokens, two heads", "N", (256, 1024, 4096)), "joint", ("ours", "naive")),
    "top": (Range("Top K, two heads", "K", (5, 20, 80, 160)), "joint", ("ours",)),
}
STEP_RANGES = {
    "group": Range("Group size, a whole step", "responses of a prompt", (2, 4, 8, 16, 32)),
    "new_tokens": Range("Response length, a whole step", "tokens", (16, 64, 256)),
}


class Point(NamedTuple):
    name: str
    variant: str
    value: int
    microseconds: float  # of CPU, for each token
    mib: float  # at the peak


def measure_head(name: str) -> list[Point]:
    wanted, what, variants = HEAD_RANGES[name]
    points = []
    for value in wanted.values:
        for variant in variants:
            job: Job = HEAD | {name: value, "what": what, "variant": variant}
            if variant == "naive" and job["tokens"] * job["vocabulary"] > MOST_LOGITS:
                continue
            found = measure(HERE / "head.py", job, flags=["--work"])
            points.append(Point(name, variant, value, 1e6 * found["seconds"] / job["tokens"], found["extra_mb"]))
    return points


def measure_step(name: str, folder: str) -> list[Point]:
    points = []
    for value in STEP_RANGES[name].values:
        job: Job = STEP | {"folder": folder, "group": 8, name: value}
        found = measure(HERE / "step_ours.py", job | {"prompts": RESPONSES // job["group"]})
        points.append(Point(name, "ours", value, 1e6 * found["step"] / found["tokens"], found["own_mib"]))
    return points


def charts(points: Sequence[Point]) -> list[Chart]:
    """Time in the first row, memory below."""
    ranges = {name: wanted for name, (wanted, *_) in HEAD_RANGES.items()} | STEP_RANGES
    return [
        chart(wanted, of_name, column, label)
        for column, label in (("microseconds", "CPU microseconds a token"), ("mib", "extra memory, MiB"))
        for name, wanted in ranges.items()
        if (of_name := [point for point in points if point.name == name])
    ]


def chart(wanted: Range, points: Sequence[Point], column: str, label: str) -> Chart:
    """From zero on, so that flat looks flat; the vocabulary grows too far for that."""
    numbers = {variant: number for number, variant in enumerate(("ours", "naive"))}
    lines = {variant: [point for point in points if point.variant == variant] for variant in numbers}
    is_vocabulary = wanted.label == "V"
    return Chart(
        title=wanted.title,
        x_label=wanted.label,
        y_label=label,
        x_names=tuple(f"{value:,}" for value in wanted.values),
        log_y=is_vocabulary,
        y_range=None if is_vocabulary else (0.0, 1.1 * max(getattr(point, column) for point in points)),
        series=tuple(
            Series(
                name={"ours": "ours", "naive": "full logits"}[variant],
                x=[wanted.values.index(point.value) for point in line],
                y=[getattr(point, column) for point in line],
                number=numbers[variant],
                style="both",
            )
            for variant, line in lines.items()
            if line
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*HEAD_RANGES, *STEP_RANGES], default=[*HEAD_RANGES, *STEP_RANGES])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--redraw", type=Path, help="a file that --json wrote: draw it, measure nothing")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    if options.redraw:
        points = [Point(*row) for row in json.loads(options.redraw.read_text())]
    else:
        torch.set_num_threads(1)
        points = [point for name in options.only if name in HEAD_RANGES for point in measure_head(name)]
        with tempfile.TemporaryDirectory() as folder:
            measure(HERE / "step_ours.py", {"folder": folder, "what": "models"})
            points += [point for name in options.only if name in STEP_RANGES for point in measure_step(name, folder)]
    if options.json:
        options.json.write_text(json.dumps(points))
    rows = [(p.name, f"{p.value:,}", p.variant, f"{p.microseconds:,.0f}", f"{p.mib:,.0f}") for p in points]
    table(("grows", "to", "variant", "CPU microseconds a token", "extra memory, MiB"), rows)
    if options.picture:
        drawn = charts(points)
        write_png(options.picture, drawn, columns=len(drawn) // 2)


if __name__ == "__main__":
    main()
