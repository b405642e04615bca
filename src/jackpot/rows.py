"""Per-token columns by rollout: an anchor outlives the micro-batches that it was scored in. Layer 4."""

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from jackpot.objectives.joint import Anchor
from jackpot.ops.obrs import ZEstimate
from jackpot.types import TokenBatch


def by_rollout(batch: TokenBatch, columns: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Columns [B, T, ...] as one row without padding, [T_i, ...], for every rollout uid."""
    lengths = batch.attention_mask.sum(-1).tolist()
    return {
        uid: {name: tensor[row, :length] for name, tensor in columns.items()}
        for row, (uid, length) in enumerate(zip(batch.uids, lengths, strict=True))
    }


def anchor_columns(anchor: Anchor) -> dict[str, Tensor]:
    return {
        "old_log_probs": anchor.old_log_probs,
        "rollout_model_old_log_probs": anchor.rollout_model_old_log_probs,
        **anchor.z._asdict(),
    }


def anchor_from_rows(batch: TokenBatch, rows: dict[str, dict[str, Tensor]]) -> Anchor:
    """The anchor of a micro-batch: in a later epoch it holds other rollouts together than the one that was scored."""
    mine = [rows[uid] for uid in batch.uids]
    padded = {name: pad_sequence([row[name] for row in mine], batch_first=True) for name in mine[0]}
    z = ZEstimate(**{name: padded.pop(name) for name in ZEstimate._fields})
    return Anchor(z=z, **padded)
