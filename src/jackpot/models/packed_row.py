"""The layout of a micro-batch as one row without padding, and the plan of its attention; both are made on the CPU.

The row is a line of sequences: prompts and responses. Attention is planned in blocks, each of sequences of similar
lengths, padded to the longest of them: few blocks mean much padding, and many blocks mean many calls.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from jackpot.core.types import AttentionBlock, PackedRow

BLOCK_COST = 2048  # number of products of a query and a key that take as long on a CPU as one more block
# Most different lengths between which `_split` may cut the sequences into blocks: all lengths are first rounded up to
# multiples of a step that leaves no more.
MAX_LENGTHS = 48


class _Sequence(NamedTuple):
    """A run of tokens (queries) that attend causally to each other, and all to the prompt that they share, if any."""

    prompt_start: int  # index in the row of the first token of the prompt
    num_shared: int  # number of tokens of the prompt that are keys and not among the queries
    query_start: int  # index in the row of the first query
    num_queries: int

    @property
    def num_keys(self) -> int:
        """Return the number of tokens that the last query attends to."""
        return self.num_shared + self.num_queries


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
        prompt_start, prompt_size = total, len(prompt)
        pieces.append(torch.tensor(prompt))
        positions.append(torch.arange(prompt_size))
        total += prompt_size

        input_lengths = [max(0, lengths[index] - 1) for index in indices]  # without the last token, which predicts none
        is_alone = len(indices) == 1  # a prompt and its only response are one sequence
        num_queries = prompt_size + (input_lengths[0] if is_alone else 0)
        sequences.append(
            _Sequence(prompt_start=prompt_start, num_shared=0, query_start=prompt_start, num_queries=num_queries)
        )

        for index, length in zip(indices, input_lengths, strict=True):
            prompt_ends[index], starts[index] = prompt_start + prompt_size - 1, total
            if length:
                pieces.append(responses[index][:length])
                positions.append(torch.arange(prompt_size, prompt_size + length))
                if not is_alone:
                    sequences.append(
                        _Sequence(
                            prompt_start=prompt_start, num_shared=prompt_size, query_start=total, num_queries=length
                        )
                    )
                total += length

    # A response's first token is predicted by the prompt's last, each further token by the one before it.
    columns = torch.arange(max(lengths))  # the index of a token in its response
    token_before = torch.tensor(starts)[:, None] + columns - 1
    predicting = torch.where(columns == 0, torch.tensor(prompt_ends)[:, None], token_before)
    predicting = torch.where(columns < torch.tensor(lengths)[:, None], predicting, 0)

    return PackedRow(
        token_ids=torch.cat(pieces),
        positions=torch.cat(positions),
        predicting=predicting,
        # Two plans of attention; `table` is [sequences, 4], the fields of each sequence.
        **_block_fields(sequences, table=torch.tensor(sequences), size=total),
        **_sequence_fields(sequences, table=torch.tensor(sequences)),
    )


def _key_indices(table: Tensor, width: int) -> Tensor:
    """Return the indices in the packed row of the keys of some sequences, [sequences, width].

    The keys of a sequence are the shared tokens of its prompt, then its queries. Columns after the last key repeat it.

    Args:
        table: [sequences, 4], the fields of each `_Sequence`.
    """
    prompt_start, num_shared, query_start, num_queries = table.T[..., None]  # [sequences, 1] each
    nth_key = torch.minimum(torch.arange(width), num_shared + num_queries - 1)  # [sequences, width], counted from 0
    return torch.where(nth_key < num_shared, prompt_start + nth_key, query_start + nth_key - num_shared)


def _sequence_fields(sequences: Sequence[_Sequence], table: Tensor) -> dict:
    """Return `cu_*`, `sequence_keys` and `longest`, the fields of a `PackedRow` that plan attention without padding.

    `table` is [sequences, 4], the fields of each `_Sequence`.
    """
    queries, keys = [sequence.num_queries for sequence in sequences], [sequence.num_keys for sequence in sequences]
    exists = torch.arange(max(keys)) < torch.tensor(keys)[:, None]  # [sequences, most keys], False on padding
    return {
        "cu_queries": torch.tensor([0, *accumulate(queries)], dtype=torch.int32),
        "cu_keys": torch.tensor([0, *accumulate(keys)], dtype=torch.int32),
        "sequence_keys": _key_indices(table, max(keys))[exists],
        "longest": (max(queries), max(keys)),
    }


def _block_fields(sequences: Sequence[_Sequence], table: Tensor, size: int) -> dict:
    """Return `blocks` and `block_*`, the fields of a `PackedRow` of `size` tokens that plan attention in padded blocks.

    `table` is [sequences, 4], the fields of each `_Sequence`. A sequence is a row of a block; each token is a query.
    """
    blocks, positions = [], []
    queries, keys = [], []
    outputs = torch.empty(size, dtype=torch.int64)
    total = 0  # padded queries of all blocks so far

    for is_square in (True, False):
        candidates = [index for index, sequence in enumerate(sequences) if (sequence.num_shared == 0) == is_square]
        for members in _split(sequences, candidates):  # indices of the sequences of one block
            most_queries = max(sequences[index].num_queries for index in members)
            most_keys = max(sequences[index].num_keys for index in members)
            fields = table[members]
            _, num_shared, query_start, num_queries = fields.T[..., None]  # [members, 1] each

            # [members, most queries] each: the index of every query in the packed row, and the last key that it attends
            # to, counted from 0 among the keys of its sequence. Padding repeats the last query of its sequence.
            nth_query = torch.arange(most_queries)
            exists = nth_query < num_queries  # False on padding
            offsets = torch.minimum(nth_query, num_queries - 1)
            indices, last_keys = query_start + offsets, num_shared + offsets

            if is_square:
                last_keys = nth_query[None]  # as plain causal attention
            elif bool((last_keys == last_keys[:1]).all()):
                last_keys = last_keys[:1]  # all sequences have the same mask

            # Where each query that is no padding stands among the padded queries of all blocks.
            size_of_block = len(members) * most_queries
            outputs[indices[exists]] = total + torch.arange(size_of_block).view(-1, most_queries)[exists]
            total += size_of_block
            queries.append(indices.flatten())
            keys.append(_key_indices(fields, most_keys).flatten())
            positions.append(last_keys.flatten())
            blocks.append(
                AttentionBlock(
                    rows=len(members),
                    queries=most_queries,
                    keys=most_keys,
                    is_square=is_square,
                    masks=len(last_keys),
                )
            )

    return {
        "blocks": tuple(blocks),
        "block_queries": torch.cat(queries),
        "block_keys": torch.cat(keys),
        "block_positions": torch.cat(positions),
        "block_outputs": outputs,
    }


def _split(sequences: Sequence[_Sequence], indices: Sequence[int]) -> list[list[int]]:
    """Split the sequences at `indices` into the blocks of least cost, and return the indices of each block's sequences.

    The cost of a block is its padded products of queries and keys, plus `BLOCK_COST`. A block is a run of the sequences
    in the order of their lengths; the best runs are found by dynamic programming.
    """
    if not indices:
        return []

    indices = sorted(indices, key=lambda index: (sequences[index].num_queries, sequences[index].num_keys))
    ordered = [sequences[index] for index in indices]

    # A group: the sequences of one length, rounded up to a multiple of `step`, which leaves at most MAX_LENGTHS groups.
    # A block is one or more whole groups. `starts` and `ends` say where each group stands in `ordered`.
    step = -(-ordered[-1].num_queries // MAX_LENGTHS)  # -(-a // b) is a / b rounded up
    ends = [
        place + 1
        for place, sequence in enumerate(ordered)
        if place + 1 == len(ordered) or -(-ordered[place + 1].num_queries // step) > -(-sequence.num_queries // step)
    ]
    starts = [0, *ends[:-1]]
    most_keys = [
        max(sequence.num_keys for sequence in ordered[start:end]) for start, end in zip(starts, ends, strict=True)
    ]

    # best[n]: the least cost of the first n groups, and the group at which the last block of this solution begins.
    best: list[tuple[int, int]] = [(0, 0)]
    for last, end in enumerate(ends):
        width, depth = ordered[end - 1].num_queries, 0  # most queries and keys of a block from group `first` to `last`
        options: list[tuple[int, int]] = []  # (cost, first) of each solution whose last block begins at `first`
        for first in range(last, -1, -1):
            depth = max(depth, most_keys[first])
            block_cost = (end - starts[first]) * width * depth + BLOCK_COST
            options.append((best[first][0] + block_cost, first))
        best.append(min(options))

    blocks, num_groups = [], len(ends)  # blocks, the last first; number of groups in no block yet
    while num_groups:
        first = best[num_groups][1]
        blocks.append(indices[starts[first] : ends[num_groups - 1]])
        num_groups = first
    return blocks[::-1]  # the block of the shortest sequences first
