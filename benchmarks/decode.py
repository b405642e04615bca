"""The engine's decode loop beside bare `model.generate` and `generate_batch`, and how far it is from what the machine
allows.

    python benchmarks/decode.py --repetitions 3
    python benchmarks/decode.py --only case=fixed --only dtype=fp32 --set rows=64 --set new_tokens=16

The engine keeps the log-prob of every token and of the 20 most probable; `generate` samples and keeps nothing else.
`generate_batch` is transformers' continuous batching; it is ended after a few minutes of CPU. All get the same
prompts and weights, which are random. Seconds are CPU seconds of all threads; tokens are those of the responses,
padding aside.

    fixed              the model and prompts of step.py's fixed shape, 256 rows of 64 tokens
    ragged             the same; a token ends the response with chance 1/42: 33 of 64 tokens on average
    large vocabulary   the same model with 151,936 words, 128 rows of 32 tokens
    few rows           step.py's ragged shape: 49,152 words, 16 rows of up to 256 tokens

The two floors: the multiplications of the model (of every prompt once, and of every token written) at the rate of a
large matrix product, and one reading of the weights at each step and of the keys and values that each row has, at the
rate of copying. Both rates are measured in the same process as the engine.
"""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from floor import DTYPES, cpu_seconds, forward_flops, product_rate
from interleaved import Benchmark, Job, Result, Results, cell, main, markdown, ratios
from step_ours import make_model, make_tokenizer
from step_task import SHAPES, Shape, prompt_text, tokens_and_pairs
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from jackpot.config.engines import TransformersEngineConfig
from jackpot.config.sampling import Sampling
from jackpot.core.types import Prompt, Version
from jackpot.models.cost import cached_numbers, forward_cost, head_cost
from jackpot.rollout.engines.base import Request
from jackpot.rollout.engines.transformers.engine import TransformersEngine

NUM_TOP = 20
PAGE, BATCH_TOKENS = 32, 1024  # of `generate_batch`: by itself it takes most of the machine's memory for its cache
BATCH_LIMIT = 300  # CPU seconds that it may take


class Case(NamedTuple):
    model: str  # a shape of step.py
    words: int
    stops: int  # of them end a response
    rows: int
    new_tokens: int

    @property
    def shape(self) -> Shape:
        """Prompts and lengths."""
        shape = SHAPES[self.model]
        sizes = {"prompts": max(1, self.rows // shape.group), "new_tokens": self.new_tokens}
        return shape._replace(words=self.words, stops=self.stops, **sizes)


CASES = {
    "fixed": Case("fixed", 4096, 0, 256, 64),
    "ragged": Case("fixed", 4096, 98, 256, 64),
    "large vocabulary": Case("fixed", 151_936, 0, 128, 32),
    "few rows": Case("ragged", 49_152, 492, 16, 256),
}


def case_of(job: Job) -> Case:
    case = CASES[job["case"]]
    return case._replace(**{name: job[name] for name in Case._fields if name in job})


def stop_tokens(case: Case) -> list[int]:
    return list(range(case.words - case.stops, case.words))


def make_prompts(shape: Shape) -> list[Prompt]:
    tokenizer = make_tokenizer(shape.words)
    texts = [prompt_text(shape, index) for index in range(shape.prompts)]
    return [
        Prompt(uid=str(n), text="", answer="", token_ids=tuple(tokenizer.encode(text))) for n, text in enumerate(texts)
    ]


Writer = Callable[[], list[int]]  # writes, and returns the lengths of all responses in the order of their prompts


def write_with_engine(model: PreTrainedModel, prompts: list[Prompt], case: Case) -> Writer:
    engine = TransformersEngine(
        model, TransformersEngineConfig(max_num_seqs=4096), eos_token_ids=stop_tokens(case), version=Version(0, 0)
    )
    sampling = Sampling(max_new_tokens=case.new_tokens, num_top_log_probs=NUM_TOP)
    requests = [
        Request(uid=f"{prompt.uid}/{i}", prompt=prompt, seed=1000 * i + n, sampling=sampling)
        for n, prompt in enumerate(prompts)
        for i in range(case.shape.group)
    ]
    return lambda: [len(rollout.token_ids) for rollout in engine.generate(requests)]


def settings(case: Case) -> dict:
    """What both of transformers' ways are asked for."""
    common = {"do_sample": True, "top_k": 0, "top_p": 1.0, "max_new_tokens": case.new_tokens, "pad_token_id": 0}
    return common | {"eos_token_id": stop_tokens(case) or None}


def write_with_generate(model: PreTrainedModel, prompts: list[Prompt], case: Case) -> Writer:
    width = max(len(prompt.token_ids) for prompt in prompts)
    rows = [[0] * (width - len(prompt.token_ids)) + list(prompt.token_ids) for prompt in prompts]
    ids = torch.tensor(rows).repeat_interleave(case.shape.group, dim=0)
    stops = torch.tensor(stop_tokens(case))

    def write() -> list[int]:
        written = model.generate(ids, attention_mask=(ids != 0).long(), **settings(case))[:, width:]
        ended = torch.isin(written, stops).int().cumsum(dim=1)
        return (ended - torch.isin(written, stops).int() == 0).sum(dim=1).tolist()

    return write


def write_with_batch(model: PreTrainedModel, prompts: list[Prompt], case: Case) -> Writer:
    ids = [list(prompt.token_ids) for prompt in prompts for _ in range(case.shape.group)]
    config = GenerationConfig(**settings(case) | {"eos_token_id": stop_tokens(case) or -1})
    pages = -(-(max(map(len, ids)) + case.new_tokens) // PAGE)
    cache = ContinuousBatchingConfig(page_size=PAGE, num_blocks=len(ids) * pages, max_batch_tokens=BATCH_TOKENS)

    def write() -> list[int]:
        answers = model.generate_batch(ids, generation_config=config, continuous_batching_config=cache)
        return [len(answer.generated_tokens) for answer in answers.values()]

    return write


WRITERS = {"engine": write_with_engine, "generate": write_with_generate, "generate_batch": write_with_batch}


def floors(model: PreTrainedModel, prompts: list[Prompt], lengths: list[int]) -> Result:
    """Seconds that the multiplications and the reading of memory take at the rates of this process."""
    block, target = torch.ones(2**26, dtype=torch.uint8), torch.empty(2**26, dtype=torch.uint8)
    bytes_per_second = 2 * 2**26 / cpu_seconds(lambda: target.copy_(block), 10)
    cost, head = forward_cost(model), head_cost(model)
    work = tokens_and_pairs([len(prompt.token_ids) for prompt in prompts], lengths)
    numbers = cost.per_token // 2 * max(lengths) + cached_numbers(model) * work["pairs"]
    return {
        "flop_floor": forward_flops(cost.per_token, head, cost.per_pair, work) / product_rate(model.dtype),
        "byte_floor": numbers * model.dtype.itemsize / bytes_per_second,
    }


@torch.no_grad()
def work(job: Job) -> Result:
    """One measurement, in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    case = case_of(job)
    model = make_model(case.model, case.words).to(DTYPES[job["dtype"]]).eval()
    model.generation_config.eos_token_id = None
    prompts, write = make_prompts(case.shape), WRITERS[job["writer"]]
    write(model, prompts[:1], case._replace(rows=case.shape.group, new_tokens=2))()
    start, run = time.process_time(), write(model, prompts, case)
    lengths = run()
    result = {"seconds": time.process_time() - start, "tokens": sum(lengths)}
    return result | floors(model, prompts, lengths) if job["writer"] == "engine" else result


def jobs(quick: bool) -> list[Job]:
    small = {"rows": 8, "new_tokens": 4} if quick else {}
    found = [{"case": case, "dtype": dtype, "writer": w} for case in CASES for dtype in DTYPES for w in WRITERS]
    return [job | small | ({"limit": BATCH_LIMIT} if job["writer"] == "generate_batch" else {}) for job in found]


def rows(results: Results) -> Iterator[tuple[str, ...]]:
    for case in CASES:
        for dtype in DTYPES:
            own = {writer: speeds(results, case, dtype, writer) for writer in WRITERS}
            engine = results.of(case=case, dtype=dtype, writer="engine")
            shares = [[one[floor] / one["seconds"] for one in engine] for floor in ("flop_floor", "byte_floor")]
            failed = results.failure(case=case, dtype=dtype, writer="generate_batch")
            yield (
                f"{case}, {dtype}",
                *(cell(own[writer], 0) for writer in ("engine", "generate")),
                cell(ratios(own["engine"], own["generate"])),
                failed or cell(own["generate_batch"], 0),
                *map(cell, shares),
            )


def speeds(results: Results, case: str, dtype: str, writer: str) -> list[float]:
    return [one["tokens"] / one["seconds"] for one in results.of(case=case, dtype=dtype, writer=writer)]


def report(results: Results) -> str:
    columns = ("tokens a CPU s", "engine", "`generate`", "ratio", "`generate_batch`", "of the FLOP floor")
    return markdown((*columns, "of the byte floor"), rows(results))


BENCHMARK = Benchmark("decode", jobs, report)

if __name__ == "__main__":
    main(BENCHMARK, __doc__, work)
