"""The cut of rows of tokens into batches that fit a token budget, for training, engines and every analysis."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from jackpot.core.types import Rollout

FORWARD_TOKENS = 8_192  # tokens, padding included, of a forward pass that trains nothing
_Row = TypeVar("_Row")


def pack(
    rows: Iterable[_Row], budget: int, lengths: Callable[[_Row], tuple[int, int]], pads: bool = True
) -> Iterator[list[_Row]]:
    """Yield runs of neighbouring rows, each as long as the budget allows and at least one row long.

    A padded run of B rows takes B * (P + T) tokens: its prompts are padded to the longest prompt, P tokens, and its
    responses to the longest response, T tokens. The rows stay in their order, and `rows` is read no further than the
    first row after a run.

    Args:
        rows: prompts with a response each.
        budget: the most tokens of a run; a single longer row makes a run of its own.
        lengths: gives the number of tokens of a row's prompt, and that of its response.
        pads: count padding; False to count the tokens of each row, its prompt included.
    """
    run: list[_Row] = []
    longest_prompt = longest_response = total = 0  # tokens of the run so far and the next row
    for row in rows:
        prompt, response = lengths(row)
        longest_prompt, longest_response = max(longest_prompt, prompt), max(longest_response, response)
        total += prompt + response

        size = (len(run) + 1) * (longest_prompt + longest_response) if pads else total
        if run and size > budget:
            yield run
            run, total = [], prompt + response
            longest_prompt, longest_response = prompt, response
        run.append(row)

    if run:
        yield run


def rollout_lengths(rollout: Rollout) -> tuple[int, int]:
    """Return the number of tokens of a rollout's prompt, and that of its response, as `pack` takes them."""
    return len(rollout.prompt.token_ids), len(rollout.token_ids)
