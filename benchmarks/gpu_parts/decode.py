"""Times the generation of rollouts: our transformers engine, transformers' own generate, and vLLM.

The floor reads the weights once a step and every row's keys and values once. The engines give log-probs and the top 20
of every token, `generate` gives tokens alone. Ours replays CUDA graphs, but with `enforce_eager`.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import NamedTuple

import torch
from gpu_parts.machine import Machine
from gpu_parts.models import device_model, make_engine, make_requests
from gpu_parts.results import NotInstalled, Result, Row
from transformers import PreTrainedModel

from jackpot.config.engines import VLLMEngineConfig
from jackpot.core.errors import EngineError
from jackpot.core.types import Version
from jackpot.launch import engines
from jackpot.models.cost import cached_numbers
from jackpot.rollout.engines.base import Engine

NAME = "Qwen3 0.6B"


class Case(NamedTuple):
    rows: int
    prompt: int  # tokens
    new: int  # tokens of each response


CASES = (Case(32, 256, 256), Case(256, 256, 256))
TINY = Case(8, 9, 6)


def rows(machine: Machine) -> list[Row]:
    found = []
    for case in CASES[:1] if machine.tiny else CASES:
        title = f"{case.rows} rows of {case.prompt} + {case.new} tokens"
        case = TINY if machine.tiny else case
        for name, measure in WRITERS.items():
            found.append(Row(f"{name}, {title}", partial(measure, machine, case)))
    return found


def ours(machine: Machine, case: Case, enforce_eager: bool = False) -> Result:
    model = device_model(NAME, machine, torch.bfloat16)
    engine = make_engine(model, case.rows, dtype="bf16", enforce_eager=enforce_eager)
    result = of_engine(machine, case, model, engine)
    return result | {"CUDA graphs": bool(events := engine.take_events()) and events[-1]["cuda_graphs"]}


def of_engine(machine: Machine, case: Case, model: PreTrainedModel, engine: Engine) -> Result:
    calls = count()

    def run() -> None:
        requests = make_requests(case.rows, case.new, case.prompt, model.config.vocab_size, f"{next(calls)}/")
        tokens = sum(len(rollout.token_ids) for rollout in engine.generate(requests))
        if tokens != case.rows * case.new:
            raise RuntimeError(f"{tokens} tokens came back in place of {case.rows * case.new}")

    return measured(machine, case, model, run)


def measured(machine: Machine, case: Case, model: PreTrainedModel, run: Callable[[], None]) -> Result:
    seconds = machine.seconds(run, 2)
    keys = case.rows * (case.prompt + case.new / 2) * cached_numbers(model)
    moved = 2.0 * (sum(parameter.numel() for parameter in model.parameters()) + keys)  # bf16, in a step
    rate = machine.data_sheet.bandwidth if machine.data_sheet else machine.copy_rate()
    step = seconds / case.new
    result = {"tokens/s": case.rows / step, "ms a step": 1e3 * step, "of the floor": moved / rate / step}
    return result | {"extra GB": machine.extra_gb(run)} | machine.profile(run, case.new)


@torch.no_grad()
def generate(machine: Machine, case: Case) -> Result:
    model = device_model(NAME, machine, torch.bfloat16)
    ids = torch.randint(2, model.config.vocab_size, (case.rows, case.prompt), device=machine.device)
    options = {"do_sample": True, "top_k": 0, "top_p": 1.0, "max_new_tokens": case.new, "min_new_tokens": case.new}
    run = lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **options)  # noqa: E731
    return measured(machine, case, model, run)


def vllm(machine: Machine, case: Case) -> Result:
    model = device_model(NAME, machine, torch.bfloat16)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        settings = VLLMEngineConfig(max_num_seqs=case.rows, dtype="bf16", max_model_len=case.prompt + case.new)
        try:
            engine = engines.make_engine(settings, folder, machine.device, Version(0, 0))
        except EngineError as error:
            if isinstance(error.__cause__, ImportError):
                raise NotInstalled("vLLM is not installed") from error
            raise
    try:
        return of_engine(machine, case, model, engine)
    finally:
        engine.close()


WRITERS = {
    "transformers engine": ours,
    "transformers engine, enforce_eager": partial(ours, enforce_eager=True),
    "generate": generate,
    "vLLM engine": vllm,
}
