"""The layout of a micro-batch as one row without padding, and the plan of its attention; both are made on the CPU.

Attention is planned as blocks of rows of similar lengths, each padded to the longest: few blocks mean much padding, and
many blocks mean many calls.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from jackpot.core.types import AttentionBlock, PackedRow

BLOCK_COST = 2048  # products of a query and a key that take as long as one more block, on a CPU
# Most different lengths of sequences, in tokens, after which `_split` considers ending a block; lengths are rounded up
# where there would be more.
MAX_LENGTHS = 48


class _Sequence(NamedTuple):
    """A run of tokens, the queries, which attend causally to each other, and all of them to a prompt before them."""

    prompt: int  # index of the first token of the prompt
    shared: int  # tokens of the prompt that are keys and not among the queries
    start: int  # index of the first query
    queries: int

    @property
    def keys(self) -> int:
        """Return the number of tokens that the last query attends to."""
        return self.shared + self.queries


def pack_row(prompts: Sequence[Sequence[int]], prompt_index: Sequence[int], responses: Sequence[Tensor]) -> PackedRow:
    """Lay out prompts and responses as one row.

    Args:
        prompts: token ids of the distinct prompts, U of them; each has a response.
        prompt_index: the prompt of each response, [B].
        responses: token ids [T] int64 of each response; may be empty.
    """
    responses_of: list[list[int]] = [[] for _ in prompts]  # for each prompt, the indices of its responses
    for index, prompt in enumerate(prompt_index):
        responses_of[prompt].append(index)

    lengths = [len(response) for response in responses]
    sequences: list[_Sequence] = []
    pieces, positions = [], []  # pieces of the row: token ids, and positions counted from the start of the prompt
    total = 0  # tokens of the row so far
    # For each response, the index in the row of its prompt's last token, and that of its own first token.
    prompt_ends, starts = [0] * len(responses), [0] * len(responses)

    for prompt, indices in zip(prompts, responses_of, strict=True):
        first, size = total, len(prompt)
        pieces.append(torch.tensor(prompt))
        positions.append(torch.arange(size))
        total += size

        input_lengths = [max(0, lengths[index] - 1) for index in indices]  # without the last token
        is_alone = len(indices) == 1  # a prompt and its only response are one sequence
        sequences.append(_Sequence(first, 0, first, size + (input_lengths[0] if is_alone else 0)))

        for index, length in zip(indices, input_lengths, strict=True):
            prompt_ends[index], starts[index] = first + size - 1, total
            if length:
                pieces.append(responses[index][:length])
                positions.append(torch.arange(size, size + length))
                if not is_alone:
                    sequences.append(_Sequence(first, size, total, length))
                total += length

    # A response's first token is predicted by the prompt's last, each further token by the one before it.
    columns = torch.arange(max(lengths))
    token_before = torch.tensor(starts)[:, None] + columns - 1
    predicting = torch.where(columns == 0, torch.tensor(prompt_ends)[:, None], token_before)
    predicting = torch.where(columns < torch.tensor(lengths)[:, None], predicting, 0)

    return PackedRow(
        token_ids=torch.cat(pieces),
        positions=torch.cat(positions),
        predicting=predicting,
        **_blocks(sequences, torch.tensor(sequences), total),
        **_sequences(sequences, torch.tensor(sequences)),
    )


def _key_indices(table: Tensor, width: int) -> Tensor:
    """Return the indices in the packed row of the keys of some sequences, [rows, width].

    The keys of a sequence are the shared tokens of its prompt, then its queries. Columns after the last key repeat it.

    Args:
        table: [rows, 4], the fields of each `_Sequence`.
    """
    prompt_start, num_shared, query_start, num_queries = table.T[..., None]  # [rows, 1] each
    nth_key = torch.minimum(torch.arange(width), num_shared + num_queries - 1)  # [rows, width], counted from 0
    return torch.where(nth_key < num_shared, prompt_start + nth_key, query_start + nth_key - num_shared)


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
    blocks, positions = [], []
    queries, keys = [], []
    outputs = torch.empty(size, dtype=torch.int64)
    total = 0  # padded queries of all blocks so far

    for is_square in (True, False):
        candidates = [row for row, sequence in enumerate(sequences) if (sequence.shared == 0) == is_square]
        for members in _split(sequences, candidates):
            width, depth = max(sequences[row].queries for row in members), max(sequences[row].keys for row in members)
            rows = table[members]
            _, shared, start, lengths = rows.T[..., None]

            # [members, width] each: the index of every query in the packed row, and the place of the last key that the
            # query attends to among the keys of its sequence, from 0. Padding repeats the last query of its sequence.
            columns = torch.arange(width)
            exists = columns < lengths
            offsets = torch.minimum(columns, lengths - 1)
            indices, last = start + offsets, shared + offsets

            if is_square:
                last = columns[None]  # as plain causal attention
            elif bool((last == last[:1]).all()):
                last = last[:1]  # all rows have the same mask

            outputs[indices[exists]] = total + torch.arange(len(members) * width).view(-1, width)[exists]
            total += len(members) * width
            queries.append(indices.flatten())
            keys.append(_key_indices(rows, depth).flatten())
            positions.append(last.flatten())
            blocks.append(AttentionBlock(len(members), width, depth, is_square, len(last)))

    return {
        "blocks": tuple(blocks),
        "block_queries": torch.cat(queries),
        "block_keys": torch.cat(keys),
        "block_positions": torch.cat(positions),
        "block_outputs": outputs,
    }


def _split(sequences: Sequence[_Sequence], rows: Sequence[int]) -> list[list[int]]:
    """Split the sequences `rows` into blocks of least cost: padded products of queries and keys, plus `BLOCK_COST`.

    Blocks are runs of the sequences in the order of their lengths, found by dynamic programming.
    """
    if not rows:
        return []

    rows = sorted(rows, key=lambda row: (sequences[row].queries, sequences[row].keys))
    ordered = [sequences[row] for row in rows]

    # A block may end only after the last sequence of a length, rounded up to a multiple of `step`.
    step = -(-ordered[-1].queries // MAX_LENGTHS)
    ends = [
        index + 1
        for index, sequence in enumerate(ordered)
        if index + 1 == len(ordered) or -(-ordered[index + 1].queries // step) > -(-sequence.queries // step)
    ]
    starts = [0, *ends[:-1]]
    depths = [max(sequence.keys for sequence in ordered[start:end]) for start, end in zip(starts, ends, strict=True)]

    # best[n]: the least cost of all sequences of the first n lengths, and the length at which the last block begins.
    best: list[tuple[int, int]] = [(0, 0)]
    for last, end in enumerate(ends):
        width, depth = ordered[end - 1].queries, 0
        options: list[tuple[int, int]] = []
        for first in range(last, -1, -1):
            depth = max(depth, depths[first])
            options.append((best[first][0] + (end - starts[first]) * width * depth + BLOCK_COST, first))
        best.append(min(options))

    blocks, last = [], len(ends)  # read backwards
    while last:
        first = best[last][1]
        blocks.append(rows[starts[first] : ends[last - 1]])
        last = first
    return blocks[::-1]
