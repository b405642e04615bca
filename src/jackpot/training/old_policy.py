"""The old policy is the policy before its first update on a rollout batch; its log-probs are stored here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from jackpot.core.metrics import tensors_to_host
from jackpot.core.types import TokenBatch
from jackpot.objectives.joint import OldLogProbs, PolicyObjective
from jackpot.objectives.obrs import ZEstimate


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Holds the tokens of one forward and backward pass, with the log-probs that the old policy gives them.

    `old` is None in the first update on the tokens: there the training forward pass gives the old log-probs as well.
    """

    tokens: TokenBatch
    old: OldLogProbs | None


class OldPolicySnapshot:
    """Stores old log-probs by rollout uid.

    A later epoch deals the rollouts out to other micro-batches than those that were scored.
    """

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, Tensor]] = {}

    def holds(self, batch: TokenBatch) -> bool:
        """Return whether every rollout of a micro-batch is stored."""
        return self._rows.keys() >= set(batch.uids)

    def add(self, batch: TokenBatch, old: OldLogProbs) -> None:
        """Store the old log-probs of a micro-batch."""
        columns = {
            "old_log_probs": old.old_log_probs,
            "rollout_model_old_log_probs": old.rollout_model_old_log_probs,
            **old.z._asdict(),
            **({} if old.lam is None else {"lam": old.lam}),
        }
        self._rows |= by_rollout(batch, columns)

    def look_up(self, batch: TokenBatch) -> OldLogProbs:
        """Return the old log-probs of a micro-batch, padded to its length: [B, T] each."""
        mine = [self._rows[uid] for uid in batch.uids]
        padded = {name: pad_sequence([row[name] for row in mine], batch_first=True) for name in mine[0]}
        z = ZEstimate(**{name: padded.pop(name) for name in ZEstimate._fields})
        return OldLogProbs(z=z, **padded)


def holds_target(old: OldLogProbs | None, objective: PolicyObjective) -> bool:
    """Return whether old log-probs determine acceptance and Z, so that the current policy does not change them."""
    return old is not None and objective.target == "old"


def by_rollout(batch: TokenBatch, columns: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Split columns [B, T, ...] into one row without padding, [T_i, ...], for every rollout uid."""
    lengths = batch.attention_mask.sum(-1).tolist()
    return {
        uid: {name: tensor[row, :length] for name, tensor in columns.items()}
        for row, (uid, length) in enumerate(zip(batch.uids, lengths, strict=True))
    }


def rows_on_host(parts: Sequence[tuple[TokenBatch, Mapping[str, Tensor]]]) -> dict[str, dict[str, Tensor]]:
    """Copy columns of many micro-batches to the CPU in one transfer, and split them as `by_rollout`.

    Args:
        parts: pairs of a micro-batch, on the CPU, and columns [B, T, ...], on the device; a micro-batch may come again
            with further columns.
    """
    rows: dict[str, dict[str, Tensor]] = {}
    columns = iter(tensors_to_host([column for _, named in parts for column in named.values()]))
    for batch, named in parts:
        for uid, row in by_rollout(batch, {name: next(columns) for name in named}).items():
            rows.setdefault(uid, {}).update(row)
    return rows
