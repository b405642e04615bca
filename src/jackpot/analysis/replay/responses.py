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
NEEDED = ("token_ids", "rollout_log_probs")  # columns without which no response can be replayed
_LISTS = ("rollout_top_ids", "rollout_top_log_probs", "policy_top_ids", "policy_top_log_probs")
_ROUNDING = 1e-2  # how far the probabilities of a list may sum to more than 1, by rounding to half precision
_ADVICE = "Write what the softmax of the logits gives, or set sampled_mask to false there"


class DamagedRecord(DataError):
    """The error that a saved response has impossible values or columns that do not fit each other.

    The replay leaves such a response out.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedResponse:
    """A saved response of `T` tokens, on the CPU; a column that the file lacks is None. Log-probs are in nats."""

    uid: str
    sampled_by: str | None  # role of the model that sampled the response, in our own runs
    where: str  # name of the response's file in messages, with the training step if it is known
    prompt_ids: Tensor | None  # [P]; needed if a model is to score the response
    token_ids: Tensor  # [T]
    sampled_mask: Tensor  # [T] bool, False at tokens that no model sampled, such as a tool's
    advantages: Tensor | None  # [T]
    rollout_log_probs: Tensor  # [T] by the engine
    # If a file has only one of the next two columns, that one is used for both.
    old_log_probs: Tensor | None  # [T] by the policy when it received the batch
    log_probs: Tensor | None  # [T] by the policy when it is updated
    rollout_top_ids: Tensor | None  # [T, K] the engine's top-k list
    rollout_top_log_probs: Tensor | None  # [T, K]
    policy_top_ids: Tensor | None  # [T, K'] top-k list of the policy that is updated
    policy_top_log_probs: Tensor | None  # [T, K']

    @property
    def has_lists(self) -> bool:
        """Tell whether the response has top-k lists of both models."""
        return self.rollout_top_ids is not None and self.policy_top_ids is not None

    @property
    def policy_log_probs(self) -> tuple[Tensor, Tensor]:
        """Return (`old_log_probs`, `log_probs`), the policy's log-probs before and at the update, [T] each."""
        assert self.old_log_probs is not None and self.log_probs is not None  # the replay leaves out other responses
        return self.old_log_probs, self.log_probs


def response_of(record: Mapping[str, Any], where: str, index: int) -> SavedResponse:
    """Make a `SavedResponse` from a record of a file, and check the values.

    Args:
        record: columns by the names of `SavedResponse`, each a list or tensor; `advantages` may be one number. Only
            `token_ids` and `rollout_log_probs` must be there.
        where: file of the response, for messages.
        index: index of the response in its file, for the uid if the record has none.

    Raises:
        DamagedRecord: a column that is not numeric, not as long as `token_ids`, or not finite at a sampled token.
    """
    name_in_messages = f"{where}, response {index}"
    present = {name: values for name, values in record.items() if values is not None}
    try:
        ids = _ids(present["token_ids"])
        rollout = _column(present["rollout_log_probs"], len(ids))
        optional = {
            name: _column(present[name], len(ids)) if name in present else None
            for name in ("old_log_probs", "log_probs", "advantages")
        }
        # Top-k lists of both models: token ids and log-probs.
        lists = {name: _lists(record.get(name), are_ids=name.endswith("ids")) for name in _LISTS}
        mask = _flags(present["sampled_mask"]) if "sampled_mask" in present else torch.ones(len(ids), dtype=torch.bool)
        prompt_ids = _ids(present["prompt_ids"]) if "prompt_ids" in present else None
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise DamagedRecord(f"{name_in_messages}: {type(error).__name__}: {error}") from error

    columns = {"rollout_log_probs": rollout, **optional}
    for name, column in {"sampled_mask": mask, **columns, **lists}.items():
        if column is not None and len(column) != len(ids):
            raise DamagedRecord(f"{name_in_messages}: {name} has {len(column)} entries, there are {len(ids)} token_ids")
    _check_values(columns, lists, mask, name_in_messages)
    _check_lists(lists, mask, name_in_messages)

    # If the record has only one of the policy's two columns of log-probs, that one stands for both.
    old, new = optional["old_log_probs"], optional["log_probs"]
    return SavedResponse(
        uid=str(record.get("uid") or f"{where}#{index}"),
        sampled_by=record.get("sampled_by") or None,
        where=where,
        prompt_ids=prompt_ids,
        token_ids=ids,
        sampled_mask=mask,
        advantages=optional["advantages"],
        rollout_log_probs=rollout,
        old_log_probs=new if old is None else old,
        log_probs=old if new is None else new,
        **lists,
    )


def _ids(values: Any) -> Tensor:
    """Return token ids as int64 [T]. Raises ValueError unless all are whole numbers (3.0 is one), none below 0."""
    ids = torch.as_tensor(values)
    whole = ids.long()
    if ids.ndim != 1 or ids.dtype == torch.bool or (whole != ids).any() or (whole < 0).any():
        raise ValueError(f"token ids are whole numbers from 0 on in one row, and not {values!r:.60}")
    return whole


def _flags(values: Any) -> Tensor:
    """Return a mask as bool [T]. Raises ValueError unless all values are true and false, or 1 and 0."""
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
    """Return top-k lists as [T, K], int64 ids or float64 log-probs; None for missing or empty lists."""
    rows = torch.as_tensor([] if values is None else values, dtype=torch.int64 if are_ids else torch.float64)
    if not rows.numel():
        return None
    if rows.ndim != 2:
        raise ValueError(f"a top-k list has the shape [T, K], and not {list(rows.shape)}")
    return rows


def _check_values(
    columns: Mapping[str, Tensor | None], lists: Mapping[str, Tensor | None], mask: Tensor, where: str
) -> None:
    """Refuse impossible values at sampled tokens, such as NaN or log-probs above 0. Raises DamagedRecord.

    A single infinite number would make every mean over tokens infinite. Top-k lists may have -inf for tokens that
    cannot be sampled.
    """
    for name, column in (*columns.items(), *lists.items()):
        if column is None or name.endswith("ids"):
            continue

        sampled = column[mask]
        if name in lists and sampled.isnan().any():
            raise DamagedRecord(f"{where}: {name} has a NaN")
        if name in columns and not sampled.isfinite().all():
            value = sampled[~sampled.isfinite()][0]
            raise DamagedRecord(f"{where}: {name} has {value:g} at a sampled token. {_ADVICE}")
        if name.endswith("log_probs") and sampled.gt(1e-3).any():  # up to 1e-3 above 0 may be rounding
            raise DamagedRecord(f"{where}: {name} has {sampled.max():.4g}; {_above_0(sampled)}")
        if name == "rollout_log_probs" and sampled.exp().eq(0.0).any():
            raise DamagedRecord(
                f"{where}: {name} has {sampled.min():g}, a token that cannot have been sampled. {_ADVICE}"
            )


def _above_0(values: Tensor) -> str:
    """Say what a column of log-probs with values above 0 probably holds."""
    if values.min() < 0.0:
        return "a log-probability is at most 0"
    if values.max() <= 1.0:
        return "these are probabilities; write their logarithm"
    return "these are negative log-probs; write -x for x"


def _check_lists(lists: Mapping[str, Tensor | None], mask: Tensor, where: str) -> None:
    """Refuse a model's top-k lists whose ids and log-probs do not belong together, by a DamagedRecord.

    At tokens of `mask`, the sampled ones, also refuse lists that name a token twice or hold more than all probability,
    as the acceptance Z of OBRS cannot be computed from them. Entries of probability 0 may pad a list that is longer
    than the vocabulary.
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
        # Sorted ids show a repeated one beside itself; entries of probability 0 get distinct negative ids.
        sorted_ids = torch.where(probs > 0.0, ids[mask], -1 - torch.arange(ids.shape[1])).sort(-1).values
        if (sorted_ids[:, 1:] == sorted_ids[:, :-1]).any():
            raise DamagedRecord(f"{where}: {model}_top_ids name a token twice; pad a list with log-probs of -inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseBatch:
    """A batch of B saved responses, padded on the right to T tokens.

    Tensors are [B, T] float64 unless noted, and 0 where `mask` is False.
    """

    responses: tuple[SavedResponse, ...]
    mask: Tensor  # bool, True at tokens that the model sampled
    rollout: Tensor  # log-probs by the engine
    old: Tensor  # log-probs by the policy that received the batch
    new: Tensor  # log-probs by the policy that is updated
    advantages: Tensor


def response_batches(responses: Iterable[SavedResponse]) -> Iterator[list[SavedResponse]]:
    """Yield batches of responses in their order, each of at most `BATCH_TOKENS` tokens with padding.

    A response that alone has more tokens is a batch of its own.
    """
    return pack(responses, BATCH_TOKENS, lambda response: (0, len(response.token_ids)))


def collate(responses: Sequence[SavedResponse]) -> ResponseBatch:
    """Stack responses, which all have log-probs of the policy, into a padded batch; missing advantages become 1."""
    mask = pad_sequence([response.sampled_mask for response in responses], batch_first=True)

    def pad(rows: Iterable[Tensor]) -> Tensor:
        """Stack one column of all responses, [T] each, to [B, T], with 0 where the mask is False."""
        return torch.where(mask, pad_sequence(list(rows), batch_first=True), 0.0)

    return ResponseBatch(
        responses=tuple(responses),
        mask=mask,
        rollout=pad(response.rollout_log_probs for response in responses),
        old=pad(response.policy_log_probs[0] for response in responses),
        new=pad(response.policy_log_probs[1] for response in responses),
        advantages=pad(
            torch.ones_like(response.rollout_log_probs) if response.advantages is None else response.advantages
            for response in responses
        ),
    )
