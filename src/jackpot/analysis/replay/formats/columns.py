"""Says by which names a library saves a response, and brings its columns into the form of `response_of`."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jackpot.analysis.replay.formats.records import DumpRecord
from jackpot.analysis.replay.responses import DamagedRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """Says by which names a library's record holds a response, and how its columns lie beside the tokens.

    Columns of tokens run along `ids`. They begin with it, or, where `at_end`, they end with it and may be shorter.
    """

    ids: str  # tokens of the response, behind those of the prompt unless `prompt` names them
    prompt: str | None = None
    present: tuple[str, ...] = ()  # one after the other: which tokens of prompt and ids are no padding
    masks: tuple[str, ...] = ()  # a token is sampled where all of these are that the record has; all tokens without
    length: tuple[str, ...] = ()  # tokens of the response, by the first of these names that the record has
    rollout_log_probs: str = "rollout_log_probs"
    old_log_probs: str = "old_log_probs"
    log_probs: str = ""  # of the policy that is updated; empty: the format does not have it
    advantages: str = "advantages"
    uid: tuple[str, ...] = ()  # parts of the id, as far as the record has them
    at_end: bool = False
    begins_sampled: bool = False  # the response begins with its first sampled token: columns cover the prompt too
    ends_sampled: bool = False  # it ends with its last one where `present` is missing: padding may follow


OURS = Columns(ids="token_ids", log_probs="log_probs")  # the names of `response_of`


def arranged(record: DumpRecord, names: Columns) -> dict[str, Any]:
    """Return the columns of `response_of` of a library's record: prompt and response apart, without padding.

    Raises:
        DamagedRecord: columns that do not fit each other. What holds no numbers raises errors of several kinds.
    """
    prompt = record.get(names.prompt) if names.prompt else None
    ids = torch.as_tensor(record[names.ids])
    sampled = _sampled(record, names, len(ids))
    if prompt is not None:
        ids = torch.cat([torch.as_tensor(prompt), ids])

    first = len(ids) - len(sampled)  # token at which the columns begin
    if first < 0:
        raise DamagedRecord(f"its columns have {len(sampled):,} entries, there are {len(ids):,} {names.ids}")
    present = _present(record, names, len(ids))

    kept = sampled.nonzero().flatten() + first
    begin, end = first, len(ids)
    if names.begins_sampled:
        begin = int(kept[0]) if len(kept) else end
    if names.ends_sampled and present is None:
        end = int(kept[-1]) + 1 if len(kept) else begin

    positions = torch.arange(len(ids)) if present is None else present.nonzero().flatten()
    response = positions[(positions >= begin) & (positions < end)]
    columns = {
        "uid": "/".join(str(record[theirs]) for theirs in names.uid if record.get(theirs) is not None),
        "prompt_ids": None if names.prompt and prompt is None else ids[positions[positions < begin]],
        "token_ids": ids[response],
        "sampled_mask": sampled[response - first],
    }
    for ours in ("rollout_log_probs", "old_log_probs", "log_probs", "advantages"):
        theirs = getattr(names, ours)
        if record.get(theirs) is not None:
            column = _numbers(record[theirs])
            if column.ndim:  # else one advantage for all tokens
                _check_length(theirs, column, len(sampled))
                column = column[response - first]
            columns[ours] = column
    return columns


def _sampled(record: DumpRecord, names: Columns, tokens: int) -> Tensor:
    """Return which tokens of those that the columns cover were sampled, of a record with so many tokens."""
    masks = {theirs: _numbers(record[theirs]).ne(0.0) for theirs in names.masks if record.get(theirs) is not None}
    lengths = [int(record[theirs]) for theirs in names.length if theirs in record]
    length = lengths[0] if lengths else tokens
    if names.at_end and not lengths:
        length = len(next(iter(masks.values())))
    sampled = torch.ones(length, dtype=torch.bool)
    for theirs, mask in masks.items():
        _check_length(theirs, mask, length)
        sampled = sampled & mask
    return sampled


def _check_length(name: str, column: Tensor, length: int) -> None:
    if len(column) != length:
        raise DamagedRecord(f"{name} has {len(column)} entries, there are {length} token_ids")


def _numbers(values: Any) -> Tensor:
    """Return a column as float64; None in a list is NaN."""
    return values.double() if isinstance(values, Tensor) else torch.from_numpy(np.asarray(values, dtype=np.float64))


def _present(record: DumpRecord, names: Columns, length: int) -> Tensor | None:
    """Return which tokens are no padding, [length]; None where the record does not say it."""
    masks = [torch.as_tensor(record[theirs]) for theirs in names.present if record.get(theirs) is not None]
    if not masks:
        return None
    present = torch.cat(masks).ne(0)
    has_prompt = not names.prompt or record.get(names.prompt) is not None
    if len(present) < length or (has_prompt and len(present) > length):
        raise DamagedRecord(f"{' + '.join(names.present)}: {len(present)} entries, there are {length} tokens")
    return present[-length:]
