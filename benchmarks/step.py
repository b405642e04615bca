"""A whole GRPO step, ours against TRL's GRPOTrainer: prompts, writing, rewards, loss, backward, AdamW, weights sent.

    python benchmarks/step.py --repetitions 3
    python benchmarks/step.py --only shape=ragged --only dtype=fp32

`make .venv-peers/ready` makes the peer's environment. Both sides have the same random model, prompts, responses a
prompt, longest response, reward, learning rate and sequences in a micro-batch; weights and optimizer states are
float32.

    fixed    Qwen3, hidden 256, 4 layers, 4,096 words, 4.2 M parameters; 32 prompts of 36 to 53 tokens, 8
             responses of 64
    ragged   Llama, hidden 384, 8 layers, 49,152 words, 31 M parameters; 2 prompts of 30 to 300 tokens, 8
             responses each,
             which end at a token with chance 1/100, at 256 at the latest

    TRL            as it is on a CPU: its head reads prompts and padding too
    TRL, compact   its head reads response positions only, as it does on a GPU
    one policy     ours; it writes for itself
    two models     ours; a second model of the same size writes, both are trained: OBRS and distillation come on top

bf16 is training under autocast to bfloat16, and ours also writes with bfloat16 weights. Responses differ in length
from side to side where they are ragged, so that times are compared for each response token. A step is the CPU seconds
between two steps' ends, the first two left out; memory is the process's peak, and "own" that above what it had before
its first step. "of the floor" is the time that the products which no implementation can do without take at the rate
of a large one: a prompt once and every response token, written and then forward and backward in each trained model,
the head at response tokens only, attention over what a token sees. `count` jobs count the products that a step makes,
by dtype.
"""

from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from floor import DTYPES, forward_flops
from interleaved import Benchmark, Job, Result, Results, cell, main, markdown, ratios
from step_ours import make_model
from step_task import SHAPES

from jackpot.models.cost import forward_cost, head_cost

SIDES: dict[str, Job] = {
    "TRL": {"worker": "step_trl.py", "peer": True, "compact": False},
    "TRL, compact": {"worker": "step_trl.py", "peer": True, "compact": True},
    "one policy": {"worker": "step_ours.py", "models": 1},
    "two models": {"worker": "step_ours.py", "models": 2},
}
OURS = ("one policy", "two models")
SMALL = ("fixed", "ragged")  # the shapes of this script; `step_smollm2.py` has a larger one
STEPS = {"fixed": 5, "ragged": 6}  # of each process; the first two are not counted, nor ours' last


def jobs(quick: bool) -> list[Job]:
    small = {"prompts": 2, "micro_batch": 16, "new_tokens": 8} if quick else {}
    found = [{"worker": "floor.py", "dtype": dtype} for dtype in DTYPES]
    for shape in SMALL:
        for dtype in DTYPES:
            for name, side in SIDES.items():
                job = {"shape": shape, "dtype": dtype, "side": name, "steps": 3 if quick else STEPS[shape]}
                found.append(job | side | small)
    return found + [job | {"count": True, "steps": 3} for job in found if "side" in job]


def measured(results: Results, shape: str, dtype: str, side: str) -> list[Result]:
    return results.of(shape=shape, dtype=dtype, side=side, count=None)


def speeds(results: Results, shape: str, dtype: str, side: str) -> list[float]:
    """Response tokens a CPU second, turn by turn."""
    return [one["tokens"] / one["step"] for one in measured(results, shape, dtype, side)]


def needed_flops(shape: str, side: str, result: Result) -> float:
    """The products that a step with these lengths cannot do without."""
    policy = flops_of(shape, result)
    if not side.startswith("two models"):
        return 4 * policy
    return 3 * policy + 4 * flops_of(shape, result, half="half" in side)


def flops_of(shape: str, result: Result, half: bool = False) -> float:
    """The products of a forward pass."""
    with torch.device("meta"):
        model = make_model(shape, SHAPES[shape].words, half)
    cost = forward_cost(model)
    return forward_flops(cost.per_token, head_cost(model), cost.per_pair, result)


def of_floor(results: Results, shape: str, dtype: str, side: str) -> list[float]:
    """The floor's part of each turn's time, at the median rate of all turns."""
    rates = results.values("flops_per_second", worker="floor.py", dtype=dtype)
    found = measured(results, shape, dtype, side) if rates else []
    return [needed_flops(shape, side, one) / median(rates) / one["step"] for one in found]


def at_floor(results: Results, dtype: str = "fp32") -> str:
    """Say how many times TRL's speed our steps would have if they took the floor's time."""
    parts = []
    for shape in SMALL:
        trl = speeds(results, shape, dtype, "TRL")
        for side in OURS:
            times, floor = ratios(speeds(results, shape, dtype, side), trl), of_floor(results, shape, dtype, side)
            if times and floor:
                now = f"(now {median(times):.2f})"
                parts.append(f"{side}, {shape}, {median(times) / median(floor):.1f} {now}")
    return "; ".join(parts) or "to be measured"


def rows(results: Results) -> Iterator[tuple[str, ...]]:
    for shape in SMALL:
        for dtype in DTYPES:
            for side in SIDES:
                found = measured(results, shape, dtype, side)
                own, speed = [one["own_mib"] for one in found], speeds(results, shape, dtype, side)
                yield (
                    f"{shape}, {dtype}" if side == next(iter(SIDES)) else "",
                    side,
                    cell(one["step"] for one in found),
                    cell(speed, 0),
                    cell(ratios(speed, speeds(results, shape, dtype, "TRL"))),
                    cell(own, 0),
                    cell(of_floor(results, shape, dtype, side)),
                    products(results, shape=shape, dtype=dtype, side=side),
                )


def products(results: Results, **fields: Any) -> str:
    """What a step multiplies, in units of the floor, and the share of it in bfloat16."""
    found = results.of(count=True, **fields)
    if not found:
        return "to be measured"
    done = {dtype: found[0].get(f"{dtype}_flops", 0.0) for dtype in DTYPES}
    times = sum(done.values()) / needed_flops(fields["shape"], fields["side"], found[0])
    return f"{times:.2f}" + f", {100 * done['bf16'] / sum(done.values()):.0f} %" * (fields["dtype"] == "bf16")


def report(results: Results) -> str:
    columns = ("shape", "side", "step, CPU s", "tokens a CPU s", "of TRL's speed")
    columns += ("own, MiB", "of the floor", "products, in floors; in bf16")
    return markdown(columns, rows(results))


BENCHMARK = Benchmark("step", jobs, report, {"worker": "step_ours.py", "action": "models", "shapes": list(SMALL)})

if __name__ == "__main__":
    main(BENCHMARK, __doc__)
