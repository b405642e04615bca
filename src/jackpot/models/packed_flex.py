"""Attention over a packed row by torch's flex attention, which skips blocks of 128 x 128 tokens without a visible pair.

It is for GPUs where flash attention over several lengths does not work: above all for fp32.

Status: experimental. It has run on one H200.
"""

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from jackpot.core.types import PackedRow
from jackpot.models.packed_row import pack_row

BLOCK = 128  # tokens of a block
_VARIANTS = 64  # most kernels that are compiled: one for each window, number of heads, with gradient or not

Flex = Callable[..., Tensor]  # a function with the arguments of torch's `flex_attention`


def block_mask(row: PackedRow, window: int | None) -> BlockMask:
    """Return which tokens of the row each token attends to: those up to it in its sequence, and those of its prompt.

    The mask is made from the positions where sequences begin, without a tensor of all pairs of tokens.

    Args:
        window: number of tokens that a token attends to, itself included; None for all tokens up to it.
    """
    size, positions = len(row.positions), row.positions
    starts, indices = row.cu_queries[:-1], torch.arange(len(row.cu_queries) - 1, device=positions.device)
    sequence = torch.repeat_interleave(indices, row.cu_queries.diff(), output_size=size)  # [S], of each token

    is_prompt = positions.index_select(0, starts) == 0  # a response's positions go on behind those of its prompt
    prompts = torch.where(is_prompt, indices, 0).cummax(0).values  # [sequences], the last prompt up to each sequence
    prompt = prompts.index_select(0, sequence)  # [S], the sequence that is the prompt of each token

    def sees(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Tell whether the token with the index `query` attends to that with the index `key`, in any head."""
        is_visible = (sequence[key] == sequence[query]) | (sequence[key] == prompt[query])
        is_visible = is_visible & (positions[key] <= positions[query])
        return is_visible if window is None else is_visible & (positions[key] > positions[query] - window)

    # For each block of tokens, [blocks] each: its first and last token, the sequences of these two, and the prompt that
    # the first token sees.
    first = torch.arange(0, size, BLOCK, device=positions.device)
    last = (first + BLOCK - 1).clamp(max=size - 1)
    first_sequence, last_sequence = sequence.index_select(0, first), sequence.index_select(0, last)
    first_prompt = prompt.index_select(0, first)

    # Masks [blocks, blocks]: rows are blocks of queries, columns blocks of keys.
    # True where the block of keys has tokens of the first query's prompt. Other prompts of the block of queries begin
    # inside of that block, so no earlier block of keys has them.
    has_prompt = (first_sequence <= first_prompt[:, None]) & (first_prompt[:, None] <= last_sequence)
    # True where some query may see some key: the block of keys is no later than that of the queries, and has tokens of
    # the first query's sequence, of a later sequence, or of the first query's prompt.
    is_partly_visible = ((last_sequence >= first_sequence[:, None]) | has_prompt) & (first <= first[:, None])
    is_single = first_sequence == last_sequence  # [blocks], True where all tokens of a block are of one sequence
    # True where each query sees each key: the block of keys is an earlier one, and all its tokens are of one sequence,
    # the queries' own or their prompt.
    is_all_visible = (
        is_single
        & is_single[:, None]
        & ((first_sequence == first_sequence[:, None]) | (first_sequence == first_prompt[:, None]))
        & (first < first[:, None])
    )
    if window is not None:  # also the last query has to see the first key
        is_all_visible = is_all_visible & (
            positions.index_select(0, last)[:, None] - positions.index_select(0, first) < window
        )

    # For each block of queries: how many blocks of keys it sees in part, and which; how many it sees whole, and which.
    counts_and_lists = [*_listed(is_partly_visible & ~is_all_visible), *_listed(is_all_visible)]
    return BlockMask.from_kv_blocks(*counts_and_lists, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(size, size))


def _listed(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many True entries each row of a mask [n, n] has, as [1, 1, n], and which columns, as [1, 1, n, n].

    A row's list of columns begins with those of its True entries; the other columns follow.
    """
    columns = mask.int().argsort(dim=1, descending=True, stable=True)
    return mask.sum(dim=1, dtype=torch.int32)[None, None], columns.int()[None, None]


@cache
def flex_kernel(dtype: torch.dtype, size: int, value_size: int, groups: int) -> Flex | None:
    """Return the compiled kernel for heads of these sizes; None without Triton and, with a warning, if it fails.

    Args:
        size: size of a head of the queries and keys.
        value_size: size of a head of the values.
        groups: query heads that share a key head.
    """
    if importlib.util.find_spec("triton") is None:
        return None

    compiled = torch.compile(flex_attention, dynamic=True, fullgraph=True)
    compiled = torch._dynamo.config.patch(recompile_limit=_VARIANTS)(compiled)  # beyond it torch raises an error
    # Rows of fewer than 128 tokens would get the kernel for decoding, which does not take blocks of varying sizes.
    kernel = partial(compiled, kernel_options={"BACKEND": "TRITON"})

    device = torch.device("cuda")
    try:
        # A trial of forward and backward, which compiles both, on one sequence of two blocks.
        mask = block_mask(_row(2 * BLOCK, device), None)
        with torch.enable_grad():  # backward is compiled too
            query, key, value = (
                torch.zeros(1, heads, 2 * BLOCK, width, dtype=dtype, device=device, requires_grad=True)
                for heads, width in ((2 * groups, size), (2, size), (2, value_size))
            )
            kernel(query, key, value, block_mask=mask, scale=size**-0.5, enable_gqa=groups > 1).sum().backward()
    except Exception as error:
        warnings.warn(f"flex attention cannot be compiled here, attention in blocks serves: {error}", stacklevel=2)
        return None
    return kernel


def _row(tokens: int, device: torch.device) -> PackedRow:
    """Return a packed row of one prompt; the fields of it that `block_mask` reads are on `device`."""
    row = pack_row([[0] * tokens], [0], [torch.zeros(1, dtype=torch.int64)])  # a response of 1 token adds no input
    return replace(row, positions=row.positions.to(device), cu_queries=row.cu_queries.to(device))
