"""Seconds and memory for each token as one size grows, beside others that stay.

    python benchmarks/growth.py --repetitions 1
    python benchmarks/growth.py --only grows=prompts

Of the loss layer alone (head.py: forward and backward, float32, hidden 1024; beside ours the full logits): vocabulary
V, tokens N, top K. Of a whole GRPO step (step.py's fixed shape with 16 prompts): responses of a prompt, of the same
128 in all; prompts, in micro-batches of 64 responses; response length, in more micro-batches; the spread of lengths,
which are 64 tokens on average and at most 64, 128, 256 or 512; and micro-batches of one step that trains two models,
where kappa is what it is by default or exact. CPU seconds of one thread; memory is what a process takes at its peak
above what it had before. Each measurement is a process of its own.
"""

import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from interleaved import FOLDER, Benchmark, Job, Results, main, markdown
from png import write_png
from step_task import SHAPES

from jackpot.ui.charts import Chart, Series

HEAD = {"worker": "head.py", "device": "cpu", "dtype": "fp32", "vocabulary": 151_936, "hidden": 1024, "tokens": 1024}
HEAD |= {"top": 20, "what": "single", "variant": "ours"}
STEP = {"worker": "step_ours.py", "shape": "fixed", "models": 1, "prompts": 16, "steps": 4}
WIDTH = SHAPES["fixed"].prompt[1] + SHAPES["fixed"].new_tokens
MICRO_BATCH = f"batch.micro_batch_tokens={64 * WIDTH}"  # whatever else there is
STOPS = {64: 0, 128: 51, 256: 63, 512: 64}  # of 4,096 words, for 64 tokens on average where there is room for so many
MOST_LOGITS = 2**28  # of a head that full logits are asked for: they are there several times, 1 GiB each
QUICK = {"head": {"tokens": 64}, "step": {"prompts": 4, "steps": 3}}
NAIVE = {"variant": "naive"}
EXACT = {"kappa": "prepass"}


class Range(NamedTuple):
    """One size, its values, and what is drawn beside ours."""

    title: str
    label: str
    values: tuple[int, ...]
    beside: tuple[str, Job] | None = None


RANGES = {
    "vocabulary": Range("Vocabulary, one head", "V", (4096, 16_384, 65_536, 262_144), ("full logits", NAIVE)),
    "tokens": Range("Tokens, two heads", "N", (256, 1024, 4096), ("full logits", NAIVE)),
    "top": Range("Top K, two heads", "K", (5, 20, 80, 160)),
    "group": Range("Group size, a step", "responses of a prompt", (2, 4, 8, 16, 32)),
    "prompts": Range("Prompts, a step", "prompts", (4, 16, 64)),
    "new_tokens": Range("Response length, a step", "tokens", (16, 64, 256)),
    "spread": Range("Spread of lengths, a step", "longest, of 64 on average", tuple(STOPS)),
    "micro_batches": Range("Micro-batches, two models", "micro-batches", (1, 2, 4, 8), ("kappa: prepass", EXACT)),
}


def job_of(name: str, value: int) -> Job:
    """The job in which a size has a value."""
    if name in HEAD:
        return HEAD | {"grows": name, name: value} | ({} if name == "vocabulary" else {"what": "joint"})
    job = STEP | {"grows": name, "at": value, "overrides": [MICRO_BATCH]}
    match name:
        case "group":
            return job | {"group": value, "prompts": 128 // value}
        case "spread":
            stops = list(range(4096 - STOPS[value], 4096))
            return job | {"new_tokens": value, "overrides": [MICRO_BATCH, f"sampling.stop_token_ids={stops}"]}
        case "micro_batches":
            tokens = -(-128 // value) * WIDTH
            return job | {"models": 2, "overrides": [f"batch.micro_batch_tokens={tokens}"]}
    return job | {name: value}


def jobs(quick: bool) -> list[Job]:
    found = []
    for name, wanted in RANGES.items():
        for value in wanted.values[: 1 if quick else None]:
            job = job_of(name, value) | (QUICK["head" if name in HEAD else "step"] if quick else {})
            found.append(job)
            if wanted.beside and job.get("tokens", 0) * job.get("vocabulary", 0) <= MOST_LOGITS:
                found.append(job | wanted.beside[1])
    return found


def is_beside(job: Job) -> bool:
    """Tell whether a job is what is drawn beside ours."""
    return job.get("variant") == "naive" or "kappa" in job


class Point(NamedTuple):
    """One measurement."""

    name: str
    beside: bool
    value: int
    microseconds: list[float]  # of CPU, for each token; repetition by repetition
    mib: list[float]  # at the peak


def points(results: Results) -> list[Point]:
    found = []
    for job in results.jobs():
        own, name = results.of_job(job), job["grows"]
        seconds = [one["seconds"] / job["tokens"] if "seconds" in one else one["step"] / one["tokens"] for one in own]
        memory = [one["extra_mb"] if "extra_mb" in one else one["own_mib"] for one in own]
        value = job[name] if name in HEAD else job["at"]
        found.append(Point(name, is_beside(job), value, [1e6 * one for one in seconds], memory))
    return found


def charts(found: Sequence[Point]) -> list[Chart]:
    """Time in the first row, memory below."""
    return [
        chart(wanted, of_name, column, label)
        for column, label in (("microseconds", "CPU microseconds a token"), ("mib", "extra memory, MiB"))
        for name, wanted in RANGES.items()
        if (of_name := [point for point in found if point.name == name])
    ]


def chart(wanted: Range, found: Sequence[Point], column: str, label: str) -> Chart:
    """From zero on, so that flat looks flat; the vocabulary grows too far for that."""
    medians = {(point.beside, point.value): statistics.median(getattr(point, column)) for point in found}
    names = {False: "ours", True: wanted.beside[0] if wanted.beside else ""}
    is_vocabulary = wanted.label == "V"
    return Chart(
        title=wanted.title,
        x_label=wanted.label,
        y_label=label,
        x_names=tuple(f"{value:,}" for value in wanted.values),
        log_y=is_vocabulary,
        y_range=None if is_vocabulary else (0.0, 1.1 * max(medians.values())),
        series=tuple(
            Series(
                name=names[beside],
                x=[wanted.values.index(value) for other, value in medians if other == beside],
                y=[median for (other, _), median in medians.items() if other == beside],
                color_index=int(beside),
                style="both",
            )
            for beside in sorted({beside for beside, _ in medians})
        ),
    )


def rows(results: Results) -> Iterator[tuple[str, ...]]:
    """What grows, each; what is beside ours behind the stroke."""
    found = points(results)
    for name, wanted in RANGES.items():
        here = [
            sorted((point for point in found if (point.name, point.value) == (name, value)), key=lambda p: p.beside)
            for value in wanted.values
        ]
        cells = [
            "; ".join("/".join(f"{statistics.median(one[at]):,.0f}" for one in beside) or "-" for beside in here)
            for at in (3, 4)
        ]
        title = wanted.title + (f" / {wanted.beside[0]}" if wanted.beside else "")
        yield title, "; ".join(f"{value:,}" for value in wanted.values), *cells


def report(results: Results) -> str:
    return markdown(("grows", "to", "CPU microseconds a token", "extra memory, MiB"), rows(results))


def draw() -> None:
    """Draw docs/pictures/growth.png from the results, if there are any."""
    if found := charts(points(Results.read(FOLDER / "growth.jsonl"))):
        write_png(FOLDER.parent / "pictures" / "growth.png", found, columns=len(found) // 2)


PREPARE = {"worker": "step_ours.py", "action": "models", "shapes": ["fixed"]}
BENCHMARK = Benchmark("growth", jobs, report, PREPARE, repetitions=1)

if __name__ == "__main__":
    main(BENCHMARK, __doc__)
    draw()
