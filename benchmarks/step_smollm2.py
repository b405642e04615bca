"""A step of a model of SmolLM2-135M's shape, ours against TRL's: step.py on one shape, in fp32.

    python benchmarks/step_smollm2.py --repetitions 2

30 layers of width 576, 9 heads that share 3 of keys, 49,152 words, tied: 134.5 M random weights. 8 prompts of 30 to 45
tokens, 8 responses each of 16. Each side has the micro-batch that suits it: TRL that of 16 sequences, with which it is
faster than with 64; ours all 64, and 16 beside it, which take less memory. Where two models are of unequal size the
writer has 15 of the 30 layers. "Above" is the peak without weights, gradients and moments of the trained models: it has
Python and its libraries in it, and the engine's weights.
"""

from collections.abc import Iterator

import torch
from interleaved import Benchmark, Job, Results, cell, main, markdown, ratios
from step import SIDES, measured, of_floor, speeds
from step_ours import make_model
from step_task import SHAPES

SHAPE, DTYPE = "smollm2", "fp32"
HALF = "two models, half the writer"
MICRO_BATCHES = {"TRL": (16,), "TRL, compact": (16,), "one policy": (64, 16), "two models": (64,), HALF: (64, 16)}
STEPS = 3  # of each process; the first two are not counted
ALL_SIDES: dict[str, Job] = SIDES | {HALF: SIDES["two models"] | {"writer": "half"}}


def jobs(quick: bool) -> list[Job]:
    small = {"prompts": 1, "new_tokens": 2} if quick else {}
    found: list[Job] = [{"worker": "floor.py", "dtype": DTYPE}]
    for side, sizes in MICRO_BATCHES.items():
        for size in sizes:
            shape = {"shape": SHAPE, "dtype": DTYPE, "micro_batch": 8 if quick else size}
            found.append(shape | {"side": side if size == sizes[0] else f"{side}, {size} at a time", "steps": STEPS})
            found[-1] |= ALL_SIDES[side] | small
    return found


def fixed_mib(side: str) -> float:
    """Weights, gradients and two moments of all trained models."""
    with torch.device("meta"):
        policy, half = (make_model(SHAPE, SHAPES[SHAPE].words, half).num_parameters() for half in (False, True))
    writer = (half if side.startswith(HALF) else policy) if side.startswith("two") else 0
    return 16 * (policy + writer) / 2**20


def rows(results: Results) -> Iterator[tuple[str, ...]]:
    for side in (job["side"] for job in jobs(quick=False) if "side" in job):
        found, speed = measured(results, SHAPE, DTYPE, side), speeds(results, SHAPE, DTYPE, side)
        yield (
            side,
            cell(one["step"] for one in found),
            cell(ratios(speed, speeds(results, SHAPE, DTYPE, "TRL"))),
            cell(of_floor(results, SHAPE, DTYPE, side)),
            cell((one["peak_mib"] - fixed_mib(side) for one in found), 0),
        )


def report(results: Results) -> str:
    columns = ("side", "step, CPU s", "of TRL's speed", "of the floor", "above, MiB")
    return markdown(columns, rows(results))


BENCHMARK = Benchmark(
    "step_smollm2", jobs, report, {"worker": "step_ours.py", "action": "models", "shapes": [SHAPE]}, repetitions=2
)

if __name__ == "__main__":
    main(BENCHMARK, __doc__)
