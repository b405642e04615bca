"""Lay the tokens of a micro-batch out as one row without padding, and plan its attention; on the CPU, in collate.

Everything but attention looks at one token at a time, so a row without padding costs what its tokens cost. Attention
is planned as blocks: rows of similar lengths, padded to the longest, whose number weighs the padding of few blocks
against the cost of each further call.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from jackpot.core.types import AttentionBlock, PackedRow

BLOCK_COST = 2048  # products of a query and a key that take as long as one more block, on a CPU
MAX_LENGTHS = 48  # different lengths that blocks are chosen among; more are rounded up


class _Sequence(NamedTuple):
    """Holds queries that attend causally to themselves and to tokens before them."""

    prompt: int  # index of the first token of the prompt
    shared: int  # tokens of the prompt that are keys and no queries
    start: int  # index of the first query
    queries: int

    @property
    def keys(self) -> int:
        return self.shared + self.queries


def pack_row(prompts: Sequence[Sequence[int]], prompt_index: Sequence[int], responses: Sequence[Tensor]) -> PackedRow:
    """Lay out prompts and responses as one row.

    Args:
        prompts: token ids of the distinct prompts, U of them; each has a response.
        prompt_index: the prompt of each response, [B].
        responses: token ids [T] int64 of each response; may be empty.
    """
    of_prompt: list[list[int]] = [[] for _ in prompts]
    for index, prompt in enumerate(prompt_index):
        of_prompt[prompt].append(index)

    lengths = [len(response) for response in responses]
    total, sequences, parts, positions = 0, [], [], []
    before, starts = [0] * len(responses), [0] * len(responses)  # of the prompt's last token, of the response

    for prompt, members in zip(prompts, of_prompt, strict=True):
        first, size = total, len(prompt)
        parts.append(torch.tensor(prompt))
        positions.append(torch.arange(size))
        total += size
        reads = [max(0, lengths[index] - 1) for index in members]
        is_alone = len(members) == 1
        sequences.append(_Sequence(first, 0, first, size + (reads[0] if is_alone else 0)))

        for index, read in zip(members, reads, strict=True):
            before[index], starts[index] = first + size - 1, total
            if read:
                parts.append(responses[index][:read])
                positions.append(torch.arange(size, size + read))
                if not is_alone:
                    sequences.append(_Sequence(first, size, total, read))
                total += read

    width = max(lengths)
    columns = torch.arange(width)
    predicting = torch.where(columns == 0, torch.tensor(before)[:, None], torch.tensor(starts)[:, None] + columns - 1)
    predicting = torch.where(columns < torch.tensor(lengths)[:, None], predicting, 0)

    return PackedRow(
        token_ids=torch.cat(parts),
        positions=torch.cat(positions),
        predicting=predicting,
        **_blocks(sequences, torch.tensor(sequences), total),
        **_sequences(sequences, torch.tensor(sequences)),
    )


def _key_indices(table: Tensor, width: int) -> Tensor:
    """Return the indices of the keys of some sequences, [rows, width]; columns behind the last key repeat it."""
    prompt, shared, start, queries = table.T[..., None]
    columns = torch.minimum(torch.arange(width), shared + queries - 1)
    return torch.where(columns < shared, prompt + columns, start + columns - shared)


def _sequences(sequences: Sequence[_Sequence], table: Tensor) -> dict:
    """Plan attention over sequences of their own lengths, in the order of the row."""
    queries, keys = [sequence.queries for sequence in sequences], [sequence.keys for sequence in sequences]
    exists = torch.arange(max(keys)) < torch.tensor(keys)[:, None]
    return {
        "cu_queries": torch.tensor([0, *accumulate(queries)], dtype=torch.int32),
        "cu_keys": torch.tensor([0, *accumulate(keys)], dtype=torch.int32),
        "sequence_keys": _key_indices(table, max(keys))[exists],
        "longest": (max(queries), max(keys)),
    }


def _blocks(sequences: Sequence[_Sequence], table: Tensor, size: int) -> dict:
    """Plan attention in blocks of padded rows, over a row of `size` tokens."""
    blocks, queries, keys, positions, outputs, done = [], [], [], [], torch.empty(size, dtype=torch.int64), 0
    for is_square in (True, False):
        for part in _split(
            sequences, [row for row, sequence in enumerate(sequences) if (sequence.shared == 0) == is_square]
        ):
            width, depth = max(sequences[row].queries for row in part), max(sequences[row].keys for row in part)
            rows = table[part]

            shared, start, lengths = (column[:, None] for column in rows.T[1:])
            columns = torch.arange(width)
            indices, exists = start + torch.minimum(columns, lengths - 1), columns < lengths
            last = shared + torch.minimum(columns, lengths - 1)
            if is_square:
                last = columns[None]  # as plain causal attention
            elif bool((last == last[:1]).all()):
                last = last[:1]

            outputs[indices[exists]] = done + torch.arange(len(part) * width).view(-1, width)[exists]
            done += len(part) * width
            queries.append(indices.flatten())
            keys.append(_key_indices(rows, depth).flatten())
            positions.append(last.flatten())
            blocks.append(AttentionBlock(len(part), width, depth, is_square, len(last)))

    return {
        "blocks": tuple(blocks),
        "block_queries": torch.cat(queries),
        "block_keys": torch.cat(keys),
        "block_positions": torch.cat(positions),
        "block_outputs": outputs,
    }


def _split(sequences: Sequence[_Sequence], rows: Sequence[int]) -> list[list[int]]:
    """Split some of the sequences into blocks of the least cost: products of queries and keys, and `BLOCK_COST` each.

    Blocks are runs of them in the order of their lengths, found by a dynamic programme.
    """
    if not rows:
        return []

    rows = sorted(rows, key=lambda row: (sequences[row].queries, sequences[row].keys))
    ordered = [sequences[row] for row in rows]

    step = -(-ordered[-1].queries // MAX_LENGTHS)
    ends = [
        index + 1
        for index, sequence in enumerate(ordered)
        if index + 1 == len(ordered) or -(-ordered[index + 1].queries // step) > -(-sequence.queries // step)
    ]
    starts = [0, *ends[:-1]]
    depths = [max(sequence.keys for sequence in ordered[start:end]) for start, end in zip(starts, ends, strict=True)]

    best: list[tuple[int, int]] = [(0, 0)]  # the least cost of the first runs, and where their last block begins
    for last, end in enumerate(ends):
        width, depth, options = ordered[end - 1].queries, 0, []
        for first in range(last, -1, -1):
            depth = max(depth, depths[first])
            options.append((best[first][0] + (end - starts[first]) * width * depth + BLOCK_COST, first))
        best.append(min(options))

    blocks, last = [], len(ends)
    while last:
        first = best[last][1]
        blocks.append(rows[starts[first] : ends[last - 1]])
        last = first
    return blocks[::-1]
