"""Which tokens a correction takes most from: by token, and the worst places with their context."""

import heapq
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from jackpot.analysis.replay.factors import Factors
from jackpot.analysis.replay.responses import Batch, Response

MOST = 5
_CONTEXT = 12  # tokens before it
_CANDIDATES = 4_096  # tokens that are counted by name; the rarest are forgotten beyond that


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Place:
    """A token whose gradient the correction changes much."""

    change: float  # |A| |F - rho|
    text: str  # the token
    context: str  # what stands before it
    position: int
    ratio: float  # rho
    factor: float  # E F
    accepted: float


class MostChanged:
    """Over all batches, of one correction."""

    def __init__(self) -> None:
        self._rejected: Counter[str] = Counter()
        self._worst: list[Place] = []

    def add(self, batch: Batch, found: Factors, ratio: Tensor) -> None:
        self._count(batch, found)
        change = torch.where(batch.mask, batch.advantages.abs() * (found.mean - ratio).abs(), 0.0)
        for flat in change.flatten().topk(min(MOST, change.numel())).indices.tolist():
            row, column = divmod(flat, change.shape[1])
            if (size := float(change[row, column])) > 0.0:
                self._worst.append(_place(batch.responses[row], row, column, size, found, ratio))
        self._worst = heapq.nlargest(MOST, self._worst)

    @property
    def rejected(self) -> tuple[tuple[str, float], ...]:
        """The tokens of which most were rejected, and how many; coins as their expectation."""
        return tuple((text, count) for text, count in self._rejected.most_common(MOST) if count > 0.0)

    @property
    def worst(self) -> tuple[Place, ...]:
        return tuple(self._worst)

    def _count(self, batch: Batch, found: Factors) -> None:
        rows, columns = ((found.accepted < 1.0) & batch.mask).nonzero(as_tuple=True)
        lost = (1.0 - found.accepted)[rows, columns]
        ids, place = batch.token_ids[rows, columns].unique(return_inverse=True)
        sums = torch.zeros(len(ids), dtype=lost.dtype).index_add(0, place, lost)
        examples = torch.zeros(len(ids), dtype=torch.int64).scatter(0, place, torch.arange(len(place)))
        for count, example in zip(sums.tolist(), examples.tolist(), strict=True):
            self._rejected[_text(batch.responses[int(rows[example])], int(columns[example]))] += count
        if len(self._rejected) > 2 * _CANDIDATES:
            self._rejected = Counter(dict(self._rejected.most_common(_CANDIDATES)))


def _place(response: Response, row: int, column: int, change: float, found: Factors, ratio: Tensor) -> Place:
    return Place(
        change=change,
        text=_text(response, column),
        context="".join(_text(response, place) for place in range(max(0, column - _CONTEXT), column)),
        position=column,
        ratio=float(ratio[row, column]),
        factor=float(found.mean[row, column]),
        accepted=float(found.accepted[row, column]),
    )


def _text(response: Response, place: int) -> str:
    return response.tokens[place] if response.tokens else f"<{int(response.token_ids[place])}>"
