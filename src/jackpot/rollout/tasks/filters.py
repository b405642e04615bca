"""The problems of one split by index: all of them in memory, or a stream of them.

Rows without an answer, rows whose answer is too long to be judged and rows that do not fit are left out and counted.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from jackpot.core.errors import DataError
from jackpot.rollout.rewards.verifier.extract import MAX_ANSWER_LENGTH
from jackpot.rollout.tasks.data import DataRow, DataSource

Fits = Callable[[list[DataRow]], list[bool]]
REMEMBERED = 4096  # problems of a stream that can be had again without reading it anew
_AT_ONCE = 256  # rows


@dataclass(slots=True)
class RowCounts:
    """What became of the rows that were read."""

    rows: int = 0
    without_answer: int = 0
    long_answer: int = 0  # more than `MAX_ANSWER_LENGTH` characters
    too_long: int = 0

    @property
    def kept(self) -> int:
        return self.rows - self.left_out

    @property
    def left_out(self) -> int:
        return self.without_answer + self.long_answer + self.too_long


class Problems:
    """All problems of a split.

    Raises:
        DataError: as `DataSource.rows`, no problem is left, or two rows have one id (names both).
    """

    def __init__(self, source: DataSource, fits: Fits) -> None:
        self.tally = RowCounts()
        self._rows = list(_kept(source, fits, self.tally))
        _check_unique(self._rows)

    @property
    def size(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> DataRow:
        return self._rows[index]


class StreamedProblems:
    """Problems in the order of their source, which begins anew when it ends; no more than `REMEMBERED` are held.

    Problem number `index` is always the same, so a position is all that a resumed run needs. The price: a problem
    before the remembered ones, or far ahead after a resume, costs reading the source from its first row. The second
    time that the source is read, ids have `+1` behind them, then `+2`.

    Raises:
        DataError: as `DataSource.rows` when the row is reached; or the source holds no problem that is kept.
    """

    size = None

    def __init__(self, source: DataSource, fits: Fits) -> None:
        self._source, self._fits = source, fits
        self._tally = self._fullest = RowCounts()  # of this reading, and of the one before it that came furthest
        self._begin()

    @property
    def tally(self) -> RowCounts:
        """Of the rows that were read so far, each counted once."""
        return max(self._fullest, self._tally, key=lambda tally: tally.rows)

    def __getitem__(self, index: int) -> DataRow:
        if index < self._next - len(self._remembered):
            self._begin()
        while index >= self._next:
            self._remembered.append(self._read())
            self._next += 1
        return self._remembered[index - self._next]

    def _begin(self) -> None:
        self._reading, self._pass, self._next = self._open(), 0, 0
        self._remembered: deque[DataRow] = deque(maxlen=REMEMBERED)

    def _open(self) -> Iterator[DataRow]:
        self._fullest, self._tally = self.tally, RowCounts()
        return _kept(self._source, self._fits, self._tally)

    def _read(self) -> DataRow:
        row = next(self._reading, None)
        if row is None:
            self._pass, self._reading = self._pass + 1, self._open()
            row = next(self._reading)
        return row._replace(uid=f"{row.uid}+{self._pass}") if self._pass else row


def _kept(source: DataSource, fits: Fits, tally: RowCounts) -> Iterator[DataRow]:
    """The rows that can be used.

    Raises:
        DataError: there is none.
    """
    for batch in _batches(source.rows()):
        answered = [row for row in batch if row.answer is not None]
        judged = [row for row in answered if len(row.answer) <= MAX_ANSWER_LENGTH]
        chosen = [row for row, fitting in zip(judged, fits(judged), strict=True) if fitting]
        tally.rows += len(batch)
        tally.without_answer += len(batch) - len(answered)
        tally.long_answer += len(answered) - len(judged)
        tally.too_long += len(judged) - len(chosen)
        yield from chosen
    if not tally.kept:
        raise DataError(
            f"{source.name}: no problem is left of {tally.rows} rows: {tally.without_answer} have no answer (see "
            f"columns.answer and answers), {tally.long_answer} have an answer of more than "
            f"{MAX_ANSWER_LENGTH:,} characters, {tally.too_long} have more tokens than max_prompt_tokens"
        )


def _batches(rows: Iterable[DataRow]) -> Iterator[list[DataRow]]:
    rows = iter(rows)
    while batch := list(islice(rows, _AT_ONCE)):
        yield batch


def _check_unique(rows: Iterable[DataRow]) -> None:
    places: dict[str, str] = {}
    for row in rows:
        if row.uid in places:
            raise DataError(
                f"{row.place} has the id {row.uid!r}, as {places[row.uid]} has; ids must differ: mend the data, or set "
                f"columns.uid to another column, or to row, which makes ids of the row's number"
            )
        places[row.uid] = row.place
