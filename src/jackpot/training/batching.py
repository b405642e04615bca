"""Distribution of training samples to mini-batches (an optimizer step each) and micro-batches (a forward pass each).

No sequence is dropped or cut: each sequence of the rollout batch is in exactly one micro-batch of each epoch.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from jackpot.core.errors import ConfigError
from jackpot.core.prng import fold_in, key_tensor, uniforms
from jackpot.core.types import PackedRow, Prompt, Rollout, Score, TokenBatch, TrainingSample, Version, unique_rows
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
    """Yield, for every optimizer step on one rollout batch, the mini-batch as a list of micro-batches.

    If an epoch is one step, the sequences keep the order of the rollouts; otherwise they are shuffled by `seed` and
    epoch, as PPO does. The random numbers by which OBRS, the rejection sampling of the objective, accepts tokens are
    hashed from (seed, rollout uid, position, epoch), so that no batching changes them.

    Args:
        mini_batch_size: number of sequences in one optimizer step; divides the number of rollouts.
        micro_batch_tokens: most tokens in one micro-batch; a prompt counts once for each of its responses.
        pads: True where some model cannot read a micro-batch without padding (`can_pack`).
    """
    for epoch in range(epochs):
        order = list(samples)
        if mini_batch_size < len(order):
            random.Random(f"{seed}/{epoch}/{order[0].rollout.uid}").shuffle(order)
        for start in range(0, len(order), mini_batch_size):
            yield micro_batches(order[start : start + mini_batch_size], micro_batch_tokens, seed, epoch, pads=pads)


def micro_batches(
    samples: Sequence[TrainingSample], budget: int, seed: int, epoch: int, pads: bool = False
) -> list[TokenBatch]:
    """Cut one mini-batch into micro-batches of at most `budget` tokens; a prompt counts once for each response to it.

    Sequences are ordered prompt by prompt, then by length, so that the responses of a group share one forward pass of
    the prompt. With `pads`, padding counts as tokens; then sequences are ordered by length alone if models have fewer
    tokens to read in that order.

    Args:
        pads: True where some model cannot read a micro-batch without padding (`can_pack`).

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

    # Length of the longest sequence of each prompt, which comes last and replaces the shorter ones.
    longest = {item.rollout.prompt.token_ids: _length(item) for item in by_length}

    # Prompts are ordered by their longest sequence; the sequences of a prompt keep their order by length.
    by_prompt = sorted(
        by_length, key=lambda item: (longest[item.rollout.prompt.token_ids], item.rollout.prompt.token_ids)
    )
    # Cut the ordered sequences into runs, one for each micro-batch. With padding, both orders are tried, and the one
    # with fewer tokens to read is taken.
    cuts = [
        list(pack(order, budget, lambda item: rollout_lengths(item.rollout), pads))
        for order in ((by_length, by_prompt) if pads else (by_prompt,))
    ]
    fewest_tokens = min(cuts, key=lambda runs: sum(map(_tokens_read, runs)))
    return [collate(run, seed, epoch) for run in fewest_tokens]


def plain_batches(rollouts: Sequence[Rollout], budget: int, seed: int, pads: bool = False) -> list[TokenBatch]:
    """Cut rollouts into micro-batches of at most `budget` tokens, without advantages: to be scored, not trained on."""
    samples = [
        TrainingSample(rollout=rollout, score=Score(reward=0.0), advantages=torch.zeros(len(rollout.token_ids)))
        for rollout in rollouts
    ]
    return micro_batches(samples, budget, seed, epoch=0, pads=pads)


def _tokens_read(run: Sequence[TrainingSample]) -> int:
    """Count the tokens, padding too, that models read of a micro-batch: each different prompt and every response."""
    prompts = {item.rollout.prompt.token_ids for item in run}
    return len(prompts) * max(map(len, prompts)) + len(run) * max(len(item.rollout.token_ids) for item in run)


def collate(samples: Sequence[TrainingSample], seed: int, epoch: int) -> TokenBatch:
    """Stack samples into tensors: unique prompts [U, P] padded on the left, responses [B, T] padded on the right.

    An empty response is allowed; its whole row is masked.
    """
    rollouts = [item.rollout for item in samples]
    prompts, index = unique_rows([rollout.prompt.token_ids for rollout in rollouts])
    prompt_ids, prompt_mask = pad_tokens(prompts, "left", torch.device("cpu"))

    lengths = torch.tensor([len(rollout.token_ids) for rollout in rollouts])
    width = int(lengths.max())
    attention_mask = torch.arange(width) < lengths[:, None]
    positions = attention_mask.flatten().nonzero()[:, 0]  # indices in [B * T] of the tokens that are not padding

    def pad(rows: Iterable[Tensor]) -> Tensor:
        """Pad the rows [T_i, ...] of all responses with zeros to one tensor [B, T, ...]."""
        values = torch.cat(list(rows))
        padded = values.new_zeros((attention_mask.numel(), *values.shape[1:])).index_copy_(0, positions, values)
        return padded.unflatten(0, attention_mask.shape)

    response_mask = pad(rollout.sampled_mask for rollout in rollouts)
    rollout_log_probs = pad(rollout.rollout_log_probs for rollout in rollouts)
    values = [item.values for item in samples if item.values is not None]  # one of each sample; without a critic, none
    returns = [item.returns for item in samples if item.returns is not None]
    # One key a response, from which the random numbers of OBRS's acceptance mask are hashed.
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
    """Gather chosen rows of several batches in new batches, none with more tokens than the largest of `batches`.

    The new batches have no values or returns of a critic. Their `uniforms` (random numbers of OBRS) are not those of
    the rows, and `by_policy` is False in all rows. Without a chosen row no batch is returned.

    Args:
        rows: indices of the chosen rows of each batch.
        pads: True where some model cannot read a batch without padding; then padding counts as tokens.
    """
    samples = [_sample(batch, row) for batch, indices in zip(batches, rows, strict=True) for row in indices]
    budget = max(_tokens(batch, pads) for batch in batches)  # most tokens in a new batch
    return micro_batches(samples, budget, seed=0, epoch=0, pads=pads) if samples else []


def deal(batches: Sequence[TokenBatch], ranks: int) -> list[list[TokenBatch]]:
    """Deal micro-batches out to ranks in turn, equally many to each rank.

    Ranks that share the weights of their models have to run equally many passes. Where micro-batches are too few,
    ranks get empty ones (`empty_like`).

    Returns:
        The micro-batches of each rank.
    """
    num_missing = -len(batches) % ranks  # up to the next multiple of `ranks`
    filled = [*batches, *(empty_like(batches[0]) for _ in range(num_missing))]
    return [filled[rank::ranks] for rank in range(ranks)]


def empty_like(batch: TokenBatch) -> TokenBatch:
    """Return a micro-batch without sequences, for a rank that has nothing to train on and must run a pass all the same.

    It keeps the prompt of the first sequence of `batch`, so that models have something to read. The tensors that have a
    row for each sequence become [0, T], so that nothing is trained on. A batch without sequences is returned as it is.
    """
    if not batch.uids:
        return batch

    prompt = batch.prompt_index[0]
    ids, mask = batch.prompt_ids[prompt], batch.prompt_mask[prompt]
    # The packed row shall have the prompt alone. `pack_row` needs a response for each prompt, and leaves out the last
    # token of each response; so the response passed here has one token. What it adds to `predicting` is removed below.
    packed = None if batch.packed is None else pack_row([ids[mask].tolist()], [0], [batch.response_ids[0, :1]])

    names = [field.name for field in fields(batch) if field.name not in _NOT_BY_SEQUENCE]
    without_rows = {name: None if (column := getattr(batch, name)) is None else column[:0] for name in names}
    return replace(
        batch,
        **without_rows,
        prompt_ids=ids[None],
        prompt_mask=mask[None],
        packed=packed and replace(packed, predicting=packed.predicting[:0]),  # None stays None
    )


_NOT_BY_SEQUENCE = {"prompt_ids", "prompt_mask", "packed"}  # fields of a batch without a row for each sequence


def _tokens(batch: TokenBatch, pads: bool) -> int:
    """Count the tokens of a batch as `micro_batches` counts them against its budget; the batch is on the CPU."""
    if pads:
        return len(batch.uids) * (batch.prompt_ids.shape[1] + batch.response_ids.shape[1])
    return int(batch.prompt_mask[batch.prompt_index].sum() + batch.attention_mask.sum())


def _sample(batch: TokenBatch, row: int) -> TrainingSample:
    """Return one sequence of a batch as a sample with the tokens, token columns and advantages that it was made from.

    Reward, finish, and the prompt's uid and text are stand-ins. Values, returns and the sampling model are left out.
    """
    prompt = batch.prompt_index[row]
    ids, length = batch.prompt_ids[prompt][batch.prompt_mask[prompt]], int(batch.attention_mask[row].sum())

    return TrainingSample(
        rollout=Rollout(
            uid=batch.uids[row],
            prompt=Prompt(uid="", text="", answer="", token_ids=tuple(ids.tolist())),
            finish="stop",
            token_ids=batch.response_ids[row, :length],
            rollout_log_probs=batch.rollout_log_probs[row, :length],
            sampled_mask=batch.response_mask[row, :length],
            top_ids=batch.top_ids[row, :length],
            top_log_probs=batch.top_log_probs[row, :length],
            versions=batch.versions[row, :length],
        ),
        score=Score(reward=0.0),
        advantages=batch.advantages[row, :length],
    )


def sampled_with(batch: TokenBatch, version: Version) -> Tensor:
    """Mark the tokens that were sampled by weights of `version`, [B, T] bool.

    `version` has a number for each model, as has each token in `batch.versions` [B, T, 2]: the policy's comes first.
    Compared are the numbers of the model that sampled the token; without `by_policy` the rollout model's.
    """
    by_rollout_model = batch.versions[..., 1] == version.rollout_model
    if batch.by_policy is None:
        return by_rollout_model
    return torch.where(batch.by_policy[:, None], batch.versions[..., 0] == version.policy, by_rollout_model)


def batch_to(batch: TokenBatch, device: torch.device) -> TokenBatch:
    """Copy the tensors of a batch to `device`; copies to a GPU go through pinned memory and are not waited for."""
    return _to(batch, device) if device.type != "cpu" else batch


def _to(batch: _Batch, device: torch.device) -> _Batch:
    """Copy the tensors of a batch, and those of its packed row, to `device`."""
    changes: dict[str, Any] = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor):
            changes[field.name] = upload(value, device)
        elif isinstance(value, PackedRow):
            changes[field.name] = _to(value, device)
    return replace(batch, **changes)


def _length(item: TrainingSample) -> int:
    """Count the tokens of a sample's prompt and response together."""
    return sum(rollout_lengths(item.rollout))
