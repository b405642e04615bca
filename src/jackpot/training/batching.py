"""Deal training samples out to mini-batches (one optimizer step each) and micro-batches (one forward pass each).

Nothing is dropped and nothing is cut: every sequence of the rollout batch is in exactly one micro-batch of each epoch.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from jackpot.core.errors import ConfigError
from jackpot.core.prng import fold_in, key_tensor, uniforms
from jackpot.core.types import PackedRow, Prompt, Rollout, Score, TokenBatch, TrainingSample, unique_rows
from jackpot.models.device import upload
from jackpot.models.forward import pad_tokens
from jackpot.models.packed_row import pack_row
from jackpot.models.packing import pack, rollout_lengths

_Batch = TypeVar("_Batch", TokenBatch, PackedRow)


def mini_batches(
    samples: Sequence[TrainingSample],
    *,
    mini_batch_size: int,
    epochs: int,
    micro_batch_tokens: int,
    seed: int,
    pads: bool = False,
) -> Iterator[list[TokenBatch]]:
    """Yield the mini-batch of every optimizer step over one rollout batch, epoch after epoch, as its micro-batches.

    With one step per epoch the order is the rollouts' own; with more, whole sequences are shuffled by `seed` and epoch,
    as PPO does. The uniforms of OBRS are hashed from (seed, rollout uid, position, epoch): no batching can change them.

    Args:
        mini_batch_size: sequences in one optimizer step; divides the number of rollouts.
        micro_batch_tokens: the most tokens in one micro-batch, the prompt of each response included.
        pads: as in `micro_batches`.
    """
    for epoch in range(epochs):
        order = list(samples)
        if mini_batch_size < len(order):
            random.Random(f"{seed}/{epoch}/{order[0].rollout.uid}").shuffle(order)
        for start in range(0, len(order), mini_batch_size):
            yield micro_batches(order[start : start + mini_batch_size], micro_batch_tokens, seed, epoch, pads)


def micro_batches(
    samples: Sequence[TrainingSample], budget: int, seed: int, epoch: int, pads: bool = False
) -> list[TokenBatch]:
    """Cut one mini-batch into micro-batches of at most `budget` tokens, prompts included with each response.

    Sequences are ordered prompt by prompt, then by length, so that the responses of a group share one forward pass of
    their prompt. Where models read padding, it counts, and sequences are ordered by length instead where that leaves
    models fewer tokens to read.

    Args:
        pads: some model cannot read a micro-batch without padding (`can_pack`).

    Raises:
        ConfigError: one sequence alone is longer than the budget.
    """
    by_length = sorted(samples, key=_length)
    for item in by_length:
        if _length(item) > budget:
            raise ConfigError(
                f"rollout {item.rollout.uid} has {_length(item)} tokens, more than batch.micro_batch_tokens {budget}; "
                f"raise it to at least the longest prompt plus sampling.max_new_tokens"
            )

    widest: dict[tuple[int, ...], int] = {}  # longest sequence of each prompt, tokens
    for item in by_length:
        widest[item.rollout.prompt.token_ids] = _length(item)

    by_prompt = sorted(
        by_length, key=lambda item: (widest[item.rollout.prompt.token_ids], item.rollout.prompt.token_ids)
    )
    cuts = [
        list(pack(order, budget, lambda item: rollout_lengths(item.rollout), pads))
        for order in ((by_length, by_prompt) if pads else (by_prompt,))
    ]
    return [collate(part, seed, epoch) for part in min(cuts, key=lambda runs: sum(map(_tokens_read, runs)))]


def plain_batches(rollouts: Sequence[Rollout], budget: int, seed: int, pads: bool = False) -> list[TokenBatch]:
    """Cut rollouts that have no advantages yet into micro-batches, to be read and not trained on."""
    nothing = Score(reward=0.0, correct=False)
    samples = [
        TrainingSample(rollout=rollout, score=nothing, advantages=torch.zeros(len(rollout.token_ids)))
        for rollout in rollouts
    ]
    return micro_batches(samples, budget, seed, 0, pads)


def _tokens_read(part: Sequence[TrainingSample]) -> int:
    """Count the tokens of a micro-batch with padding, each prompt once."""
    prompts = {item.rollout.prompt.token_ids for item in part}
    return len(prompts) * max(map(len, prompts)) + len(part) * max(len(item.rollout.token_ids) for item in part)


def collate(samples: Sequence[TrainingSample], seed: int, epoch: int) -> TokenBatch:
    """Stack samples into tensors: unique prompts [U, P] padded on the left, responses [B, T] padded on the right.

    An empty response is allowed: its row is all mask.
    """
    rollouts = [item.rollout for item in samples]
    prompts, index = unique_rows([rollout.prompt.token_ids for rollout in rollouts])
    prompt_ids, prompt_mask = pad_tokens(prompts, "left", torch.device("cpu"))
    lengths = torch.tensor([len(rollout.token_ids) for rollout in rollouts])
    width = int(lengths.max())
    attention_mask = torch.arange(width) < lengths[:, None]
    positions = attention_mask.flatten().nonzero()[:, 0]

    def pad(rows: Iterable[Tensor]) -> Tensor:
        values = torch.cat(list(rows))
        padded = values.new_zeros((attention_mask.numel(), *values.shape[1:])).index_copy_(0, positions, values)
        return padded.unflatten(0, attention_mask.shape)

    response_mask = pad(rollout.sampled_mask for rollout in rollouts)
    rollout_log_probs = pad(rollout.rollout_log_probs for rollout in rollouts)
    values = [item.values for item in samples if item.values is not None]  # of all, or of none
    returns = [item.returns for item in samples if item.returns is not None]
    keys = [fold_in(seed, "accept", rollout.uid, epoch) for rollout in rollouts]
    return TokenBatch(
        uids=tuple(rollout.uid for rollout in rollouts),
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        prompt_index=torch.tensor(index),
        response_ids=pad(rollout.token_ids for rollout in rollouts),
        attention_mask=attention_mask,
        response_mask=response_mask,
        response_index=response_mask.flatten().nonzero()[:, 0],
        rollout_log_probs=torch.where(response_mask, rollout_log_probs, 0.0),
        advantages=pad(item.advantages for item in samples),
        uniforms=uniforms(key_tensor(keys)[:, None], torch.arange(width)),
        top_ids=pad(rollout.top_ids for rollout in rollouts),
        top_log_probs=pad(rollout.top_log_probs for rollout in rollouts),
        versions=pad(rollout.versions for rollout in rollouts),
        values=pad(values) if values else None,
        returns=pad(returns) if returns else None,
        by_policy=torch.tensor([rollout.sampled_by == "policy" for rollout in rollouts]),
        packed=pack_row(prompts, index, [rollout.token_ids for rollout in rollouts]),
    )


def regroup(batches: Sequence[TokenBatch], rows: Sequence[Sequence[int]], pads: bool = False) -> list[TokenBatch]:
    """Deal chosen rows of each batch out to as few batches as fit, none with more tokens than the largest given.

    They have what a model reads, advantages and versions; no top-k lists, and other uniforms.

    Args:
        pads: as in `micro_batches`.
    """
    samples = [_sample(batch, row) for batch, chosen in zip(batches, rows, strict=True) for row in chosen]
    return micro_batches(samples, max(_tokens(batch, pads) for batch in batches), 0, 0, pads) if samples else []


def deal(batches: Sequence[TokenBatch], ranks: int) -> list[list[TokenBatch]]:
    """Deal micro-batches out to ranks in turn, equally many to each: the last ones may be `empty_like` the first.

    Ranks that share the weights of their models have to run the same number of passes.

    Returns:
        The micro-batches of each rank.

    Raises:
        ValueError: no micro-batch.
    """
    if not batches:
        raise ValueError("there is no micro-batch to deal; give at least one")
    missing = -len(batches) % ranks
    dealt = [*batches, *([empty_like(batches[0])] * missing if missing else [])]
    return [dealt[rank::ranks] for rank in range(ranks)]


def empty_like(batch: TokenBatch) -> TokenBatch:
    """Return a micro-batch without sequences, which models read in a pass with the kernels of any other one.

    It has one prompt, that of the first sequence of `batch`; all columns are [0, T].
    """
    if not batch.uids:
        return batch

    first = batch.prompt_index[0]
    ids, mask = batch.prompt_ids[first], batch.prompt_mask[first]
    row = None if batch.packed is None else pack_row([ids[mask].tolist()], [0], [batch.response_ids[0, :1]])

    columns = [field.name for field in fields(batch) if field.name not in _NO_COLUMNS]
    none = {name: None if (column := getattr(batch, name)) is None else column[:0] for name in columns}
    return replace(
        batch,
        **none,
        prompt_ids=ids[None],
        prompt_mask=mask[None],
        packed=row and replace(row, predicting=row.predicting[:0]),
    )


_NO_COLUMNS = {"prompt_ids", "prompt_mask", "packed"}  # fields of a batch that have no row for each sequence


def _tokens(batch: TokenBatch, pads: bool) -> int:
    """Count the tokens of a batch as `micro_batches` does, on the CPU."""
    if pads:
        return len(batch.uids) * (batch.prompt_ids.shape[1] + batch.response_ids.shape[1])
    return int(batch.prompt_mask[batch.prompt_index].sum() + batch.attention_mask.sum())


def _sample(batch: TokenBatch, row: int) -> TrainingSample:
    """Undo `collate` for one row, but for what no model reads."""
    prompt = batch.prompt_index[row]
    ids, length = batch.prompt_ids[prompt][batch.prompt_mask[prompt]], int(batch.attention_mask[row].sum())

    rollout = Rollout(
        uid=batch.uids[row],
        prompt=Prompt(uid="", text="", answer="", token_ids=tuple(ids.tolist())),
        finish="stop",
        token_ids=batch.response_ids[row, :length],
        rollout_log_probs=batch.rollout_log_probs[row, :length],
        sampled_mask=batch.response_mask[row, :length],
        top_ids=batch.top_ids[row, :length],
        top_log_probs=batch.top_log_probs[row, :length],
        versions=batch.versions[row, :length],
    )

    return TrainingSample(rollout=rollout, score=Score(reward=0.0), advantages=batch.advantages[row, :length])


def batch_to(batch: TokenBatch, device: torch.device) -> TokenBatch:
    """Copy the tensors of a batch to `device`; to a GPU from pinned memory, without waiting for the copies."""
    return _to(batch, device) if device.type != "cpu" else batch


def _to(batch: _Batch, device: torch.device) -> _Batch:
    changes: dict[str, Any] = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor):
            changes[field.name] = upload(value, device)
        elif isinstance(value, PackedRow):
            changes[field.name] = _to(value, device)
    return replace(batch, **changes)


def _length(item: TrainingSample) -> int:
    return sum(rollout_lengths(item.rollout))
