"""Times attention in training, forward and backward: one layer's by different kernels, and whole backbones.

The layer has Qwen3's heads in bf16: 8 responses of 4,096 tokens behind 256 of prompt. "of a product" counts the pairs
of a query and a key that it must see. The backbone is that of Qwen3 1.7B on responses of 512 to 4,096 tokens, 8 to a
prompt: "as trained" is what a run does, a row without padding; the others read the same tokens in other ways. A row of
a backbone fails where another kernel attends than the one that serves there.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from gpu_parts.machine import Machine
from gpu_parts.models import device_model, random_samples
from gpu_parts.results import NotInstalled, Result, Row
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from jackpot.core.types import TokenBatch
from jackpot.models import packed_attention
from jackpot.models.forward import backbone, position_ids, response_hidden
from jackpot.training.batching import batch_to, collate

NAME = "Qwen3 1.7B"
ROWS, HEADS, KEY_HEADS, SIZE, PROMPT, RESPONSE = 8, 16, 8, 128, 256, 4096
TINY = (2, 4, 2, 16, 8, 32)
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Reader(NamedTuple):
    """A way to read a batch, and what attends to a packed row on a GPU; None: nothing, for there is none."""

    read: Callable[[PreTrainedModel, TokenBatch], Tensor]
    in_bf16: str | None = None  # under autocast
    in_fp32: str | None = None


def by_flex(network: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """Read the packed row with flex attention, where flash attention would serve too; on a CPU in blocks."""
    with patch.object(packed_attention, "_suits_flash", return_value=False):
        return response_hidden(network, batch)


def in_blocks(network: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """Read the packed row with attention in padded blocks."""
    with patch.object(packed_attention, "_flex_kernel", return_value=None):
        return by_flex(network, batch)


def padded(network: PreTrainedModel, batch: TokenBatch) -> Tensor:
    return response_hidden(network, replace(batch, packed=None))


READERS = {
    "as trained": Reader(response_hidden, "flash", "flex"),
    "packed row, flex attention": Reader(by_flex, "flex", "flex"),
    "packed row, attention in blocks": Reader(in_blocks, "blocks", "blocks"),
    "padded rows, every prompt once": Reader(padded),
}
PLACES = {  # where each kernel is called
    "flash": (packed_attention, "_by_sequence"),
    "flex": (packed_attention.AttentionPlan, "block_mask"),
    "blocks": (packed_attention, "_by_block"),
}


@contextmanager
def attending(reader: Reader, is_bf16: bool, device: torch.device) -> Iterator[None]:
    """Let a reader read in the body, and raise RuntimeError where another kernel attended than its own; on a CPU
    packed rows are attended to in blocks."""
    wanted, ran = reader.in_bf16 if is_bf16 else reader.in_fp32, set()
    if wanted and device.type == "cpu":
        wanted = "blocks"

    def noting(kernel: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            ran.add(kernel)
            return run(*arguments, **options)

        return noted

    with ExitStack() as patches:
        for kernel, (owner, name) in PLACES.items():
            patches.enter_context(patch.object(owner, name, noting(kernel, getattr(owner, name))))
        yield
    if ran != {wanted} - {None}:
        raise RuntimeError(f"{' and '.join(sorted(ran)) or 'no kernel'} attended to packed rows in place of {wanted}")


def rows(machine: Machine) -> list[Row]:
    layers = {
        "4-d mask, keys repeated": masked,
        "4-d mask, grouped heads": partial(masked, repeats=False),
        "causal_lower_right, grouped heads": lower_right,
        "flex, grouped heads": flex,
        "varlen flash": varlen,
    }
    backbones = READERS | {
        "padded rows, prompts repeated": Reader(partial(padded_whole, "sdpa")),
        "padded rows, prompts repeated, flex": Reader(partial(padded_whole, "flex_attention")),
    }
    if not machine.has_gpu:  # compiling takes many seconds
        del layers["flex, grouped heads"], backbones["padded rows, prompts repeated, flex"]
        del backbones["packed row, flex attention"]
    found = [Row(f"one layer: {name}", partial(layer, machine, run)) for name, run in layers.items()]
    return found + [Row(f"backbone: {name}", partial(model, machine, run)) for name, run in backbones.items()]


def layer(machine: Machine, attend: Attention) -> Result:
    count, heads, key_heads, size, prompt, response = (
        TINY if machine.tiny else (ROWS, HEADS, KEY_HEADS, SIZE, PROMPT, RESPONSE)
    )
    places = {"device": machine.device, "dtype": torch.bfloat16, "requires_grad": True}
    query = torch.randn(count, heads, response, size, **places)
    key, value = (torch.randn(count, key_heads, prompt + response, size, **places) for _ in range(2))

    def run() -> None:
        attend(query, key, value).sum().backward()
        query.grad = key.grad = value.grad = None

    seconds = machine.seconds(run)
    pairs = count * (response * prompt + response * (response + 1) / 2)
    flops = 3.5 * 4 * pairs * heads * size  # backward forms the scores once more
    return {"ms": 1e3 * seconds} | machine.shares(flops, seconds) | {"extra GB": machine.extra_gb(run)}


def _visible(query: Tensor, key: Tensor) -> Tensor:
    """Return which keys each query sees, [1, 1, T, S] bool: aligned at the last ones."""
    length, total = query.shape[2], key.shape[2]
    return torch.ones(length, total, dtype=torch.bool, device=query.device).tril(total - length)[None, None]


def masked(query: Tensor, key: Tensor, value: Tensor, repeats: bool = True) -> Tensor:
    mask = _visible(query, key).expand(len(query), 1, -1, -1).contiguous()
    if repeats:
        groups = query.shape[1] // key.shape[1]
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=not repeats)


def lower_right(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    mask = causal_lower_right(query.shape[2], key.shape[2])
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)


def flex(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    shift = key.shape[2] - query.shape[2]
    sees = lambda row, head, place, other: other <= place + shift  # noqa: E731
    mask = create_block_mask(sees, None, None, query.shape[2], key.shape[2], device=query.device)
    return _compiled_flex()(query, key, value, block_mask=mask, enable_gqa=True)


def varlen(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention over sequences one after the other; keys repeated where this torch has no grouped heads for it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise NotInstalled(f"torch {torch.__version__} has no varlen_attn") from error
    if not query.is_cuda:
        raise NotInstalled("varlen_attn runs on a GPU alone")
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    packed = [states.transpose(1, 2).flatten(0, 1) for states in (query, key, value)]
    lengths = [states.shape[2] for states in (query, key)]
    ends = [torch.arange(len(query) + 1, device=query.device, dtype=torch.int32) * length for length in lengths]
    is_older = "is_causal" in inspect.signature(varlen_attn).parameters
    return varlen_attn(*packed, *ends, *lengths, **({"is_causal": True} if is_older else {"window_size": (-1, 0)}))


def model(machine: Machine, reader: Reader) -> Result:
    network = device_model(NAME, machine)
    shape = {"prompts": 2, "group": 4, "prompt_length": 9, "longest": 24, "shortest": 5}
    if not machine.tiny:
        shape = {"prompts": 1, "group": 8, "prompt_length": 256, "longest": 4096, "shortest": 512}
    samples = random_samples(network.config.vocab_size, **shape)
    batch = batch_to(collate(samples, seed=0, epoch=0), machine.device)

    def run() -> None:
        with torch.autocast(machine.device.type, torch.bfloat16, enabled=machine.has_gpu):
            reader.read(network, batch).float().sum().backward()
        network.zero_grad()

    with attending(reader, machine.has_gpu, machine.device):
        run()
    seconds = machine.seconds(run)
    tokens = sum(len(sample.rollout.token_ids) for sample in samples)
    result = {"ms": 1e3 * seconds, "tokens/s": tokens / seconds, "extra GB": machine.extra_gb(run)}
    return result | machine.profile(run)


def padded_whole(implementation: str, network: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """Read every response behind its own copy of the prompt, as transformers does it by itself."""
    network.set_attn_implementation(implementation)
    mask = torch.cat([batch.prompt_mask[batch.prompt_index], batch.attention_mask], dim=1).bool()
    ids = torch.cat([batch.prompt_ids[batch.prompt_index], batch.response_ids], dim=1)

    reads = {"input_ids": torch.where(mask, ids, 0), "attention_mask": mask, "position_ids": position_ids(mask)}
    states = backbone(network)(**reads, use_cache=False).last_hidden_state
    return states[:, batch.prompt_ids.shape[1] - 1 : -1]
