"""Times the FP8 flow (docs/precision.md) beside BF16 on Qwen3 8B's shapes: products, decoding, training steps, both.

"faster" is BF16's time over FP8's, which includes quantizing the left factor. Models have 4 layers. "norm and
quantizing" is timed as it is, both compiled apart, and both as one kernel; there "faster" is of apart over as one, and
"bits" says whether the codes are those of the first way.
"""

from collections.abc import Callable
from functools import partial

import torch
from gpu_parts.decode import Case
from gpu_parts.machine import Machine
from gpu_parts.models import (
    NUM_TOP,
    TINY_VOCABULARY,
    VOCABULARY,
    learner_of,
    make_engine,
    make_requests,
    random_samples,
)
from gpu_parts.results import Result, Row
from gpu_parts.step import one_update
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from jackpot.config.arms import build_config
from jackpot.models.quantization.product import gemm_exact, product, product_name
from jackpot.models.quantization.quantizer import FP8_BLOCKS, FP8_TOKEN_BLOCKS, SCHEMES, quantize
from jackpot.models.quantization.training import train_in_codes
from jackpot.training.batching import micro_batches

LAYERS, PAYS, CHECKED = 4, 1.05, 32
WEIGHTS = {"q and o": (4096, 4096), "k and v": (1024, 4096), "gate and up": (12_288, 4096), "down": (4096, 12_288)}
TOKENS = (64, 4096, 16_384)
ROLLOUTS, TINY = Case(64, 256, 256), Case(8, 9, 6)


def rows(machine: Machine) -> list[Row]:
    weights = dict(list(WEIGHTS.items())[:2]) if machine.tiny else WEIGHTS
    counts = TOKENS[:1] if machine.tiny else TOKENS
    found = [
        Row(f"product of {tokens:,} tokens, {name}", partial(multiply, machine, tokens, shape))
        for name, shape in weights.items()
        for tokens in counts
    ]
    found += [
        Row(f"norm and quantizing, {tokens:,} tokens", partial(norm_and_codes, machine, tokens)) for tokens in counts
    ]
    found.append(Row("rollouts", partial(compared, machine, generation)))
    found += [
        Row(f"training, backward {mode}", partial(compared, machine, partial(training, mode)))
        for mode in ("dequantized", "fp8")
    ]
    return [*found, Row("rollouts and training", partial(compared, machine, whole))]


def multiply(machine: Machine, tokens: int, shape: tuple[int, int]) -> Result:
    out, size = (side // 16 for side in shape) if machine.tiny else shape
    inputs, weight = (torch.randn(rows, size, device=machine.device).bfloat16() for rows in (tokens, out))
    held = quantize(weight, FP8_BLOCKS)
    codes = quantize(inputs, FP8_TOKEN_BLOCKS)
    plain = machine.seconds(lambda: inputs @ weight.T, 20)
    coded = machine.seconds(lambda: product(quantize(inputs, FP8_TOKEN_BLOCKS), held), 20)
    alone = machine.seconds(lambda: quantize(inputs, FP8_TOKEN_BLOCKS), 20)
    few = quantize(inputs[:CHECKED], FP8_TOKEN_BLOCKS)
    exact = gemm_exact(few, held)
    error = float((product(codes, held)[:CHECKED] - exact).norm() / exact.norm())
    name = product_name(machine.device)
    return _ratio(plain, coded) | {"quantizing": alone / coded, "off by": error, "product": name}


def norm_and_codes(machine: Machine, tokens: int) -> Result:
    """Time RMSNorm and the quantization of what it returns: as training runs them, compiled, and compiled as one."""
    size = 256 if machine.tiny else WEIGHTS["q and o"][1]
    norm = Qwen3RMSNorm(size).to(machine.device, torch.bfloat16)
    inputs = torch.randn(tokens, size, device=machine.device).bfloat16()

    def codes(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return quantize(states, FP8_TOKEN_BLOCKS)[:2]

    compiled_norm, compiled_codes = torch.compile(norm), torch.compile(codes)
    ways = {
        "as it is": lambda: codes(norm(inputs)),
        "apart": lambda: compiled_codes(compiled_norm(inputs)),
        "as one": torch.compile(lambda: codes(norm(inputs))),
    }
    with torch.no_grad():
        found = {name: run() for name, run in ways.items()}  # compiles
        seconds = {name: machine.seconds(run, 20) for name, run in ways.items()}
    wanted, faster = found["as it is"][0].view(torch.uint8), seconds["apart"] / seconds["as one"]
    bits = all(torch.equal(one[0].view(torch.uint8), wanted) for one in found.values())
    times = {f"{name} ms": 1e3 * one for name, one in seconds.items()}
    return times | {"faster": faster, "pays": faster >= PAYS, "bits": bits}


def compared(machine: Machine, prepare: Callable[[Machine, bool], Callable[[], None]]) -> Result:
    """Time the same work in BF16 and in FP8, one model in memory at a time."""
    seconds = []
    for is_coded in (False, True):
        run = prepare(machine, is_coded)
        seconds.append(machine.seconds(run, 2))
        del run
        machine.forget()
    return _ratio(*seconds)


def _ratio(plain: float, coded: float) -> Result:
    return {"BF16 ms": 1e3 * plain, "FP8 ms": 1e3 * coded, "faster": plain / coded, "pays": plain / coded >= PAYS}


def model_of(machine: Machine, dtype: torch.dtype) -> PreTrainedModel:
    tiny = machine.tiny
    config = Qwen3Config(
        vocab_size=TINY_VOCABULARY if tiny else VOCABULARY,
        hidden_size=64 if tiny else 4096,
        intermediate_size=96 if tiny else 12_288,
        num_hidden_layers=1 if tiny else LAYERS,
        num_attention_heads=4 if tiny else 32,
        num_key_value_heads=2 if tiny else 8,
        head_dim=16 if tiny else 128,
        max_position_embeddings=32_768,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with torch.device(machine.device):
        model = Qwen3ForCausalLM(config).eval()
    for weight in model.parameters():  # not rotary frequencies
        weight.data = weight.data.to(dtype)
    return model


def generation(machine: Machine, is_coded: bool) -> Callable[[], None]:
    case = TINY if machine.tiny else ROLLOUTS
    model = model_of(machine, torch.bfloat16)
    engine = make_engine(model, case.rows, dtype="bf16", quantization="fp8" if is_coded else None)
    calls = iter(range(1_000_000))

    def run() -> None:
        vocabulary = model.config.vocab_size
        engine.generate(make_requests(case.rows, case.new, case.prompt, vocabulary, f"{next(calls)}/"))

    return run


def training(mode: str, machine: Machine, is_coded: bool) -> Callable[[], None]:
    coded = {"precision": "fp8", "fp8_backward": mode, "engine": {"dtype": "bf16", "quantization": "fp8"}}
    settings = {
        "iterations": 1,
        "policy": {"path": "policy", "optimizer": {"learning_rate": 1e-6}},
        "rollout_model": None,
        "objective": {"correction": "none"},
        "sampling": {"max_new_tokens": 4096, "num_top_log_probs": NUM_TOP},
        "batch": {"prompts": 2, "group_size": 8},
    }
    config = build_config(settings | (coded if is_coded else {"precision": "bf16", "engine": {"dtype": "bf16"}}))
    model = model_of(machine, torch.float32)
    if is_coded:
        train_in_codes(model, SCHEMES["fp8"], mode, False, exact=not machine.has_gpu, dtype=torch.bfloat16)
    shape = {"prompts": 2, "group": 4, "prompt_length": 9, "longest": 24, "shortest": 5}
    if not machine.tiny:
        shape = {"prompts": 2, "group": 8, "prompt_length": 256, "longest": 1024, "shortest": 512}
    samples = random_samples(model.config.vocab_size, **shape)
    learner, batches = learner_of(config, [model]), micro_batches(samples, 20_000, seed=0, epoch=0)

    def run() -> None:
        one_update(learner, batches)

    return run


def whole(machine: Machine, is_coded: bool) -> Callable[[], None]:
    parts = generation(machine, is_coded), training("fp8", machine, is_coded)

    def run() -> None:
        for part in parts:
            part()

    return run
