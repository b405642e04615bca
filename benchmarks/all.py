"""Runs every benchmark and writes docs/benchmarks.md from docs/benchmarks/*.jsonl.

    python benchmarks/all.py             what the files lack, then the page; hours
    python benchmarks/all.py --quick     every script at its smallest sizes; nothing is kept
    python benchmarks/all.py --page      the page alone

What is prose stands in benchmarks/all.md; every number on the page is computed here from the results.
"""

import argparse
import sys
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import decode
import growth
import head
import memory
import obrs_overhead
import step
import step_smollm2
from interleaved import FOLDER, HERE, ROOT, Benchmark, Results, cell, markdown, options, ratios, run

PAGE = ROOT / "docs" / "benchmarks.md"
BENCHMARKS: dict[str, Benchmark] = {
    module.BENCHMARK.name: module.BENCHMARK
    for module in (step, step_smollm2, head, decode, obrs_overhead, growth, memory)
}
Values = Callable[[Results], list[float]]


class Claim(NamedTuple):
    """One line of the table of ratios."""

    what: str
    beside: str
    script: str
    times: Values  # the other side's CPU time, in ours
    memory: Values | None  # ours, in the other side's
    goal: float | None = None  # the least that `times` was to be
    most: float | None = None  # that `memory` was to be


def of_step(
    what: str,
    shape: str,
    dtype: str,
    side: str,
    peer: str,
    goal: float | None = None,
    most: float | None = None,
    script: str = "step",
) -> Claim:
    def times(results: Results) -> list[float]:
        return ratios(step.speeds(results, shape, dtype, side), step.speeds(results, shape, dtype, peer))

    def own(results: Results) -> list[float]:
        sides = (step.measured(results, shape, dtype, one) for one in (side, peer))
        return ratios(*([one["own_mib"] for one in found] for found in sides))

    return Claim(f"{what}, {dtype}", peer, script, times, own, goal, most)


def of_smollm2(what: str, side: str, peer: str, goal: float | None = None) -> Claim:
    return of_step(what, step_smollm2.SHAPE, step_smollm2.DTYPE, side, peer, goal, script="step_smollm2")


def of_head(what: str, dtype: str, variant: str, beside: str) -> Claim:
    def both(results: Results, key: str) -> list[list[float]]:
        return [results.values(key, what=what, dtype=dtype, variant=one) for one in (variant, "ours")]

    def less(results: Results) -> list[float]:
        theirs, own = both(results, "extra_mb")
        return ratios(own, theirs)

    name = {"single": "head", "joint": "two heads", "log-probs": "log-probs only"}[what]
    return Claim(f"{name}, {dtype}", beside, "head", lambda results: ratios(*both(results, "seconds")), less)


def of_decode(case: str, dtype: str, goal: float) -> Claim:
    def times(results: Results) -> list[float]:
        return ratios(*(decode.speeds(results, case, dtype, writer) for writer in ("engine", "generate")))

    return Claim(f"writing, {case}, {dtype}", "`generate`", "decode", times, None, goal)


CLAIMS = [
    of_step("step, fixed", "fixed", "fp32", "one policy", "TRL", 2.3, 0.5),
    of_step("step, fixed", "fixed", "fp32", "one policy", "TRL, compact", 2.0),
    of_step("step, ragged", "ragged", "fp32", "one policy", "TRL", 2.8, 0.5),
    of_step("step, ragged", "ragged", "fp32", "one policy", "TRL, compact"),
    of_step("step of two models, fixed", "fixed", "fp32", "two models", "TRL", 1.6, 0.9),
    of_step("step of two models, ragged", "ragged", "fp32", "two models", "TRL", 1.6, 0.9),
    of_step("step, fixed", "fixed", "bf16", "one policy", "TRL"),
    of_step("step, ragged", "ragged", "bf16", "one policy", "TRL"),
    of_smollm2("step, SmolLM2-135M's shape", "one policy", "TRL", 4.2),
    of_smollm2("step of two models, SmolLM2-135M's shape, half the writer", step_smollm2.HALF, "TRL", 3.0),
    *(of_head("single", dtype, "trl", "TRL") for dtype in head.DTYPES),
    *(of_head("joint", dtype, "trl", "TRL") for dtype in head.DTYPES),
    *(of_head("log-probs", dtype, "naive", "full logits") for dtype in head.DTYPES),
    of_decode("fixed", "fp32", 1.8),
    of_decode("ragged", "fp32", 2.7),
]


def goals(claim: Claim, times: list[float], memory: list[float]) -> str:
    """The goals of a claim, with a word where the median misses one."""
    cells = []
    if claim.goal is not None:
        cells.append(f"{claim.goal}" + " **missed**" * (bool(times) and median(times) < claim.goal))
    if claim.most is not None:
        cells.append(f"memory {claim.most}" + " **missed**" * (bool(memory) and median(memory) > claim.most))
    return ", ".join(cells)


def claims(results: dict[str, Results]) -> str:
    rows = []
    for claim in CLAIMS:
        found = results[claim.script]
        times, memory = claim.times(found), claim.memory(found) if claim.memory else []
        rows.append(
            (
                claim.what,
                claim.beside,
                cell(times),
                cell(memory) if claim.memory else "",
                goals(claim, times, memory),
            )
        )
    return markdown(("what", "beside", "its CPU time, in ours", "our memory, in its", "goal"), rows)


def sources(results: dict[str, Results]) -> str:
    """Where the scripts' numbers are from: a row for each commit, machine and set of versions."""
    commands: dict[tuple[str, ...], list[str]] = {}
    for name, found in results.items():
        about, versions = found.about, ", ".join(f"{key} {value}" for key, value in found.versions().items())
        origin = (about["commit"], about["machine"], versions) if about else ("to be measured", "", "")
        commands.setdefault(origin, []).append(f"`{about.get('command', name)}`")
    rows = [("<br>".join(listed), *origin) for origin, listed in commands.items()]
    return markdown(("command", "commit", "machine", "versions"), rows)


def page() -> str:
    """The whole document."""
    results = {name: Results.read(FOLDER / f"{name}.jsonl") for name in BENCHMARKS}
    tables = {name: BENCHMARKS[name].report(found) for name, found in results.items()}
    tables["floor"] = step.at_floor(results["step"])
    if results["growth"].about:
        tables["growth"] += "\n\n![time and memory for each token as one size grows](pictures/growth.png)"
    return (HERE / "all.md").read_text().format(claims=claims(results), sources=sources(results), **tables)


def main() -> None:
    if sys.argv[1:] != ["--page"]:
        chosen: argparse.Namespace = options(__doc__)
        for benchmark in BENCHMARKS.values():
            print(f"# {benchmark.name}\n\n{benchmark.report(run(benchmark, chosen))}\n", flush=True)
        if chosen.quick:
            return
    PAGE.write_text(page())
    growth.draw()


if __name__ == "__main__":
    main()
