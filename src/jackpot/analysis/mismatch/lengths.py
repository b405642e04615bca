"""Compares the gap of one long response with that of several short ones to the same prompt.

This is the control of the TIS post: several short responses together have as many tokens as a long one, and so as many
chances of a large gap. A larger gap of the long one comes from its length. The beginning of the long one, of a short
one's length, shows whether the difference comes from the last tokens only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from jackpot.analysis.mismatch.measure import HIGH_GAP
from jackpot.core.statistics import Estimate, Sample


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthRow:
    """The gaps of one kind of response to every prompt; means and errors over prompts."""

    name: str
    tokens: float  # mean number of tokens per prompt
    max_gap: Estimate  # largest |p - q| per prompt
    mean_gap: Estimate  # mean |p - q| per prompt
    high: int  # prompts whose largest gap is above HIGH_GAP
    each: tuple[float, ...]  # the largest gap to every prompt, largest first


def compare_lengths(long: Sequence[Tensor], short: Sequence[Sequence[Tensor]], limit: int) -> tuple[LengthRow, ...]:
    """Return a row each for the long response, its beginning, the first short one and all short ones.

    Args:
        long: |p - q| of the long response to each prompt, [N] each.
        short: |p - q| of the short responses to the same prompts, in the same order; equally many to each.
        limit: most tokens of a short response, and of the beginning.

    Prompts with an empty response are left out.
    """
    pairs = [(one, several) for one, several in zip(long, short, strict=True) if len(one) and all(map(len, several))]
    if not pairs:
        return ()
    count = len(pairs[0][1])
    texts = {
        f"1 of up to {limit * count} tokens": [[one] for one, _ in pairs],
        f"its first {limit} tokens": [[one[:limit]] for one, _ in pairs],
        f"1 of up to {limit} tokens": [[several[0]] for _, several in pairs],
        f"{count} of up to {limit} tokens": [list(several) for _, several in pairs],
    }
    return tuple(_row(name, each) for name, each in texts.items())


def _row(name: str, texts: Sequence[Sequence[Tensor]]) -> LengthRow:
    largest = [max(float(gaps.max()) for gaps in parts) for parts in texts]
    tokens = [sum(map(len, parts)) for parts in texts]
    means = [sum(float(gaps.sum()) for gaps in parts) / n for parts, n in zip(texts, tokens, strict=True)]
    return LengthRow(
        name=name,
        tokens=sum(tokens) / len(tokens),
        max_gap=Sample(tuple(largest)).estimate,
        mean_gap=Sample(tuple(means)).estimate,
        high=sum(gap > HIGH_GAP for gap in largest),
        each=tuple(sorted(largest, reverse=True)),
    )
