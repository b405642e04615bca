"""Compares the peak of tensors that `--dry-run` plans with what the whole process takes.

    python benchmarks/memory.py

The models and prompts of step.py's fixed shape, 8 prompts, and its ragged one. Each plan and each run is a process of
its own; the run's number is the largest resident memory that its kernel saw, over three iterations. Responses of the
fixed shape rarely end before the limit, as the plan assumes.
"""

from collections.abc import Iterator

from interleaved import Benchmark, Job, Results, cell, main, markdown
from step import SMALL

FIXED = {"shape": "fixed", "prompts": 8}
CASES: dict[str, Job] = {
    "one policy": {"models": 1},
    "two models": {"models": 2},
    "one policy, micro-batches of 4 times the size": {"models": 1, "micro_batch": 256},
    "two models, activations checkpointed": {"models": 2, "overrides": ["activation_checkpointing=true"]},
    "two models, responses of twice the length": {"models": 2, "new_tokens": 128},
    "one policy, bf16": {"models": 1, "dtype": "bf16"},
    "one policy, an adapter": {"models": 1, "overrides": ["policy.lora.rank=8"]},
    "two models, rollout model frozen": {"models": 2, "overrides": ["rollout_model.optimizer=null"]},
    "one policy, ragged": {"models": 1, "shape": "ragged"},
    "two models, ragged": {"models": 2, "shape": "ragged"},
}


def jobs(quick: bool) -> list[Job]:
    small = {"prompts": 2, "new_tokens": 8} if quick else {}
    cases = [
        FIXED | {"worker": "step_ours.py", "case": name, "steps": 3} | case | small for name, case in CASES.items()
    ]
    return [case | {"action": action} for case in cases for action in ("plan", "run")]


def rows(results: Results) -> Iterator[tuple[str, ...]]:
    for name in CASES:
        planned = results.values("peak_mib", case=name, action="plan")
        ran, own = (results.values(key, case=name, action="run") for key in ("peak_mib", "own_mib"))
        yield name, cell(planned, 0), cell(ran, 0), cell([a - b for a, b in zip(ran, own, strict=True)], 0)


def report(results: Results) -> str:
    return markdown(("", "tensors as planned, MiB", "process, MiB", "of it before the first step"), rows(results))


PREPARE = {"worker": "step_ours.py", "action": "models", "shapes": list(SMALL)}
BENCHMARK = Benchmark("memory", jobs, report, PREPARE, repetitions=1)

if __name__ == "__main__":
    main(BENCHMARK, __doc__)
