"""Compares the peak of tensors that `--dry-run` plans with what the whole process takes.

    OMP_NUM_THREADS=1 python benchmarks/memory.py > memory.md

The models and prompts of step.py. Each plan and each run is a process of its own; the run's number is the largest
resident memory that its kernel saw, over three iterations. Responses rarely end before the limit, as the plan assumes.
"""

import argparse
import tempfile
from pathlib import Path

from interleaved import measure, table

WORKER = Path(__file__).with_name("step_ours.py")
CASES = {
    "on policy": ("on_policy", ()),
    "two models": ("joint", ()),
    "on policy, micro-batches of 4 times the size": ("on_policy", ("batch.micro_batch_tokens=29952",)),
    "two models, activations checkpointed": ("joint", ("activation_checkpointing=true",)),
    "two models, responses of twice the length": (
        "joint",
        ("sampling.max_new_tokens=128", "batch.micro_batch_tokens=11584"),
    ),
    "on policy in bf16": ("on_policy", ("precision=bf16", "engine.dtype=bf16")),
    "on policy, an adapter": ("on_policy", ("policy.lora.rank=8",)),
    "two models, the writer frozen": ("joint", ("rollout_model.optimizer=null",)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--only", help="cases whose name has this in it")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        shared = {"folder": folder, "prompts": options.prompts, "new_tokens": options.new_tokens, "steps": 3}
        measure(WORKER, shared | {"what": "models"})
        for name, (what, overrides) in CASES.items():
            if options.only and options.only not in name:
                continue
            job = shared | {"what": what, "overrides": overrides}
            planned, ran = measure(WORKER, job | {"plan": True}), measure(WORKER, job)
            others = ran["peak_mib"] - planned["peak_mib"]
            rows.append((name, f"{planned['peak_mib']:,.0f}", f"{ran['peak_mib']:,.0f}", f"{others:,.0f}"))
    table(("", "tensors as planned, MiB", "process, MiB", "beyond tensors, MiB"), rows)


if __name__ == "__main__":
    main()
