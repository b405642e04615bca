"""How far apart two precisions of the same weights are, and that one precision on the same kernels is not apart at all.

Every row compares a sampler with a learner: the same weights and tokens, another dtype, scheme, attention or product.
Tokens are drawn from the model in bfloat16. What a row says of each model:

    max dp, mean dp   |p_sampler - p_learner| of the drawn tokens
    KL                KL(sampler || learner) over the whole vocabulary, nats per token
    equal             whether all logits are equal bit for bit

A side reads whole sequences at once, or token by token with a cache. In the rows that must be 0 the sampler reads
batches of 16 and the learner batches of 16, 5 and 1. Nothing here uses a GPU.

    python -m research.parity            # the table of docs/precision.md
    python -m research.parity --quick    # the two starters, one text each
"""

import argparse
import copy
import platform
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PreTrainedModel,
)
from transformers.masking_utils import eager_mask

from jackpot.config.tasks import ArithmeticConfig
from jackpot.models.load import load_model, load_tokenizer
from jackpot.models.quantization.convert import quantize_linears
from jackpot.models.quantization.linear import QuantizedLinear
from jackpot.models.quantization.product import gemm_exact
from jackpot.models.quantization.quantizer import (
    E4M3,
    FP8_BLOCKS,
    LARGEST,
    SCHEMES,
    Grid,
    Quantized,
    ScaleFormat,
    Scheme,
    block_scales,
    dequantize,
    quantize,
)
from jackpot.rollout.engines.transformers.attention import eager_attention, set_attention, with_rounded_kv
from jackpot.rollout.engines.transformers.kv_cache import make_cache
from jackpot.rollout.tasks.registry import make_task


def with_scales(scheme: Scheme, scales: ScaleFormat) -> Scheme:
    """Return the scheme with scales of another format."""
    activations = scheme.activations and replace(scheme.activations, scales=scales)
    return Scheme(weights=replace(scheme.weights, scales=scales), activations=activations)


def round_by_token(states: Tensor) -> Tensor:
    """Round keys or values [..., D] to FP8 with a power of two as the scale of each token and head."""
    rows = states.reshape(-1, states.shape[-1])
    grid = Grid(codes=E4M3, rows=1, scales="power_of_two")
    return dequantize(quantize(rows, grid), states.dtype).reshape(states.shape)


PROMPT, RESPONSE, ROWS = 16, 48, 16  # the starters' prompts are as long as most problems
BATCHES = (16, 5, 1)  # of the learner, where a row must be 0
SEEDS = (0, 1, 2)

FP8 = SCHEMES["fp8"]
FP8_FLOAT = with_scales(FP8, "float32")
WEIGHTS_ONLY = Scheme(weights=FP8_BLOCKS, activations=None)
BY_TOKEN = "parity_by_token"
AttentionInterface.register(BY_TOKEN, with_rounded_kv(eager_attention, round_by_token))
AttentionMaskInterface.register(BY_TOKEN, eager_mask)


class Text(NamedTuple):
    """What both sides read."""

    ids: Tensor  # [ROWS, prompt + RESPONSE] int64
    prompt: int  # tokens
    exists: Tensor  # [ROWS, RESPONSE] bool: up to the end of a response


class Side(NamedTuple):
    """How one side computes."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    scheme: Scheme | None = None
    layer: Callable[..., Tensor] | None = None  # in the place of QuantizedLinear's forward
    attention: str = "eager"  # sdpa, eager or BY_TOKEN
    fp8_cache: bool = False
    decodes: bool = False  # token by token with a cache


class Row(NamedTuple):
    name: str
    learner: Side
    sampler: Side
    is_zero: bool | None = False  # must be 0, whatever the batch; None: as it comes; otherwise it must not


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    max_dp: float
    mean_dp: float
    kl: float
    equal: bool


def other_product(layer: QuantizedLinear, inputs: Tensor) -> Tensor:
    """FP8 on both sides, multiplied out and added in float32 by BLAS."""
    rows = quantize(inputs.reshape(-1, layer.in_features), layer.scheme.activations)
    outputs = dequantize(rows, torch.float32) @ dequantize(layer.quantized, torch.float32).T
    return outputs.to(inputs.dtype).reshape(*inputs.shape[:-1], layer.out_features)


def other_formula(layer: QuantizedLinear, inputs: Tensor) -> Tensor:
    """Activations by x * (448 / max) in place of x / (max / 448), then as always."""
    grid = layer.scheme.activations
    values = inputs.reshape(-1, layer.in_features).float()
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % grid.columns))
    blocks = padded.reshape(len(values), -1, grid.columns)
    largest = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-10)
    most = LARGEST[grid.codes]
    codes = (blocks * (most / largest)).clamp(-most, most).to(grid.codes).reshape(padded.shape)
    rows = Quantized(codes[:, : values.shape[1]], block_scales(largest[..., 0], grid), grid)
    return gemm_exact(rows, layer.quantized).to(inputs.dtype).reshape(*inputs.shape[:-1], layer.out_features)


def rows() -> list[Row]:
    bf16, fp8 = Side("BF16"), Side("FP8", scheme=FP8)
    fp8_float = Side("FP8, float32 scales", scheme=FP8_FLOAT)
    cached = Side("FP8 and FP8 cache", scheme=FP8, fp8_cache=True)
    stepwise = {"attention": "sdpa", "decodes": True}
    int8, int8_weights = (Side(name, scheme=SCHEMES[name]) for name in ("int8_w8a8", "int8_w8a16"))
    return [
        Row("c0", bf16, bf16, is_zero=True),
        Row("c1", bf16, Side("BF16, sdpa, token by token", **stepwise)),
        Row("c2", Side("FP32", dtype=torch.float32), bf16),
        Row("a1", bf16, fp8_float),
        Row("a2", bf16, fp8),
        Row("b0", fp8_float, fp8_float, is_zero=True),
        Row("b1", fp8, fp8, is_zero=True),
        Row("b2", fp8, Side("FP8, sdpa, token by token", scheme=FP8, **stepwise)),
        Row("b3", fp8_float, Side("FP8, float32 product", scheme=FP8_FLOAT, layer=other_product)),
        Row("b4", fp8_float, Side("FP8, x * (448 / max)", scheme=FP8_FLOAT, layer=other_formula)),
        Row("b5", fp8_float, fp8),
        Row("w1", bf16, Side("FP8, weights only", scheme=WEIGHTS_ONLY)),
        Row("d1", bf16, int8_weights),
        Row("d2", bf16, int8),
        Row("e1", bf16, Side("FP8 cache, a scale a token and head", attention=BY_TOKEN)),
        Row("e2", bf16, Side("FP8 cache, scale 1", fp8_cache=True)),
        Row("f1", bf16, cached),
        Row("f2", fp8, cached),
        Row("f3", cached, cached, is_zero=True),
        Row("g1", bf16, Side("BF16, token by token", decodes=True), is_zero=None),
        Row("g2", fp8, Side("FP8, token by token", scheme=FP8, decodes=True), is_zero=None),
    ]


def made(model: PreTrainedModel, side: Side) -> PreTrainedModel:
    """A copy of a float32 model that computes as the side says."""
    twin = copy.deepcopy(model).to(side.dtype).eval()
    if side.attention == BY_TOKEN:
        twin.set_attn_implementation(BY_TOKEN)
    else:
        set_attention(twin, side.attention, fp8_cache=side.fp8_cache)
    if side.scheme is not None:
        quantize_linears(twin, side.scheme)
    for layer in twin.modules():
        if side.layer is not None and isinstance(layer, QuantizedLinear):
            layer.forward = side.layer.__get__(layer)
    return twin


@torch.no_grad()
def logits(model: PreTrainedModel, side: Side, text: Text, batch: int) -> Tensor:
    """Of the tokens of the response: [ROWS, RESPONSE, V] float32."""
    read = _decoded if side.decodes else _at_once
    return torch.cat([read(model, some, text.prompt) for some in text.ids.split(batch)])


def _at_once(model: PreTrainedModel, ids: Tensor, prompt: int) -> Tensor:
    return model(ids, use_cache=False).logits[:, prompt - 1 : -1].float()


def _decoded(model: PreTrainedModel, ids: Tensor, prompt: int) -> Tensor:
    cache = make_cache(model.config, ids.shape[1])
    first = model(ids[:, :prompt], past_key_values=cache, use_cache=True).logits[:, -1:]
    cache.reorder_cache(torch.arange(len(ids)))  # gives every row its place, as a batch of the engine does
    steps = [
        model(ids[:, place : place + 1], past_key_values=cache, use_cache=True).logits
        for place in range(prompt, ids.shape[1] - 1)
    ]
    return torch.cat([first, *steps], dim=1).float()


@torch.no_grad()
def drawn(model: PreTrainedModel, prompts: Tensor, seed: int, eos: int | None) -> Text:
    """Prompts [ROWS, tokens] with responses sampled from the model in bfloat16."""
    twin, generator = made(model, Side("BF16")), torch.Generator().manual_seed(seed)
    ids = prompts
    for _ in range(RESPONSE):
        probs = twin(ids, use_cache=False).logits[:, -1].float().softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probs, 1, generator=generator)], dim=1)
    ends = (ids[:, prompts.shape[1] :] == (-1 if eos is None else eos)).long()
    return Text(ids, prompts.shape[1], exists=ends.cumsum(1) - ends == 0)


def compared(sampler: Tensor, learner: Tensor, text: Text) -> Found:
    """Of logits [ROWS, RESPONSE, V]."""
    ours, theirs = (some.double().log_softmax(-1)[text.exists] for some in (sampler, learner))
    tokens = text.ids[:, text.prompt :][text.exists][:, None]
    gaps = (ours.gather(-1, tokens).exp() - theirs.gather(-1, tokens).exp()).abs()
    kl = (ours.exp() * (ours - theirs)).sum(-1).mean()
    return Found(
        max_dp=float(gaps.max()), mean_dp=float(gaps.mean()), kl=float(kl), equal=torch.equal(sampler, learner)
    )


def measure(row: Row, model: PreTrainedModel, text: Text) -> Found:
    """The worst over the learner's batch sizes, which are several only where the row must be 0."""
    sampler = logits(made(model, row.sampler), row.sampler, text, BATCHES[0])
    learner = made(model, row.learner)
    found = [
        compared(sampler, logits(learner, row.learner, text, batch), text)
        for batch in (BATCHES if row.is_zero else BATCHES[:1])
    ]
    return Found(
        max_dp=max(one.max_dp for one in found),
        mean_dp=max(one.mean_dp for one in found),
        kl=max(one.kl for one in found),
        equal=all(one.equal for one in found),
    )


def is_as_claimed(row: Row, found: Found) -> bool:
    """Zero rows bit for bit, the others with another distribution."""
    if row.is_zero is None:
        return True
    return found.equal if row.is_zero else not found.equal and found.max_dp > 0.0 and found.kl > 0.0


def library_bytes() -> Tensor:
    """Python's own library, a text that everybody has: [bytes] int64."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8).long()


def trained(family: str, seed: int, text: Tensor, steps: int = 150, **sizes: Any) -> PreTrainedModel:
    """A small byte-level model after a moment of training, so that its distributions are not those of noise.

    `sizes` are settings of its config other than these.
    """
    torch.manual_seed(seed)
    shape = {
        "vocab_size": 256,
        "hidden_size": 192,
        "intermediate_size": 448,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 48,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    }
    made = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**shape | sizes), dtype=torch.float32)
    optimizer = torch.optim.AdamW(made.parameters(), lr=3e-3)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * (1.0 - 0.9 * step / steps)
        starts = torch.randint(len(text) - 97, (16,))
        ids = torch.stack([text[start : start + 97] for start in starts.tolist()])
        loss = torch.nn.functional.cross_entropy(made(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{family} {seed}: loss {loss.item():.2f} nats a byte", flush=True)
    return made.eval()


def problems() -> Tensor:
    """Prompts of the starters' task, of the length that most have: [ROWS, tokens]."""
    task = make_task(ArithmeticConfig(), load_tokenizer("starter:policy"))
    prompts = [task.prompt("test", number).token_ids for number in range(500)]
    length = Counter(map(len, prompts)).most_common(1)[0][0]
    return torch.tensor([prompt for prompt in prompts if len(prompt) == length][:ROWS])


def models(quick: bool) -> Iterator[tuple[str, PreTrainedModel, Text]]:
    """Name, model in float32, and what is read."""
    for name in ("starter:policy", "starter:rollout_model"):
        model = load_model(name, torch.float32)
        for seed in SEEDS[: 1 if quick else None]:
            yield f"{name}, text {seed}", model, drawn(model, problems(), seed, model.config.eos_token_id)
    if quick:
        return
    text = library_bytes()
    for family in ("qwen3", "llama"):
        for seed in SEEDS:
            starts = torch.randint(len(text) - PROMPT, (ROWS,), generator=torch.Generator().manual_seed(seed))
            prompts = torch.stack([text[start : start + PROMPT] for start in starts.tolist()])
            model = trained(family, seed, text)
            yield f"{family} {seed}", model, drawn(model, prompts, seed, None)


def spread(values: Sequence[float]) -> str:
    """Mean over the models, with the least and the most of one."""
    if max(values) == 0.0:
        return "0"
    return f"{mean(values):.1e} [{min(values):.1e}, {max(values):.1e}]"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--quick", action="store_true", help="the two starters alone")
    quick = arguments.parse_args().quick
    torch.set_num_threads(1)
    began = time.process_time()
    found: dict[str, list[Found]] = {row.name: [] for row in rows()}
    for name, model, text in models(quick):
        for row in rows():
            found[row.name].append(measure(row, model, text))
        print(f"{name}: {time.process_time() - began:.0f} CPU s", flush=True)
    print(f"\ntorch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}, 1 thread")
    print(f"{len(found['c0'])} models and texts, {ROWS} responses of up to {RESPONSE} tokens each\n")
    print("| row | learner | sampler | max dp | mean dp | KL | equal |\n|---|---|---|---|---|---|---|")
    for row in rows():
        each = found[row.name]
        equal = f"{sum(one.equal for one in each)} of {len(each)}"
        numbers = (spread([getattr(one, name) for one in each]) for name in ("max_dp", "mean_dp", "kl"))
        print(f"| {row.name} | {row.learner.name} | {row.sampler.name} | {' | '.join(numbers)} | {equal} |")
    wrong = [row.name for row in rows() if not all(is_as_claimed(row, one) for one in found[row.name])]
    print("\nevery zero is zero and every control is not" if not wrong else f"\nNOT AS CLAIMED: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
