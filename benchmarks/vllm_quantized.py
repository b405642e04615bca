"""Measure the difference between log-probs of vLLM's and of the transformers engine's quantization.

vLLM samples tokens and returns their log-probs; the transformers engine scores them with the same settings
(`emulated`) and without quantization (`plain`), each in the same dtype. Nothing here has run on a GPU.

    python benchmarks/vllm_quantized.py starter:policy starter:rollout_model    # needs the extra vllm

Prints a table: mean and largest difference of log-probs, nats, over all tokens.
"""

import argparse

import torch
from torch import Tensor

from jackpot.config.engines import TransformersEngineConfig, VLLMEngineConfig
from jackpot.config.sampling import Sampling
from jackpot.config.tasks import ArithmeticConfig
from jackpot.core.types import Rollout, Version
from jackpot.launch.engines import make_engine
from jackpot.models.hub import resolve_path
from jackpot.models.load import load_tokenizer
from jackpot.rollout.engines.base import Engine, Request
from jackpot.rollout.tasks.registry import make_task

PROMPTS, RESPONSES, LENGTH = 32, 4, 48
CPU, FIRST = torch.device("cpu"), Version(0, 0)
SETTINGS = ((None, None), ("int8_w8a16", None), ("int8_w8a8", None), (None, "fp8"), ("int8_w8a8", "fp8"))


def requests(path: str) -> list[Request]:
    task = make_task(ArithmeticConfig(), load_tokenizer(path))
    prompts = [task.prompt("test", number) for number in range(PROMPTS)]
    sampling = Sampling(max_new_tokens=LENGTH, num_top_log_probs=0)
    return [
        Request(uid=f"{prompt.uid}#{i}", prompt=prompt, seed=1000 * i + number, sampling=sampling)
        for number, prompt in enumerate(prompts)
        for i in range(RESPONSES)
    ]


def scores(path: str, rollouts: list[Rollout], **settings: str | None) -> Tensor:
    """Return the log-probs of the transformers engine, [tokens]."""
    engine = make_engine(TransformersEngineConfig(**settings), path, CPU, FIRST)
    try:
        return torch.cat(engine.score(rollouts, 1.0))
    finally:
        engine.close()


def generated(path: str, **settings: str | None) -> list[Rollout]:
    engine: Engine = make_engine(
        VLLMEngineConfig(kv_cache_memory_bytes=2**28, max_num_seqs=64, **settings), path, CPU, FIRST
    )
    try:
        return engine.generate(requests(path))
    finally:
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="folders or starters")
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    asked = parser.parse_args()
    print("| model | dtype | quantization | kv_cache_dtype | tokens | emulated mean, max | plain mean, max |")
    print("|---|---|---|---|---|---|---|")
    for model in asked.models:
        path = str(resolve_path(model))
        for dtype in asked.dtypes:
            for quantization, cache in SETTINGS:
                bits = {"quantization": quantization, "kv_cache_dtype": cache}
                rollouts = generated(path, dtype=dtype, **bits)
                drawn = torch.cat([rollout.rollout_log_probs for rollout in rollouts])
                gaps = [(drawn - scores(path, rollouts, dtype=dtype, **kind)).abs() for kind in (bits, {})]
                cells = [f"{gap.mean():.1e}, {gap.max():.1e}" for gap in gaps]
                print(
                    f"| {model} | {dtype} | {quantization} | {cache} | {len(drawn)} | {' | '.join(cells)} |", flush=True
                )


if __name__ == "__main__":
    main()
