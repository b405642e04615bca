"""A micro-batch as one row: every token once, each query with the keys of its own sequence, and little padding."""

import random
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jackpot.core.types import PackedRow
from jackpot.models.packed_row import pack_row

FEW_EXAMPLES = settings(max_examples=40, deadline=None, derandomize=True, database=None)
BATCHES = st.lists(st.tuples(st.integers(1, 5), st.lists(st.integers(0, 7), min_size=1, max_size=4)), min_size=1)


def row_of(groups: list[tuple[int, list[int]]]) -> tuple[PackedRow, list[list[int]], list[int], list[torch.Tensor]]:
    """Pack groups, each a prompt's length with the lengths of its responses; every token has an id of its own."""
    ids = iter(range(10**6))
    prompts = [[next(ids) for _ in range(length)] for length, _ in groups]
    pairs = []  # each response with the index of its prompt
    for prompt_index, (_, lengths) in enumerate(groups):
        for length in lengths:
            tokens = torch.tensor([next(ids) for _ in range(length)], dtype=torch.int64)
            pairs.append((prompt_index, tokens))
    pairs = random.Random(0).sample(pairs, len(pairs))
    prompt_indices = [prompt_index for prompt_index, _ in pairs]
    responses = [tokens for _, tokens in pairs]
    return pack_row(prompts, prompt_indices, responses), prompts, prompt_indices, responses


def keys_by_block(row: PackedRow) -> dict[int, list[int]]:
    """Return the ids of each token's keys by its id, as the blocks have them."""
    keys_of_token: dict[int, list[int]] = {}
    queries = row.block_queries.split([block.rows * block.queries for block in row.blocks])
    keys = row.block_keys.split([block.rows * block.keys for block in row.blocks])
    last_columns = row.block_positions.split([block.masks * block.queries for block in row.blocks])
    output_indices = set(row.block_outputs.tolist())
    start = 0
    for block, q, k, ends in zip(row.blocks, queries, keys, last_columns, strict=True):
        ends = ends.view(-1, block.queries).expand(block.rows, -1).flatten()
        for index, (position, end) in enumerate(zip(q.tolist(), ends.tolist(), strict=True)):
            key_positions = k.view(block.rows, -1)[index // block.queries, : end + 1]
            assert len(key_positions) == end + 1
            if start + index in output_indices:
                assert row.block_outputs[position] == start + index
                keys_of_token[int(row.token_ids[position])] = row.token_ids[key_positions].tolist()
            assert not block.is_square or ends[index] == index % block.queries
        start += len(q)
    return keys_of_token


def keys_by_sequence(row: PackedRow) -> dict[int, list[int]]:
    """Return the same as sequences of their own lengths have them, queries aligned with the last keys."""
    keys_of_token = {}
    ends = row.cu_queries.tolist()
    key_ends = row.cu_keys.tolist()
    for index, (start, end) in enumerate(pairwise(ends)):
        keys = row.token_ids[row.sequence_keys[key_ends[index] : key_ends[index + 1]]].tolist()
        for position in range(start, end):
            keys_of_token[int(row.token_ids[position])] = keys[: len(keys) - (end - position) + 1]
    return keys_of_token


@FEW_EXAMPLES
@given(BATCHES)
def test_every_token_attends_to_its_sequence_before_it_alone(groups) -> None:
    row, prompts, prompt_indices, responses = row_of(groups)
    expected_keys = {}
    for prompt_index, response in zip(prompt_indices, responses, strict=True):
        tokens = [*prompts[prompt_index], *response.tolist()[:-1]]
        expected_keys |= {token: tokens[: position + 1] for position, token in enumerate(tokens)}

    assert sorted(row.token_ids.tolist()) == sorted(expected_keys)
    assert keys_by_block(row) == expected_keys
    assert keys_by_sequence(row) == expected_keys
    assert row.positions.tolist() == [len(expected_keys[token]) - 1 for token in row.token_ids.tolist()]
    assert row.longest == (int(row.cu_queries.diff().max()), int(row.cu_keys.diff().max()))  # queries, keys

    for prompt_index, response, positions in zip(prompt_indices, responses, row.predicting, strict=True):
        tokens = [*prompts[prompt_index], *response.tolist()]
        assert row.token_ids[positions[: len(response)]].tolist() == tokens[len(prompts[prompt_index]) - 1 : -1]


def test_the_example_of_the_types_is_right() -> None:
    responses = [torch.tensor(ids) for ids in ([8, 9, 1], [1], [9, 1])]
    row = pack_row([[5, 6], [7]], [0, 0, 1], responses)

    assert row.token_ids.tolist() == [5, 6, 8, 9, 7, 9]
    assert row.positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert row.predicting.tolist() == [[1, 2, 3], [1, 0, 0], [4, 5, 0]]
    assert row.cu_queries.tolist() == [0, 2, 4, 6]
    assert row.cu_keys.tolist() == [0, 2, 6, 8]
    assert row.sequence_keys.tolist() == [0, 1, 0, 1, 2, 3, 4, 5]


def drawn_groups(
    prompts: range, group: int, responses: tuple[int, int], mean: float | None
) -> list[tuple[int, list[int]]]:
    """Return 32 groups with lengths drawn like those of a run, of responses uniform or, with a mean, geometric."""
    draw = random.Random(0)

    def length() -> int:
        return draw.randint(*responses) if mean is None else min(responses[1], 1 + int(draw.expovariate(1 / mean)))

    return [(draw.choice(prompts), [length() for _ in range(group)]) for _ in range(32)]


def test_layers_read_what_exists_and_attention_little_more() -> None:
    """Quickstart and study (short sums), benchmarks/step.py (64 tokens each), and a long ragged shape."""
    most_computed = {"short": 1.3, "fixed": 1.1, "ragged": 1.3}  # pairs, of those that are needed
    shapes = {
        "short": drawn_groups(prompts=range(6, 9), group=8, responses=(1, 32), mean=9.0),
        "fixed": drawn_groups(prompts=range(36, 54), group=8, responses=(64, 64), mean=None),
        "ragged": drawn_groups(prompts=range(30, 300), group=8, responses=(1, 256), mean=None),
    }
    for name, groups in shapes.items():
        row, *_ = row_of(groups)

        # of a response all but the last token
        token_count = sum(prompt + sum(max(0, length - 1) for length in lengths) for prompt, lengths in groups)
        assert len(row.token_ids) == token_count

        computed_pairs = sum(block.rows * block.queries * block.keys for block in row.blocks)
        needed_pairs = int((row.cu_queries.diff() * row.cu_keys.diff()).sum())
        assert computed_pairs <= most_computed[name] * needed_pairs
