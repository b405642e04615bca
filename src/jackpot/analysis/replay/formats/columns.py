"""The names and layout of the columns in which a library saves a response, and the translation to our columns."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jackpot.analysis.replay.formats.records import DumpRecord
from jackpot.analysis.replay.responses import DamagedRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The names of the columns in which a library (verl, slime, ...) saves a response, and how the columns line up.

    A column with one number for each token has its first number at the first token of the column `ids`; or, with
    `at_end`, its last number at the last token of `ids`, and then it may be shorter than `ids`.
    """

    ids: str  # column of the response's tokens; without `prompt`, of the tokens of prompt and response
    prompt: str | None = None  # column of the prompt's tokens; None: they are in `ids`
    present: tuple[str, ...] = ()  # attention masks, 0 at padding, which joined in this order cover prompt and `ids`
    masks: tuple[str, ...] = ()  # a token is sampled if none of these columns is 0 at the token; columns may be missing
    length: tuple[str, ...] = ()  # columns with the response's number of tokens; the first in a record counts
    rollout_log_probs: str = "rollout_log_probs"
    old_log_probs: str = "old_log_probs"
    log_probs: str = ""  # log-probs of the policy that is updated; empty: the format does not have them
    advantages: str = "advantages"
    uid: tuple[str, ...] = ()  # columns whose values, joined by /, make the response's uid; columns may be missing
    at_end: bool = False
    begins_sampled: bool = False  # True: columns cover the prompt too; the response begins with the first sampled token
    ends_sampled: bool = False  # True: padding may follow; without `present`, the last sampled token ends the response


OURS = Columns(ids="token_ids", log_probs="log_probs")  # the names that `response_of` takes


def translate(record: DumpRecord, names: Columns) -> dict[str, Any]:
    """Translate a library's record to our columns, as `response_of` takes them: prompt and response apart, no padding.

    Args:
        record: the library's columns by name.
        names: names and layout of these columns.

    Raises:
        DamagedRecord: columns that do not fit each other. Columns without numbers raise errors of other kinds.
    """
    prompt = record.get(names.prompt) if names.prompt else None
    ids = torch.as_tensor(record[names.ids])
    sampled = _sampled(record, names, len(ids))
    if prompt is not None:
        ids = torch.cat([torch.as_tensor(prompt), ids])

    # `ids` are now all tokens. The columns with a number for each token cover the last of them, from index `first` on.
    first = len(ids) - len(sampled)
    if first < 0:
        raise DamagedRecord(f"its columns have {len(sampled):,} entries, there are {len(ids):,} {names.ids}")
    present = _present(record, names, len(ids))

    # The response is the tokens from index `begin` to before `end`, without padding. Where no column says where it
    # begins (`begins_sampled`) or ends (`ends_sampled`, without `present`), its first or last sampled token does.
    sampled_at = sampled.nonzero().flatten() + first
    begin, end = first, len(ids)
    if names.begins_sampled:
        begin = int(sampled_at[0]) if len(sampled_at) else end
    if names.ends_sampled and present is None:
        end = int(sampled_at[-1]) + 1 if len(sampled_at) else begin

    # Our columns are the library's, cut to the response's tokens.
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
            column = _as_floats(record[theirs])
            if column.ndim:  # a column of no dimension is one advantage for all tokens
                _check_length(theirs, column, len(sampled))
                column = column[response - first]
            columns[ours] = column

    return columns


def _sampled(record: DumpRecord, names: Columns, tokens: int) -> Tensor:
    """Return a bool mask, True at sampled tokens, of the tokens for which the other columns have one number each.

    Args:
        record: the library's columns by name.
        names: names and layout of these columns.
        tokens: number of tokens in the column `ids`.
    """
    masks = {theirs: _as_floats(record[theirs]).ne(0.0) for theirs in names.masks if record.get(theirs) is not None}
    # How many tokens the columns cover: what a column states, else the length of a mask if `at_end`, else all tokens.
    lengths = [int(record[theirs]) for theirs in names.length if theirs in record]
    length = lengths[0] if lengths else tokens
    if names.at_end and not lengths:
        length = len(next(iter(masks.values())))  # of the first mask; the loop below checks the others

    sampled = torch.ones(length, dtype=torch.bool)
    for theirs, mask in masks.items():
        _check_length(theirs, mask, length)
        sampled = sampled & mask

    return sampled


def _check_length(name: str, column: Tensor, length: int) -> None:
    """Raise DamagedRecord if a column does not have `length` entries."""
    if len(column) != length:
        raise DamagedRecord(f"{name} has {len(column)} entries, there are {length} token_ids")


def _as_floats(values: Any) -> Tensor:
    """Return a column as float64; None in a list is NaN."""
    return values.double() if isinstance(values, Tensor) else torch.from_numpy(np.asarray(values, dtype=np.float64))


def _present(record: DumpRecord, names: Columns, length: int) -> Tensor | None:
    """Return a mask of the last `length` tokens, False at padding, [length], from attention masks; None without any.

    Several masks, such as of prompt and of response, are joined. Raises DamagedRecord if their length does not fit.
    """
    masks = [torch.as_tensor(record[theirs]) for theirs in names.present if record.get(theirs) is not None]
    if not masks:
        return None

    present = torch.cat(masks).ne(0)
    # If the record lacks the prompt's column, `length` does not count the prompt; only then may masks be longer.
    counts_prompt = not names.prompt or record.get(names.prompt) is not None
    if len(present) < length or (counts_prompt and len(present) > length):
        raise DamagedRecord(f"{' + '.join(names.present)}: {len(present)} entries, there are {length} tokens")
    return present[-length:]
