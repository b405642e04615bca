"""Sets the cost model's seconds an iteration beside those that others publish: docs/cost.md.

    python -m research.public_steps

docs/cost.jsonl has a line for each published row: the model, the GPUs that generate and those that train (one number:
the same ones in turn), lengths, settings, seconds by phase, and what the cost model said before it was mended (commit
de75919d). Nothing is run.

One row is held out: no term of the cost model is chosen or changed with it in view. It was named before any of the
published numbers was read: of NeMo-RL's performance summary the newest release's row of Qwen3-32B on H100, trained
on-policy in turn with generation; where there are several, the one on the most GPUs.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from jackpot.analysis.plan.cost_model import (
    DENSE_FP8_GAIN,
    FP8_TRAINING_GAIN,
    GPUS,
    PLAIN,
    EngineSpeed,
    Gpu,
    Lengths,
    Linear,
    ModelCost,
    Work,
    run_hours,
)
from jackpot.analysis.plan.sharding import ENGINE_BYTES
from jackpot.models.cost import cached_numbers, forward_cost, head_cost
from research.placements import batches_at_once

ROWS = Path(__file__).parents[1] / "docs/cost.jsonl"
HELD_OUT = {"source": "NeMo-RL 0.5", "model": "Qwen3-32B", "gpu": "H100", "ahead": 0}
PHASES = ("generation", "log-probs", "training", "iteration")
KINDS = GPUS | {"H20": Gpu(bf16=148e12, fp32=44e12, bandwidth=4.0e12, memory=96e9)}  # NVIDIA's data sheet
MAX_NUM_SEQS = 1024  # vLLM's default on these GPUs

_QWEN = {"vocab_size": 151_936, "head_dim": 128}
SHAPES: dict[str, dict[str, Any]] = {  # as in each model's config.json: hidden, intermediate, layers, heads, key heads
    "Llama-3.1-8B": {"model_type": "llama", "vocab_size": 128_256, "shape": (4096, 14_336, 32, 32, 8)},
    "Qwen2.5-Math-7B": {"model_type": "qwen2", "vocab_size": 152_064, "shape": (3584, 18_944, 28, 28, 4)},
    "Qwen3-32B": _QWEN | {"model_type": "qwen3", "shape": (5120, 25_600, 64, 64, 8)},
    "Qwen3-30B-A3B": _QWEN
    | {"model_type": "qwen3_moe", "shape": (2048, 6144, 48, 32, 4)}
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


@cache
def model_cost(name: str) -> ModelCost:
    """Count the model's FLOPs and parameters by its shapes, on the meta device."""
    settings = SHAPES[name] | {"tie_word_embeddings": False}
    sizes = dict(zip(SIZES, settings.pop("shape"), strict=True))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings, **sizes))
    parameters, forward, head = sum(one.numel() for one in model.parameters()), forward_cost(model), head_cost(model)
    return ModelCost(
        parameters=parameters,
        trained=parameters,
        body=forward.per_token - head,
        head=head,
        pair=forward.per_pair,
        cache=cached_numbers(model),
        layers=sizes["num_hidden_layers"],
    )


def engine_speed(row: dict[str, Any], gpu: Gpu) -> EngineSpeed:
    """Return the speed of one of the row's engines."""
    model, bytes_each = model_cost(row["model"]), 1.0 if row["fp8"] else 2.0
    room = row["tensor_parallel"] * (row["memory"] * gpu.memory - ENGINE_BYTES)
    return EngineSpeed(
        model=model,
        weight_bytes=bytes_each,
        number_bytes=2,
        max_num_seqs=MAX_NUM_SEQS,
        cache_bytes=room - bytes_each * model.parameters,
        gpus=row["tensor_parallel"],
        peak=gpu.bf16,
        linear=gpu.bf16 / gpu.fp8 if row["fp8"] and gpu.fp8 else 1.0,
        most_gain=DENSE_FP8_GAIN if row["fp8"] else None,
    )


def estimated(row: dict[str, Any], mean: float) -> dict[str, float]:
    """Return the seconds of each phase, and of an iteration, with responses of `mean` tokens on average."""
    gpu, model = KINDS[row["gpu"]], model_cost(row["model"])
    engine, lengths = engine_speed(row, gpu), Lengths(prompt=row["prompt"], mean=mean, limit=row["limit"])
    generating, training = row["gpus"][0], row["gpus"][-1]
    linear = Linear(1 / FP8_TRAINING_GAIN, 1 / FP8_TRAINING_GAIN) if row["fp8"] else PLAIN
    batches = max(1, batches_at_once(row["ahead"]))

    def seconds(gpus: int, extra: float, reference: bool, at_once: int = 1) -> Any:
        work = Work(
            sequences=at_once * row["responses"],
            steps=at_once * row["steps"],
            epochs=1,
            micro_batches=row["responses"],
            generated=1.0,
            lengths=lengths,
            checkpoints=row["checkpoints"],
            extra=extra,
        )
        others = model.forward(lengths, linear) if reference else 0.0
        return run_hours(work, engine, [model], others, 3600, gpu, gpus, gpu.bf16, linear)

    writing, step = seconds(generating, 0.0, False, batches), seconds(training, 0.0, False).training
    passes = seconds(training, row["old_log_probs"], row["reference"]).training - step
    generation, learning = writing.generation / batches, step + passes
    busy = max(generation, learning) if row["ahead"] else generation + learning
    phases = {"generation": generation, "log-probs": passes, "training": step}
    return phases | {"iteration": busy + writing.sending / batches}


def mean_response(row: dict[str, Any]) -> float:
    """Return the published mean response; where there is none, that with which training takes what is published."""
    if row["mean"]:
        return row["mean"]
    low, high = 1.0, float(row["limit"])
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if estimated(row, middle)["training"] < row["published"]["training"] else (low, middle)
        )
    return low


def rows() -> Iterator[dict[str, Any]]:
    """Return the published rows."""
    yield from map(json.loads, ROWS.read_text().splitlines())


def line(row: dict[str, Any]) -> str:
    """Return a row of the table: ours over published, by phase; ours alone where nothing is published."""
    mean, published = mean_response(row), row["published"]
    name = f"{row['source']}: {row['model']}{', FP8' if row['fp8'] else ''}"
    is_held_out = all(row[key] == value for key, value in HELD_OUT.items())
    cells = [f"{name}, **held out**" if is_held_out else name, f"{' + '.join(map(str, row['gpus']))} {row['gpu']}"]
    cells += [f"{row['ahead']}", f"{mean:,.0f}{'' if row['mean'] else ' *'}"]
    for phase, ours in estimated(row, mean).items():
        known = published.get(phase)
        text = f"{ours:.1f}" if ours else "-"
        if known:
            text = f"{ours / known:.2f} ({text}/{known:g})"
        cells.append(text)
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """Return the table of docs/cost.md."""
    columns = ("row", "GPUs", "ahead", "mean response", *PHASES)
    return "\n".join([f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *map(line, rows())])


def main() -> None:
    print(table())


if __name__ == "__main__":
    main()
