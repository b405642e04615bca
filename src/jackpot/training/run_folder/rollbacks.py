"""Keeps in rollbacks.json how often a run went back to an earlier checkpoint, and how small its steps are since then.

The trainer orders a rollback by one write, and ends. The start that follows carries it out: while it is pending nothing
is trained, so that a kill at any moment leaves it ordered or done.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jackpot.core.errors import CheckpointError
from jackpot.core.files import write_whole


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollback:
    """Describes one return to an earlier checkpoint."""

    back_from: int  # iteration after which the collapse was found
    back_to: int  # iteration of the checkpoint that the run continues from
    rate_factor: float  # of every learning rate since then, those of earlier rollbacks included
    why: str
    is_pending: bool = True  # ordered, and not yet carried out

    @property
    def facts(self) -> dict[str, Any]:
        """Return what an event says about it."""
        return {name: value for name, value in asdict(self).items() if name != "is_pending"}


class Rollbacks:
    """Reads and writes the rollbacks of the run in a folder.

    Raises:
        CheckpointError: rollbacks.json is damaged.
    """

    def __init__(self, run: Path) -> None:
        self.path = run / "rollbacks.json"
        try:
            self.all = [Rollback(**one) for one in json.loads(self.path.read_text())] if self.path.exists() else []
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"{self.path} cannot be read: {error}. Bring it back from a copy: the learning rates depend on it"
            ) from error

    @property
    def pending(self) -> Rollback | None:
        """Return the rollback that the next start has to carry out; None for none."""
        return self.all[-1] if self.all and self.all[-1].is_pending else None

    @property
    def rate_factor(self) -> float:
        """Return the factor of every learning rate."""
        return self.all[-1].rate_factor if self.all else 1.0

    def order(self, rollback: Rollback) -> None:
        """Add a rollback that the next start carries out."""
        self._write([*self.all, rollback])

    def complete(self) -> None:
        """Record that the pending rollback has been carried out."""
        self._write([*self.all[:-1], replace(self.all[-1], is_pending=False)])

    def _write(self, rollbacks: Sequence[Rollback]) -> None:
        write_whole(self.path, (json.dumps([asdict(one) for one in rollbacks], indent=2) + "\n").encode())
        self.all = list(rollbacks)
