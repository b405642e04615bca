"""Collects the tokens that a correction rejects most, and the examples whose gradient it changes most."""

import heapq
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from jackpot.analysis.replay.factors import GradientFactors
from jackpot.analysis.replay.responses import ResponseBatch, SavedResponse

MOST = 5  # tokens and examples that are kept
_CONTEXT = 12  # tokens shown before an example
_COUNTED = 4_096  # distinct tokens that are counted; beyond twice as many the rarest are dropped


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class TokenExample:
    """A sampled token whose gradient the correction changes much."""

    change: float  # |A| |F - rho|
    text: str  # the token
    context: str  # the tokens before it
    position: int
    ratio: float  # rho
    factor: float  # E F
    accepted: float


class TopRejected:
    """Collects over all batches the tokens that one correction rejects or changes most."""

    def __init__(self) -> None:
        self._rejected: Counter[str] = Counter()
        self._worst: list[TokenExample] = []

    def add(self, batch: ResponseBatch, factors: GradientFactors, ratio: Tensor) -> None:
        """Add a batch with the correction's factors and rho, [B, T] each."""
        self._count(batch, factors)
        change = torch.where(batch.mask, batch.advantages.abs() * (factors.mean - ratio).abs(), 0.0)
        for flat in change.flatten().topk(min(MOST, change.numel())).indices.tolist():
            row, column = divmod(flat, change.shape[1])
            if (size := float(change[row, column])) > 0.0:
                self._worst.append(_example(batch.responses[row], row, column, size, factors, ratio))
        self._worst = heapq.nlargest(MOST, self._worst)

    @property
    def rejected(self) -> tuple[tuple[str, float], ...]:
        """Return the tokens rejected most often, and the expected number of rejections."""
        return tuple((text, count) for text, count in self._rejected.most_common(MOST) if count > 0.0)

    @property
    def worst(self) -> tuple[TokenExample, ...]:
        """Return the tokens whose gradient the correction changes most, largest change first."""
        return tuple(self._worst)

    def _count(self, batch: ResponseBatch, factors: GradientFactors) -> None:
        rows, columns = ((factors.accepted < 1.0) & batch.mask).nonzero(as_tuple=True)
        lost = (1.0 - factors.accepted)[rows, columns]
        ids, index = batch.token_ids[rows, columns].unique(return_inverse=True)
        sums = torch.zeros(len(ids), dtype=lost.dtype).index_add(0, index, lost)
        examples = torch.zeros(len(ids), dtype=torch.int64).scatter(0, index, torch.arange(len(index)))
        for count, example in zip(sums.tolist(), examples.tolist(), strict=True):
            self._rejected[_text(batch.responses[int(rows[example])], int(columns[example]))] += count
        if len(self._rejected) > 2 * _COUNTED:
            self._rejected = Counter(dict(self._rejected.most_common(_COUNTED)))


def _example(
    response: SavedResponse, row: int, column: int, change: float, factors: GradientFactors, ratio: Tensor
) -> TokenExample:
    return TokenExample(
        change=change,
        text=_text(response, column),
        context="".join(_text(response, index) for index in range(max(0, column - _CONTEXT), column)),
        position=column,
        ratio=float(ratio[row, column]),
        factor=float(factors.mean[row, column]),
        accepted=float(factors.accepted[row, column]),
    )


def _text(response: SavedResponse, position: int) -> str:
    return response.tokens[position] if response.tokens else f"<{int(response.token_ids[position])}>"
