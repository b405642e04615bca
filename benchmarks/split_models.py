"""Computes a model's distributions with several processes at once, in the ways that learners and samplers are split.

All ranks of torch.distributed take part, run the same calls and get the same result, on CPUs. The splits:

    tensor   Every rank has a part of the heads and features of all linear layers, experts included, and partial sums
             are added over ranks. torch's `parallelize_module` carries out the plan that transformers has of the model.
    heads    Every rank has a part of the tokens; for attention it gets all tokens of a part of the heads (Ulysses,
             arXiv 2309.14509).
    keys     Every rank has a part of the tokens; attention to each part of the keys is computed apart and merged by its
             logsumexp (ring attention, and split keys in decoding).

Shapes: `B` sequences of `S` tokens, without padding; `V` vocabulary; `n` ranks.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel

from jackpot.analysis.mismatch.learner import LearnerScores
from jackpot.analysis.mismatch.measure import MismatchNumbers, mismatch_numbers
from jackpot.analysis.mismatch.tokens import SamplerScores, token_mismatch
from jackpot.core.errors import ModelError
from jackpot.models.forward import backbone, head_logits
from jackpot.models.packed_attention import AttentionSet
from jackpot.models.routing import recorded_experts

Split = Literal["tensor", "heads", "keys"]
Distributions = tuple[Tensor, Tensor | None]  # log-probs [B, S - 1, V] float64; experts [B, S - 1, layers, k] or None
_STYLES: dict[str, Callable[[], Any]] = {  # transformers' name: torch's style
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": partial(ColwiseParallel, output_layouts=Replicate()),
}
_EXPERTS = "moe_tp_experts"  # transformers' name of a module whose experts are split by features
_MERGED = "jackpot_split_"  # and the name of a split: value of `config._attn_implementation`


def split_tensors(model: PreTrainedModel) -> None:
    """Give this rank its part of the model's heads and features, in place.

    Raises:
        ModelError: a model without a plan, or sizes that the ranks cannot share out.
    """
    ranks, config = dist.get_world_size(), model.config.get_text_config()
    if not (plan := model.tp_plan):
        raise ModelError(f"transformers has no plan that splits the tensors of {type(model).__name__}")
    sizes = {name: getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
    sizes |= {name: getattr(config, name, None) for name in ("intermediate_size", "moe_intermediate_size")}
    if odd := {name: size for name, size in sizes.items() if size and size % ranks}:
        raise ModelError(f"{ranks} ranks cannot share out {odd} evenly; take a number of ranks that divides them")
    torch_plan = {
        name: _STYLES[style]() for name, style in plan.items() if style in _STYLES and _is_linear(model, name)
    }
    parallelize_module(model, init_device_mesh("cpu", (ranks,)), torch_plan)
    for name, style in plan.items():
        if style == _EXPERTS:
            for module in _matching(model, name):
                _split_experts(module)


def _matching(model: nn.Module, pattern: str) -> list[nn.Module]:
    parts = pattern.split(".")
    named = ((name.split("."), module) for name, module in model.named_modules())
    return [
        module
        for name, module in named
        if len(name) == len(parts) and all(part in ("*", own) for part, own in zip(parts, name, strict=True))
    ]


def _is_linear(model: nn.Module, pattern: str) -> bool:
    found = _matching(model, pattern)
    return bool(found) and all(isinstance(module, nn.Linear) for module in found)


def _split_experts(module: nn.Module) -> None:
    """Keep this rank's part of the features of each expert; the outputs are added over ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    gate_up = [part.chunk(ranks, dim=1)[rank] for part in module.gate_up_proj.detach().chunk(2, dim=1)]
    module.gate_up_proj = nn.Parameter(torch.cat(gate_up, dim=1), requires_grad=False)
    down = module.down_proj.detach().chunk(ranks, dim=2)[rank].contiguous()
    module.down_proj = nn.Parameter(down, requires_grad=False)

    def add_up(_: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        dist.all_reduce(output)
        return output

    module.register_forward_hook(add_up)


@torch.no_grad()
def read(model: PreTrainedModel, ids: Tensor, split: Split | None) -> Distributions:
    """Compute the distributions that predict all tokens of `ids` [B, S] but the first, in one pass, as a learner does.

    Args:
        model: whole, but for the split `tensor` after `split_tensors`.
        split: None computes with this process alone.
    """
    inputs = ids[:, :-1]
    if split in ("heads", "keys"):
        length, width = inputs.shape[1], -(-inputs.shape[1] // dist.get_world_size())
        here = slice(dist.get_rank() * width, (dist.get_rank() + 1) * width)
        positions = torch.arange(width * dist.get_world_size())
        inputs = pad(inputs, (0, len(positions) - length))[:, here]  # padding stands last, where no token sees it
        with _attention(model, split):
            log_probs, experts = _pass(model, inputs, position_ids=positions[None, here])
        experts = None if experts is None else _all_ranks(experts, 1)[:, :length]
        return _all_ranks(log_probs, 1)[:, :length], experts
    return _pass(model, inputs)


@torch.no_grad()
def decode(model: PreTrainedModel, ids: Tensor, prompt: int, split: Literal["tensor", "keys"] | None) -> Distributions:
    """Compute the same token by token behind a prompt, with a cache, as a sampler does.

    Args:
        prompt: number of tokens that are read in one pass.
        split: as in `read`; a sampler reads one token at a time and has none to split.
    """
    cache = DynamicCache(config=model.config)
    parts = [ids[:, :prompt], *ids[:, prompt:-1].split(1, dim=1)]
    with _attention(model, "cache") if split == "keys" else nullcontext():
        found = [_pass(model, part, past_key_values=cache, use_cache=True) for part in parts]
    log_probs, experts = zip(*found, strict=True)
    return torch.cat(log_probs, dim=1), None if experts[0] is None else torch.cat(experts, dim=1)


def _pass(model: PreTrainedModel, ids: Tensor, **options: Any) -> Distributions:
    """Run the model over tokens [B, T]: log-probs [B, T, V] and experts [B, T, layers, k]."""
    with recorded_experts(model) as experts:
        hidden = backbone(model)(input_ids=ids, **{"use_cache": False} | options).last_hidden_state
        chosen = experts()
    log_probs = head_logits(model, hidden).double().log_softmax(-1)
    return log_probs, None if chosen is None else chosen.unflatten(0, ids.shape)


def _all_ranks(part: Tensor, dim: int) -> Tensor:
    """Join the parts of all ranks along a dimension."""
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts, dim)


def compare(
    sampler: Distributions, learner: Distributions, ids: Tensor, prompt: int, exists: Tensor
) -> MismatchNumbers:
    """Compare two sides on the responses behind the prompts of `ids` [B, S].

    Args:
        exists: [B, S - prompt] bool, False behind the end of a response.
    """
    responses, tokens = [], ids[:, prompt:]
    for row in range(len(ids)):
        (p, p_experts), (q, q_experts) = (
            (log_probs[row, prompt - 1 :], None if experts is None else experts[row, prompt - 1 :])
            for log_probs, experts in (sampler, learner)
        )
        own = tokens[row][:, None]
        every = torch.arange(p.shape[-1]).expand(p.shape)
        by = SamplerScores(
            uid=str(row),
            sampled=exists[row],
            log_probs=p.gather(1, own)[:, 0],
            top_ids=every,
            top_log_probs=p,
            vocabulary=p.shape[-1],
            truncated=False,
            experts=p_experts,
        )
        scores = LearnerScores(
            log_probs=q.gather(1, own)[:, 0], top_log_probs=q, most_probable=q.argmax(-1), experts=q_experts
        )
        responses.append((by.uid, token_mismatch(by, scores)))
    return mismatch_numbers(responses)


# Attention: query [B, heads, T, D], key and value [B, key heads, T or S, D] -> output [B, T, heads, D]


def _over_heads(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> Any:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = [_all_ranks(states, 2).chunk(ranks, dim=1)[rank] for states in (query, key, value)]
    output = scaled_dot_product_attention(*parts, is_causal=True, scale=options["scaling"], enable_gqa=True)
    return _all_ranks(output, 1).chunk(ranks, dim=2)[rank].transpose(1, 2), None


def _over_keys(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> Any:
    """Attend to the keys of each rank up to this one's, whose tokens come later than those."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    keys, values = (_all_ranks(states, 2).chunk(ranks, dim=2) for states in (key, value))
    parts = [
        _attend(query, keys[part], values[part], options["scaling"], is_causal=part == rank) for part in range(rank + 1)
    ]
    return _merged(*map(torch.stack, zip(*parts, strict=True))).transpose(1, 2), None


def _over_cache(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any) -> Any:
    """Attend to this rank's part of the cached keys; a prompt is read by each rank alone."""
    if query.shape[2] > 1:
        return _attend(query, key, value, options["scaling"], is_causal=True)[0].transpose(1, 2), None
    rank, ranks = dist.get_rank(), dist.get_world_size()
    key, value = (states.tensor_split(ranks, dim=2)[rank] for states in (key, value))
    output, logsumexp = _attend(query, key, value, options["scaling"], is_causal=False)
    return _merged(_all_ranks(output[None], 0), _all_ranks(logsumexp[None], 0)).transpose(1, 2), None


def _attend(query: Tensor, key: Tensor, value: Tensor, scaling: float, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Return the output [B, heads, T, D] and the logsumexp [B, heads, T] of torch's kernel for CPUs."""
    groups = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value, 0.0, is_causal, scale=scaling)


def _merged(outputs: Tensor, logsumexps: Tensor) -> Tensor:
    """Merge attention to parts of the keys, [parts, B, heads, T, D] and [parts, B, heads, T]."""
    shares = logsumexps.softmax(0)[..., None]
    return (shares * outputs.float()).sum(0).to(outputs.dtype)


def _attention(model: PreTrainedModel, name: str) -> AttentionSet:
    return AttentionSet(model.config.get_text_config(), _MERGED + name)


for _name, _function in (("heads", _over_heads), ("keys", _over_keys), ("cache", _over_cache)):
    AttentionInterface.register(_MERGED + _name, _function)
    AttentionMaskInterface.register(_MERGED + _name, lambda *args, **kwargs: None)
