"""One long response against several short ones to the same prompts.

The post's control: several short responses together have as many tokens as a long one, and so as many chances of a
large gap. What a long one has beyond theirs comes from its length. Its beginning, as long as a short one, shows whether
it comes from its last tokens alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from jackpot.analysis.mismatch.measure import HIGH_GAP, Estimate, mean_of


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthRow:
    """One kind of text to every prompt. Means and errors over prompts."""

    name: str
    tokens: float  # to a prompt, mean
    max_gap: Estimate  # largest |p - q| to a prompt
    mean_gap: Estimate
    high: int  # prompts whose largest gap is above HIGH_GAP
    each: tuple[float, ...]  # the largest gap to every prompt, largest first


def long_against_short(long: Sequence[Tensor], short: Sequence[Sequence[Tensor]], limit: int) -> tuple[LengthRow, ...]:
    """The rows: the long response, its beginning, the first of the short ones, all of them.

    Args:
        long: |p - q| of the long response to each prompt, [N] each.
        short: of the short ones to the same prompts, in the same order; as many to each.
        limit: tokens of a short one, and of the beginning.

    Prompts with an empty response, of which nothing can be said, are left out.
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
        max_gap=mean_of(largest),
        mean_gap=mean_of(means),
        high=sum(gap > HIGH_GAP for gap in largest),
        each=tuple(sorted(largest, reverse=True)),
    )
