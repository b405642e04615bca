"""Saved responses in one form for all file formats, and batches of such responses."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from jackpot.core.errors import DataError
from jackpot.models.packing import pack

BATCH_TOKENS = 8_192  # response tokens of one batch, padding included
NEEDED = ("token_ids", "rollout_log_probs")
_LISTS = ("rollout_top_ids", "rollout_top_log_probs", "policy_top_ids", "policy_top_log_probs")
_ROUNDING = 1e-2  # error of a list's mass by rounding to half precision
_MASK_IT = "Write what the softmax of the logits gives, or set sampled_mask to false there"


class DamagedRecord(DataError):
    """The error of a response whose columns do not fit each other; the replay leaves the response out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedResponse:
    """A saved response of `T` tokens, on the CPU; columns that the file lacks are None. Log-probs are in nats."""

    uid: str
    sampled_by: str | None  # role of the model that sampled the response, in our own runs
    where: str  # file of the response, with the step if it is known
    prompt_ids: Tensor | None  # [P]; needed if a model is to score the response
    token_ids: Tensor  # [T]
    sampled_mask: Tensor  # [T] bool, False at tokens that no model sampled, such as a tool's
    advantages: Tensor | None  # [T]
    rollout_log_probs: Tensor  # [T] by the engine
    # By the policy, when it received the batch and when it is updated. A file with only one of these has it for both.
    old_log_probs: Tensor | None  # [T]
    log_probs: Tensor | None  # [T]
    rollout_top_ids: Tensor | None  # [T, K] the engine's top-k list
    rollout_top_log_probs: Tensor | None  # [T, K]
    policy_top_ids: Tensor | None  # [T, K'] top-k list of the policy that is updated
    policy_top_log_probs: Tensor | None  # [T, K']

    @property
    def has_lists(self) -> bool:
        """Whether the response has top-k lists of both models."""
        return self.rollout_top_ids is not None and self.policy_top_ids is not None

    @property
    def of_policy(self) -> tuple[Tensor, Tensor]:
        """The policy's log-probs, [T] each: when it received the batch, and when it is updated."""
        assert self.old_log_probs is not None and self.log_probs is not None  # the replay leaves out all others
        return self.old_log_probs, self.log_probs


def response_of(record: Mapping[str, Any], where: str, number: int) -> SavedResponse:
    """Make a response from a record, and check it.

    Args:
        record: columns by the names of `SavedResponse`, each a list or tensor; `advantages` may be one number.
        where: file of the response, for messages.
        number: number of the response in its file, for the uid if the record has none.

    Raises:
        DamagedRecord: a column that is not numeric, not as long as `token_ids`, or not finite at a sampled token.
    """
    where_it_is = f"{where}, response {number}"
    try:
        ids = _ids(record["token_ids"])
        rollout = _column(record["rollout_log_probs"], len(ids))
        others = {
            name: None if record.get(name) is None else _column(record[name], len(ids))
            for name in ("old_log_probs", "log_probs", "advantages")
        }
        lists = {name: _lists(record.get(name), name.endswith("ids")) for name in _LISTS}
        mask = record.get("sampled_mask")
        mask = torch.ones(len(ids), dtype=torch.bool) if mask is None else _flags(mask)
        prompt = record.get("prompt_ids")
        prompt_ids = None if prompt is None else _ids(prompt)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise DamagedRecord(f"{where_it_is}: {type(error).__name__}: {error}") from error

    columns = {"rollout_log_probs": rollout, **others}
    for name, column in {"sampled_mask": mask, **columns, **lists}.items():
        if column is not None and len(column) != len(ids):
            raise DamagedRecord(f"{where_it_is}: {name} has {len(column)} entries, there are {len(ids)} token_ids")

    _check_values(columns, lists, mask, where_it_is)
    _check_lists(lists, mask, where_it_is)

    # A file with one of the two columns has it for both.
    if others["old_log_probs"] is None:
        others["old_log_probs"] = others["log_probs"]
    elif others["log_probs"] is None:
        others["log_probs"] = others["old_log_probs"]

    return SavedResponse(
        uid=str(record.get("uid") or f"{where}#{number}"),
        sampled_by=record.get("sampled_by") or None,
        where=where,
        prompt_ids=prompt_ids,
        token_ids=ids,
        sampled_mask=mask,
        rollout_log_probs=rollout,
        **others,
        **lists,
    )


def _ids(values: Any) -> Tensor:
    """Return token ids as int64 [T]. Raises ValueError unless they are whole numbers from 0 on, of any type."""
    ids = torch.as_tensor(values)
    whole = ids.long()
    if ids.ndim != 1 or ids.dtype == torch.bool or (whole != ids).any() or (whole < 0).any():
        raise ValueError(f"token ids are whole numbers from 0 on in one row, and not {values!r:.60}")
    return whole


def _flags(values: Any) -> Tensor:
    """Return a mask as bool [T]. Raises ValueError unless it holds true and false, or 1 and 0."""
    flags = torch.as_tensor(values)
    if flags.ndim != 1 or not torch.isin(flags.double(), torch.tensor([0.0, 1.0], dtype=torch.float64)).all():
        raise ValueError(f"a mask holds true and false, or 1 and 0, in one row, and not {values!r:.60}")
    return flags.bool()


def _column(values: Any, length: int) -> Tensor:
    """Return a column as float64 [T]; a single number stands for all tokens."""
    column = torch.as_tensor(values, dtype=torch.float64)
    if column.ndim > 1:
        raise ValueError(f"one number a token is needed, and not {list(column.shape)}")
    return column.expand(length) if column.ndim == 0 else column


def _lists(values: Any, are_ids: bool) -> Tensor | None:
    """Return top-k lists as [T, K]; None if they are missing or empty."""
    rows = None if values is None else torch.as_tensor(values, dtype=torch.int64 if are_ids else torch.float64)
    if rows is None or not rows.numel():
        return None
    if rows.ndim != 2:
        raise ValueError(f"a top-k list has the shape [T, K], and not {list(rows.shape)}")
    return rows


def _check_values(
    columns: Mapping[str, Tensor | None], lists: Mapping[str, Tensor | None], mask: Tensor, where: str
) -> None:
    """Refuse values at sampled tokens that cannot be, such as NaN or log-probs above 0. Raises DamagedRecord.

    A single infinite number would spoil every mean. Lists may have -inf for tokens that cannot be sampled.
    """
    for name, column in (*columns.items(), *lists.items()):
        if column is None or name.endswith("ids"):
            continue

        sampled = column[mask]
        if name in lists and sampled.isnan().any():
            raise DamagedRecord(f"{where}: {name} has a NaN")
        if name in columns and not sampled.isfinite().all():
            value = sampled[~sampled.isfinite()][0]
            raise DamagedRecord(f"{where}: {name} has {value:g} at a sampled token. {_MASK_IT}")
        if name.endswith("log_probs") and sampled.gt(1e-3).any():
            raise DamagedRecord(f"{where}: {name} has {sampled.max():.4g}; {_above_0(sampled)}")
        if name == "rollout_log_probs" and sampled.exp().eq(0.0).any():
            raise DamagedRecord(
                f"{where}: {name} has {sampled.min():g}, a token that cannot have been sampled. {_MASK_IT}"
            )


def _above_0(values: Tensor) -> str:
    """Say what a column of log-probs with values above 0 probably holds."""
    if values.min() < 0.0:
        return "a log-probability is at most 0"
    is_share = values.max() <= 1.0
    return "these are " + ("probabilities; write their logarithm" if is_share else "negative log-probs; write -x for x")


def _check_lists(lists: Mapping[str, Tensor | None], mask: Tensor, where: str) -> None:
    """Refuse a top-k list that names a token twice or holds more than all probability. Raises DamagedRecord.

    No Z can be computed from such a list. Entries of probability 0 may pad a list that is longer than the vocabulary.
    """
    for model in ("rollout", "policy"):
        ids, log_probs = lists[f"{model}_top_ids"], lists[f"{model}_top_log_probs"]
        if ids is None and log_probs is None:
            continue
        if ids is None or log_probs is None or ids.shape != log_probs.shape:
            raise DamagedRecord(f"{where}: {model}_top_ids and {model}_top_log_probs are not of the same shape [T, K]")

        probs = log_probs[mask].exp()
        if (probs.sum(-1) > 1.0 + _ROUNDING).any():
            raise DamagedRecord(f"{where}: {model}_top_log_probs hold {probs.sum(-1).max():.4g} of all probability")
        possible = torch.where(probs > 0.0, ids[mask], -1 - torch.arange(ids.shape[1])).sort(-1).values
        if (possible[:, 1:] == possible[:, :-1]).any():
            raise DamagedRecord(f"{where}: {model}_top_ids name a token twice; pad a list with log-probs of -inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseBatch:
    """A batch of responses, padded on the right: [B, T] float64 each unless noted, 0 where the mask is False."""

    responses: tuple[SavedResponse, ...]
    mask: Tensor  # bool, True at tokens that the model sampled
    rollout: Tensor  # log-probs by the engine
    old: Tensor  # log-probs by the policy that received the batch
    new: Tensor  # log-probs by the policy that is updated
    advantages: Tensor


def response_batches(responses: Iterable[SavedResponse]) -> Iterator[list[SavedResponse]]:
    """Yield the responses in their order, in batches of one response or at most `BATCH_TOKENS` tokens with padding."""
    return pack(responses, BATCH_TOKENS, lambda response: (0, len(response.token_ids)))


def collate(responses: Sequence[SavedResponse]) -> ResponseBatch:
    """Stack responses that have log-probs of a policy; missing advantages become 1."""
    mask = pad_sequence([response.sampled_mask for response in responses], batch_first=True)

    def pad(rows: Iterable[Tensor]) -> Tensor:
        return torch.where(mask, pad_sequence(list(rows), batch_first=True), 0.0)

    def advantages(response: SavedResponse) -> Tensor:
        return torch.ones_like(response.rollout_log_probs) if response.advantages is None else response.advantages

    return ResponseBatch(
        responses=tuple(responses),
        mask=mask,
        rollout=pad(response.rollout_log_probs for response in responses),
        old=pad(response.of_policy[0] for response in responses),
        new=pad(response.of_policy[1] for response in responses),
        advantages=pad(map(advantages, responses)),
    )
