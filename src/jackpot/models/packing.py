"""Cut rows of tokens into batches that fit a token budget; training, engines and every analysis cut with this."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from jackpot.core.types import Rollout

_Row = TypeVar("_Row")


def pack(
    rows: Iterable[_Row], budget: int, lengths: Callable[[_Row], tuple[int, int]], pads: bool = True
) -> Iterator[list[_Row]]:
    """Yield runs of neighbouring rows, each as long as the budget allows and at least one row long.

    A padded run of B rows takes B * (P + T) tokens: its prompts are padded to the longest of them, P tokens, and its
    responses to the longest of them, T tokens. The order of the rows stays, and `rows` is read no further than the next
    run.

    Args:
        rows: prompts with a response each.
        budget: the most tokens of a run; a single longer row makes a run of its own.
        lengths: gives the tokens of a row's prompt and of its response.
        pads: count padding; False to count the tokens of each row, its prompt included.
    """
    run: list[_Row] = []
    longest_prompt = longest_response = total = 0
    for row in rows:
        prompt, response = lengths(row)
        longest_prompt, longest_response = max(longest_prompt, prompt), max(longest_response, response)
        total += prompt + response
        if run and ((len(run) + 1) * (longest_prompt + longest_response) if pads else total) > budget:
            yield run
            run, longest_prompt, longest_response, total = [], prompt, response, prompt + response
        run.append(row)
    if run:
        yield run


def rollout_lengths(rollout: Rollout) -> tuple[int, int]:
    """Return the tokens of a rollout's prompt and of its response, as `pack` takes them."""
    return len(rollout.prompt.token_ids), len(rollout.token_ids)
