"""Copies of how the models were before: log-probs of the old policy, and weights.

The old policy is the policy before its first update on a rollout batch. Rollouts that were generated ahead are checked
with a copy of the weights that generated them, once training has changed the model.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from jackpot.core.metrics import all_gather, max_over_ranks, tensors_to_host
from jackpot.core.prng import fold_in, key_tensor
from jackpot.core.shards import local
from jackpot.core.types import TokenBatch
from jackpot.objectives.joint import OldLogProbs, PolicyObjective
from jackpot.objectives.obrs import ZEstimate


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """The tokens of one forward and backward pass, with their log-probs under the old policy.

    `old` is None in the first update on the tokens, because that update's forward pass gives the old log-probs too.
    """

    tokens: TokenBatch
    old: OldLogProbs | None


class OldPolicySnapshot:
    """A store of old log-probs by rollout.

    Log-probs are stored by rollout because a later epoch deals the rollouts out to other micro-batches and ranks.
    """

    def __init__(self) -> None:
        self._rows: dict[int, dict[str, Tensor]] = {}  # columns [T] by `_key` of the rollout
        self._none: dict[str, Tensor] = {}  # columns [0, T], for micro-batches without rollouts

    def add(self, batch: TokenBatch, old: OldLogProbs) -> None:
        """Store the old log-probs of a micro-batch."""
        columns = {
            "old_log_probs": old.old_log_probs,
            "rollout_model_old_log_probs": old.rollout_model_old_log_probs,
            **old.z._asdict(),
            **({} if old.lam is None else {"lam": old.lam}),
        }
        self._none = {name: column[:0] for name, column in columns.items()}
        rows = by_rollout(batch, columns)
        self._rows |= dict(zip(_keys(rows).tolist(), rows.values(), strict=True))

    def fetch(self, batches: Iterable[TokenBatch]) -> None:
        """Copy all stored rows to all ranks, if any rank lacks a row for its own `batches`."""
        wanted = _keys(uid for batch in batches for uid in batch.uids).tolist()
        if not max_over_ranks(not self._rows.keys() >= set(wanted)):
            return

        own = list(self._rows.values())
        keys = all_gather(torch.tensor(list(self._rows), dtype=torch.int64))
        lengths = all_gather(torch.tensor([len(row["old_log_probs"]) for row in own], dtype=torch.int64))
        columns = {
            name: all_gather(torch.cat([none.flatten(), *(row[name] for row in own)]))
            for name, none in self._none.items()
        }

        ranks = dist.get_world_size()
        shares = [one.view(ranks, -1).unbind() for one in (keys, lengths, *columns.values())]
        for of_rank, counts, *values in zip(*shares, strict=True):  # padded to the longest share by rows of length 0
            counts = [*counts.tolist(), len(values[0]) - int(counts.sum())]
            rows = zip(*(column.split(counts) for column in values), strict=True)
            self._rows |= {
                key: dict(zip(columns, row, strict=True)) for key, row in zip(of_rank.tolist(), rows, strict=False)
            }

    def look_up(self, batch: TokenBatch) -> OldLogProbs:
        """Return the old log-probs of a micro-batch, padded to its T tokens: columns [B, T]."""
        mine = [self._rows[key] for key in _keys(batch.uids).tolist()]
        padded = {
            name: pad_sequence([row[name] for row in mine], batch_first=True)
            if mine
            else none.new_zeros(batch.response_mask.shape)
            for name, none in self._none.items()
        }
        z = ZEstimate(**{name: padded.pop(name) for name in ZEstimate._fields})
        return OldLogProbs(z=z, **padded)


def first_readings(batches: Sequence[TokenBatch]) -> list[TokenBatch]:
    """Return the batches to read so that each rollout of any rank is read at least once.

    Batch i is left out where the rollouts in batch i of every rank are all in earlier batches of some rank. All ranks
    leave out batches with equal numbers i.
    """
    uids = [(place, uid) for place, batch in enumerate(batches) for uid in batch.uids]
    places = all_gather(torch.tensor([place for place, _ in uids], dtype=torch.int64)).tolist()
    keys = all_gather(_keys(uid for _, uid in uids)).tolist()
    first: dict[int, int] = {}
    for place, key in sorted(zip(places, keys, strict=True)):
        first.setdefault(key, place)
    return [batches[place] for place in sorted(set(first.values()))]


def _keys(uids: Iterable[str]) -> Tensor:
    """Hash the uids of rollouts to int64, [B], which ranks can exchange as a tensor."""
    return key_tensor([fold_in(uid) for uid in uids])


def holds_target(old: OldLogProbs | None, objective: PolicyObjective) -> TypeGuard[OldLogProbs]:
    """Return whether the old log-probs alone determine acceptance and Z, whatever the current policy is."""
    return old is not None and objective.target == "old"


def by_rollout(batch: TokenBatch, columns: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Split columns [B, T, ...] into rows without padding, [T_i, ...], by rollout uid and name of the column."""
    lengths = batch.attention_mask.sum(-1).tolist()
    return {
        uid: {name: tensor[row, :length] for name, tensor in columns.items()}
        for row, (uid, length) in enumerate(zip(batch.uids, lengths, strict=True))
    }


def rows_on_host(parts: Sequence[tuple[TokenBatch, Mapping[str, Tensor]]]) -> dict[str, dict[str, Tensor]]:
    """Copy columns of many micro-batches to the CPU in one transfer, and split them as `by_rollout` does.

    Args:
        parts: pairs of a micro-batch, on the CPU, and its columns [B, T, ...], on the device. Several pairs may have
            the same micro-batch and different columns.
    """
    rows: dict[str, dict[str, Tensor]] = {}
    columns = iter(tensors_to_host([column for _, named in parts for column in named.values()]))
    for batch, named in parts:
        for uid, row in by_rollout(batch, {name: next(columns) for name in named}).items():
            rows.setdefault(uid, {}).update(row)
    return rows


def column_on_host(columns: Sequence[tuple[TokenBatch, Tensor]]) -> dict[str, Tensor]:
    """Copy one column of many micro-batches to the CPU as `rows_on_host` does; return its rows by rollout uid."""
    rows = rows_on_host([(batch, {"": column}) for batch, column in columns])
    return {uid: row[""] for uid, row in rows.items()}


class KeptWeights:
    """A copy of the trained parameters, kept in the host's memory; other parameters never change.

    Where parameters are sharded, each rank keeps the copy of its shard.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._copies = [torch.empty_like(piece, device="cpu", pin_memory=piece.is_cuda) for piece in self._pieces()]

    @torch.no_grad()
    def keep(self) -> None:
        """Copy the parameters as they are now, in place of an earlier copy."""
        for copy, piece in zip(self._copies, self._pieces(), strict=True):
            copy.copy_(piece)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the kept weights into the model for the `with` block, and then the current weights back, bit for bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for copy, piece in zip(self._copies, self._pieces(), strict=True):
            now = piece.to("cpu", copy=True)
            piece.copy_(copy)
            copy.copy_(now)

    def _pieces(self) -> list[Tensor]:
        """Return the parameters as flat pieces of 2**n numbers, because torch rounds pinned memory up to such sizes."""
        pieces: list[Tensor] = []
        for parameter in self._parameters:
            numbers = local(parameter.detach()).view(-1)
            count = len(numbers)
            pieces += numbers.split([1 << bit for bit in range(count.bit_length()) if count >> bit & 1])
        return pieces
