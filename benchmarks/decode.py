"""The engine's decode loop beside bare `model.generate`, and how far it is from what the machine allows.

    OMP_NUM_THREADS=1 python benchmarks/decode.py --json decode.json > decode.md
    OMP_NUM_THREADS=1 python benchmarks/decode.py --rows 64 --new-tokens 16 --repetitions 1 --cases fixed --dtypes fp32

The engine keeps the log-prob of every token and of the 20 most probable; `generate` samples and keeps nothing else.
Both get the same prompts and weights, which are random. Every measurement is a process of its own and they take turns.
A cell is the median and, in brackets, the smallest and the largest. Seconds are CPU seconds of all threads: where
others work too, believe them and not the wall clock. Tokens are those of the responses, padding aside.

The two floors: the multiplications of the model (of every prompt once, and of every token written) at the rate of a
large matrix product, and one reading of the weights at each step and of the keys and values that each row has, at the
rate of copying. Both rates are measured in the same process as the engine.
"""

import argparse
import json
import math
import platform
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import interleaved
import torch
import transformers
from interleaved import MARK, Job, Result, cell
from transformers import Qwen3Config, Qwen3ForCausalLM

from jackpot.config.engines import TransformersEngineConfig
from jackpot.config.run import Sampling
from jackpot.core.types import Prompt, Rollout, Version
from jackpot.rollout.engines.base import Request
from jackpot.rollout.engines.transformers.engine import TransformersEngine

EOS, NUM_TOP = 1, 20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GROUP = 8  # responses of a prompt


class Case(NamedTuple):
    vocab_size: int
    stop_rate: float  # the chance that a token ends the response
    share: float  # of the rows, and of the tokens, that the others have


CASES = {
    "fixed": Case(4096, 0.0, 1.0),
    "ragged": Case(4096, 0.024, 1.0),  # 33 of 64 tokens on average
    "large vocabulary": Case(151_936, 0.0, 0.5),
}


def make_model(case: Case, dtype: torch.dtype) -> Qwen3ForCausalLM:
    """4.2 million parameters with the small vocabulary. A bias of the head makes responses end."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=case.vocab_size,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    if case.stop_rate:
        bias = torch.zeros(case.vocab_size)
        bias[EOS] = math.log(case.stop_rate / (1 - case.stop_rate) * case.vocab_size)
        model.lm_head.bias = torch.nn.Parameter(bias)
    return model.to(dtype).eval()


def stop_tokens(model: Qwen3ForCausalLM) -> list[int]:
    return [] if model.lm_head.bias is None else [EOS]


def make_prompts(case: Case, rows: int) -> list[Prompt]:
    """A prompt for every `GROUP` rows, of 36 to 53 tokens."""
    draw = random.Random(0)
    lengths = [draw.randint(36, 53) for _ in range(max(1, rows // GROUP))]
    return [
        Prompt(
            uid=str(i), text="", answer="", token_ids=tuple(draw.randrange(2, case.vocab_size) for _ in range(length))
        )
        for i, length in enumerate(lengths)
    ]


def write_with_engine(model: Qwen3ForCausalLM, prompts: list[Prompt], group: int, num_new: int) -> Callable[[], Result]:
    engine = TransformersEngine(
        model,
        TransformersEngineConfig(max_num_seqs=4096),
        eos_token_ids=stop_tokens(model),
        version=Version(0, 0),
    )
    sampling = Sampling(max_new_tokens=num_new, num_top_log_probs=NUM_TOP)
    requests = [
        Request(uid=f"{prompt.uid}/{i}", prompt=prompt, seed=1000 * i + n, sampling=sampling)
        for n, prompt in enumerate(prompts)
        for i in range(group)
    ]

    def write() -> Result:
        return _lengths(engine.generate(requests))

    return write


def _lengths(rollouts: list[Rollout]) -> Result:
    """Tokens written, and read again by the tokens behind them."""
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    seen = [
        t * (t - 1) / 2 + (t - 1) * len(rollout.prompt.token_ids) for t, rollout in zip(lengths, rollouts, strict=True)
    ]
    return {"tokens": float(sum(lengths)), "steps": float(max(lengths)), "seen": float(sum(seen))}


def write_with_generate(
    model: Qwen3ForCausalLM, prompts: list[Prompt], group: int, num_new: int
) -> Callable[[], Result]:
    width = max(len(prompt.token_ids) for prompt in prompts)
    rows = [[0] * (width - len(prompt.token_ids)) + list(prompt.token_ids) for prompt in prompts for _ in range(group)]
    ids = torch.tensor(rows)

    def write() -> Result:
        output = model.generate(
            ids,
            attention_mask=(ids != 0).long(),
            do_sample=True,
            top_k=0,
            top_p=1.0,
            max_new_tokens=num_new,
            eos_token_id=stop_tokens(model) or None,
        )
        written = output[:, width:]
        if not stop_tokens(model):
            return {"tokens": float(written.numel())}
        ended = (written == EOS).int().cumsum(dim=1)
        return {"tokens": float(((ended == 0) | ((ended == 1) & (written == EOS))).sum())}

    return write


WRITERS = {"engine": write_with_engine, "generate": write_with_generate}


def cpu_seconds(run: Callable[[], object], repetitions: int) -> float:
    run()
    start = time.process_time()
    for _ in range(repetitions):
        run()
    return (time.process_time() - start) / repetitions


def floors(model: Qwen3ForCausalLM, dtype: torch.dtype, prompts: list[Prompt], written: Result) -> Result:
    """Seconds that the multiplications and the reading of memory take at the rates of this process."""
    square = torch.randn(1024, 1024).to(dtype)
    flops_rate = 2 * 1024**3 / cpu_seconds(lambda: square @ square, 10)
    block, target = torch.ones(2**26, dtype=torch.uint8), torch.empty(2**26, dtype=torch.uint8)
    bytes_rate = 2 * 2**26 / cpu_seconds(lambda: target.copy_(block), 10)
    config, body = model.config, sum(p.numel() for p in model.model.layers.parameters())
    head = config.vocab_size * config.hidden_size
    prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    heads = config.num_hidden_layers * config.head_dim
    flops = 2 * (body * (prompt_tokens + written["tokens"]) + head * written["tokens"])
    flops += 4 * heads * config.num_attention_heads * written["seen"]
    numbers = (body + head) * written["steps"] + 2 * heads * config.num_key_value_heads * written["seen"]
    return {
        "gflops": flops_rate / 1e9,
        "gbytes": bytes_rate / 1e9,
        "flop_floor": flops / flops_rate,
        "byte_floor": numbers * dtype.itemsize / bytes_rate,
    }


@torch.no_grad()
def work(job: Job) -> Result:
    """One measurement, in this process."""
    case, dtype = CASES[job["case"]], DTYPES[job["dtype"]]
    rows, num_new = round(job["rows"] * case.share), round(job["new_tokens"] * case.share)
    model, prompts = make_model(case, dtype), make_prompts(case, rows)
    write = WRITERS[job["writer"]](model, prompts, rows // len(prompts), num_new)
    WRITERS[job["writer"]](model, prompts[:1], 2, 2)()
    start = time.process_time()
    written = write()
    result = {"seconds": time.process_time() - start, "tokens": written["tokens"]}
    return result | floors(model, dtype, prompts, written) if job["writer"] == "engine" else result


def measure(job: Job) -> Result:
    """One measurement, in a process of its own."""
    return interleaved.measure(Path(__file__), job, flags=["--work"])


def line(case: str, dtype: str, results: dict[str, list[Result]]) -> str:
    """A row of the table."""
    speeds = {name: [one["tokens"] / one["seconds"] for one in ones] for name, ones in results.items()}
    ratios = [a / b for a, b in zip(speeds["engine"], speeds["generate"], strict=True)]
    engine = results["engine"]
    shares = [cell([one[floor] / one["seconds"] for one in engine]) for floor in ("flop_floor", "byte_floor")]
    cells = [case, dtype, cell(speeds["generate"], 0), cell(speeds["engine"], 0), cell(ratios), *shares]
    return f"| {' | '.join(cells)} |"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--json", help="a file for every single measurement")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    chosen = options()
    if chosen.work:
        print(MARK + json.dumps(work(json.loads(chosen.work))))
        return
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, {versions};")
    print(f"{chosen.rows} rows, {chosen.new_tokens} tokens each, CPU seconds\n")
    print("| case | weights | generate, tokens/s | engine, tokens/s | ratio | of the FLOP floor | of the byte floor |")
    print("|---|---|---|---|---|---|---|")
    records = []
    for case in chosen.cases:
        for dtype in chosen.dtypes:
            job = {"case": case, "dtype": dtype, "rows": chosen.rows, "new_tokens": chosen.new_tokens}
            results: dict[str, list[Result]] = {writer: [] for writer in WRITERS}
            for _ in range(chosen.repetitions):
                for writer, ones in results.items():
                    ones.append(measure(job | {"writer": writer}))
            print(line(case, dtype, results), flush=True)
            records.append(job | {"results": results})
    if chosen.json:
        with open(chosen.json, "w") as file:
            json.dump(records, file, indent=1)


if __name__ == "__main__":
    main()
