"""What is kept of the models from before an update: log-probs of the old policy, and copies of weights.

The old policy is the policy before its first update on a rollout batch.
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
        self._rows: dict[int, dict[str, Tensor]] = {}  # for each rollout, by its key (`_keys`): tensors [T] by name
        # By name, a tensor [0, T] of the right dtype, for batches without rollouts.
        self._empty_columns: dict[str, Tensor] = {}

    def add(self, batch: TokenBatch, old: OldLogProbs) -> None:
        """Store the old log-probs of a micro-batch by rollout, with OBRS's Z and lam of each token.

        Z is the expected acceptance. lam divides acceptance probabilities; it is stored where a budget chooses it.
        """
        columns = {
            "old_log_probs": old.old_log_probs,
            "rollout_model_old_log_probs": old.rollout_model_old_log_probs,
            **old.z._asdict(),
            **({} if old.lam is None else {"lam": old.lam}),
        }
        self._empty_columns = {name: column[:0] for name, column in columns.items()}  # for names and dtypes
        rows = by_rollout(batch, columns)
        self._rows |= dict(zip(_keys(rows).tolist(), rows.values(), strict=True))

    def fetch(self, batches: Iterable[TokenBatch]) -> None:
        """Copy the log-probs that each rank has stored to all ranks, if a rank lacks any for its own `batches`."""
        needed = _keys(uid for batch in batches for uid in batch.uids).tolist()
        # All ranks go on if some rank lacks a key that it needs, else none does.
        if not max_over_ranks(not self._rows.keys() >= set(needed)):
            return

        # Gather the keys and lengths of all stored rows, and for each column the values of all rows, one after another.
        # `empty`, a column without values, gives `torch.cat` the dtype where a rank has stored no rows.
        rows = list(self._rows.values())
        keys = all_gather(torch.tensor(list(self._rows), dtype=torch.int64))
        lengths = all_gather(torch.tensor([len(row["old_log_probs"]) for row in rows], dtype=torch.int64))
        columns = {
            name: all_gather(torch.cat([empty.flatten(), *(row[name] for row in rows)]))
            for name, empty in self._empty_columns.items()
        }

        ranks = dist.get_world_size()
        shares = [gathered.view(ranks, -1).unbind() for gathered in (keys, lengths, *columns.values())]
        for rank_keys, rank_lengths, *values in zip(*shares, strict=True):
            # A rank's share is filled up with zeros to the longest share. So the last keys and lengths may be 0, which
            # stores an empty row under the key 0, and the values may end with zeros: a last row, which has no key.
            sizes = [*rank_lengths.tolist(), len(values[0]) - int(rank_lengths.sum())]
            rank_rows = zip(*(column.split(sizes) for column in values), strict=True)
            for key, row in zip(rank_keys.tolist(), rank_rows, strict=False):  # leaves out the row without a key
                self._rows[key] = dict(zip(columns, row, strict=True))

    def look_up(self, batch: TokenBatch) -> OldLogProbs:
        """Return the old log-probs of a micro-batch, padded to its T tokens: columns [B, T], empty without rollouts."""
        rows = [self._rows[key] for key in _keys(batch.uids).tolist()]
        padded = {
            name: pad_sequence([row[name] for row in rows], batch_first=True)
            if rows
            else empty.new_zeros(batch.response_mask.shape)
            for name, empty in self._empty_columns.items()
        }
        z = ZEstimate(**{name: padded.pop(name) for name in ZEstimate._fields})
        return OldLogProbs(z=z, **padded)


def first_readings(batches: Sequence[TokenBatch]) -> list[TokenBatch]:
    """Leave out batches whose rollouts are all read before, by any rank; return those that this rank has to read.

    Ranks that share weights read in step, the i-th batch of each at once, so all ranks leave out their i-th batch or
    none does. It is left out if every rollout in the i-th batches of all ranks is in an earlier batch of some rank.
    """
    uids = [(index, uid) for index, batch in enumerate(batches) for uid in batch.uids]
    indices = all_gather(torch.tensor([index for index, _ in uids], dtype=torch.int64)).tolist()
    keys = all_gather(_keys(uid for _, uid in uids)).tolist()

    first_index: dict[int, int] = {}  # the smallest index of a batch with the rollout, by the rollout's key
    for index, key in sorted(zip(indices, keys, strict=True)):  # by index, so that the smallest comes first
        first_index.setdefault(key, index)
    return [batches[index] for index in sorted(set(first_index.values()))]


def _keys(uids: Iterable[str]) -> Tensor:
    """Hash the uids of rollouts to int64, [B], which ranks can exchange as a tensor."""
    return key_tensor([fold_in(uid) for uid in uids])


def holds_target(old: OldLogProbs | None, objective: PolicyObjective) -> TypeGuard[OldLogProbs]:
    """Return whether the old log-probs alone determine acceptance and its expectation Z, for any current policy."""
    return old is not None and objective.target == "old"


def by_rollout(batch: TokenBatch, columns: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Split named tensors [B, T, ...] into rows without padding, [T_i, ...]; return the named rows by rollout uid."""
    lengths = batch.attention_mask.sum(-1).tolist()
    return {
        uid: {name: tensor[row, :length] for name, tensor in columns.items()}
        for row, (uid, length) in enumerate(zip(batch.uids, lengths, strict=True))
    }


def rows_on_host(micro_batches: Sequence[tuple[TokenBatch, Mapping[str, Tensor]]]) -> dict[str, dict[str, Tensor]]:
    """Copy tensors of many micro-batches to the CPU in one transfer, and split them into a row for each rollout.

    Args:
        micro_batches: pairs of a micro-batch, on the CPU, and its columns: tensors [B, T, ...] by name, on the device.

    Returns:
        For each rollout uid, the rollout's row of each column without padding, [T_i, ...], by the column's name.
    """
    rows: dict[str, dict[str, Tensor]] = {}
    # Copy the columns of all micro-batches as one list, and take the copies from it in the same order.
    columns = iter(tensors_to_host([column for _, named in micro_batches for column in named.values()]))
    for batch, named in micro_batches:
        rows |= by_rollout(batch, {name: next(columns) for name in named})
    return rows


def column_on_host(columns: Sequence[tuple[TokenBatch, Tensor]]) -> dict[str, Tensor]:
    """Copy a tensor of each micro-batch to the CPU, all in one transfer; return its rows by rollout uid, unpadded."""
    rows = rows_on_host([(batch, {"": column}) for batch, column in columns])
    return {uid: row[""] for uid, row in rows.items()}


class KeptWeights:
    """A copy of the trained parameters, kept in the host's memory; other parameters never change.

    Rollouts that were generated ahead are checked with the copy, once training has changed the model. Where parameters
    are sharded, each rank keeps the copy of its shard.
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
        """Exchange the values of the parameters with those of the copy."""
        for copy, piece in zip(self._copies, self._pieces(), strict=True):
            current = piece.to("cpu", copy=True)
            piece.copy_(copy)
            copy.copy_(current)

    def _pieces(self) -> list[Tensor]:
        """Return the parameters, cut into flat pieces of 1, 2, 4, 8, ... numbers.

        Torch rounds pinned memory up to such sizes, so that no memory is wasted on copies of the pieces.
        """
        pieces: list[Tensor] = []
        for parameter in self._parameters:
            flat = local(parameter.detach()).view(-1)
            # The powers of two that add up to the parameter's size are the 1s of its binary digits.
            powers = [1 << bit for bit in range(len(flat).bit_length())]
            pieces += flat.split([power for power in powers if len(flat) & power])
        return pieces
