"""A micro-batch as one row: every token once, each query with the keys of its own sequence, and little padding."""

import random
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jackpot.core.types import PackedRow
from jackpot.models.packed_row import pack_row

few = settings(max_examples=40, deadline=None, derandomize=True, database=None)
batches = st.lists(st.tuples(st.integers(1, 5), st.lists(st.integers(0, 7), min_size=1, max_size=4)), min_size=1)


def row_of(groups: list[tuple[int, list[int]]]) -> tuple[PackedRow, list[list[int]], list[int], list[torch.Tensor]]:
    """Pack groups, each a prompt's length with the lengths of its responses; every token has an id of its own."""
    ids = iter(range(10**6))
    prompts = [[next(ids) for _ in range(length)] for length, _ in groups]
    index = [number for number, (_, responses) in enumerate(groups) for _ in responses]
    responses = [
        torch.tensor([next(ids) for _ in range(length)], dtype=torch.int64) for _, of in groups for length in of
    ]
    order = random.Random(0).sample(range(len(index)), len(index))
    index, responses = [index[number] for number in order], [responses[number] for number in order]
    return pack_row(prompts, index, responses), prompts, index, responses


def before(row: PackedRow) -> dict[int, list[int]]:
    """The ids of each token's keys by its id, as the blocks have them."""
    found: dict[int, list[int]] = {}
    queries = row.block_queries.split([block.rows * block.queries for block in row.blocks])
    keys = row.block_keys.split([block.rows * block.keys for block in row.blocks])
    last = row.block_positions.split([block.masks * block.queries for block in row.blocks])
    kept, start = set(row.block_outputs.tolist()), 0
    for block, q, k, ends in zip(row.blocks, queries, keys, last, strict=True):
        ends = ends.view(-1, block.queries).expand(block.rows, -1).flatten()
        for number, (place, end) in enumerate(zip(q.tolist(), ends.tolist(), strict=True)):
            mine = k.view(block.rows, -1)[number // block.queries, : end + 1]
            assert len(mine) == end + 1
            if start + number in kept:
                assert row.block_outputs[place] == start + number
                found[int(row.token_ids[place])] = row.token_ids[mine].tolist()
            assert not block.is_square or ends[number] == number % block.queries
        start += len(q)
    return found


def before_by_sequence(row: PackedRow) -> dict[int, list[int]]:
    """The same as sequences of their own lengths have them, queries aligned with the last keys."""
    found = {}
    ends = row.cu_queries.tolist()
    key_ends = row.cu_keys.tolist()
    for number, (start, end) in enumerate(pairwise(ends)):
        keys = row.token_ids[row.sequence_keys[key_ends[number] : key_ends[number + 1]]].tolist()
        for place in range(start, end):
            found[int(row.token_ids[place])] = keys[: len(keys) - (end - place) + 1]
    return found


@few
@given(batches)
def test_every_token_attends_to_its_sequence_before_it_alone(groups) -> None:
    row, prompts, index, responses = row_of(groups)
    expected = {}
    for number, response in zip(index, responses, strict=True):
        tokens = [*prompts[number], *response.tolist()[:-1]]
        expected |= {token: tokens[: place + 1] for place, token in enumerate(tokens)}

    assert sorted(row.token_ids.tolist()) == sorted(expected)
    assert before(row) == before_by_sequence(row) == expected
    assert row.positions.tolist() == [len(expected[token]) - 1 for token in row.token_ids.tolist()]
    assert row.longest == (int(row.cu_queries.diff().max()), int(row.cu_keys.diff().max()))

    for number, response, places in zip(index, responses, row.predicting, strict=True):
        tokens = [*prompts[number], *response.tolist()]
        assert row.token_ids[places[: len(response)]].tolist() == tokens[len(prompts[number]) - 1 : -1]


def test_the_example_of_the_types_is_right() -> None:
    row = pack_row([[5, 6], [7]], [0, 0, 1], [torch.tensor(ids) for ids in ([8, 9, 1], [1], [9, 1])])

    assert row.token_ids.tolist() == [5, 6, 8, 9, 7, 9]
    assert row.positions.tolist() == [0, 1, 2, 3, 0, 1]
    assert row.predicting.tolist() == [[1, 2, 3], [1, 0, 0], [4, 5, 0]]
    assert row.cu_queries.tolist() == [0, 2, 4, 6]
    assert row.cu_keys.tolist() == [0, 2, 6, 8]
    assert row.sequence_keys.tolist() == [0, 1, 0, 1, 2, 3, 4, 5]


def shape(prompts: range, group: int, responses: tuple[int, int], mean: float | None) -> list[tuple[int, list[int]]]:
    """Groups with lengths drawn like those of a run: response lengths uniform or, with a mean, geometric and cut."""
    draw = random.Random(0)

    def length() -> int:
        return draw.randint(*responses) if mean is None else min(responses[1], 1 + int(draw.expovariate(1 / mean)))

    return [(draw.choice(prompts), [length() for _ in range(group)]) for _ in range(32)]


def test_layers_read_what_exists_and_attention_little_more() -> None:
    """Quickstart and study (short sums), benchmarks/step.py (64 tokens each), and a long ragged shape."""
    shapes = {
        "short": shape(range(6, 9), 8, (1, 32), 9.0),
        "fixed": shape(range(36, 54), 8, (64, 64), None),
        "ragged": shape(range(30, 300), 8, (1, 256), None),
    }
    for name, groups in shapes.items():
        row = row_of(groups)[0]
        exist = sum(prompt + sum(max(0, length - 1) for length in of) for prompt, of in groups)
        assert len(row.token_ids) == exist
        computed = sum(block.rows * block.queries * block.keys for block in row.blocks)
        needed = int((row.cu_queries.diff() * row.cu_keys.diff()).sum())

        assert computed <= {"short": 1.3, "fixed": 1.1, "ragged": 1.3}[name] * needed
